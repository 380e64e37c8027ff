# SPDX-License-Identifier: Apache-2.0
"""The copies between an engine's pages and host memory, in the processes of its ranks."""
