# SPDX-License-Identifier: Apache-2.0
"""LRU: evicts the least recently used block."""

from __future__ import annotations


class LRUPolicy:
    """Selects LRU for an index. It is no `EvictionPolicy` and has no methods, because an index
    knows the order of uses itself."""
