# SPDX-License-Identifier: Apache-2.0
"""A real SGLang on a machine without a GPU: its installation, what it lacks there, and a server."""
