# SPDX-License-Identifier: Apache-2.0
"""A cache for programs without an engine."""
