# SPDX-License-Identifier: Apache-2.0
"""Beside vLLM's scheduler, once per engine: what is loaded and stored. Nothing here blocks."""
