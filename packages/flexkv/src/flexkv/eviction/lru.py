# SPDX-License-Identifier: Apache-2.0
"""LRU: evicts the least recently used block."""

from __future__ import annotations

from flexkv.eviction.policy import NO_GUARD, GuardState


class LRUPolicy:
    """Selects LRU for an index. It is no `EvictionPolicy`: an index knows the order of uses
    itself."""

    def guard_state(self) -> GuardState:
        """LRU needs no guard."""
        return NO_GUARD
