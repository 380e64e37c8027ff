# SPDX-License-Identifier: Apache-2.0
"""Beside each of vLLM's workers, one per GPU: the copies between its pages and the arena."""
