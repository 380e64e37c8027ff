# SPDX-License-Identifier: Apache-2.0
"""Blocks that are written to lower tiers shortly before they leave the arena."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.index import Block, BlockIndex
from flexkv.transfer.demote import Demoter

_LEAVING_SHARE = 8
"""With admission on eviction, an eighth of the arena is kept free or on its way out: of 16 GiB 2,
what some long prompts store before a disk has written as much. What exceeds it is evicted
unwritten."""


class Leaving:
    """Leases the blocks that would be evicted next until each tier that wants them has written
    them, and evicts them then. Single-threaded.

    Args:
        index: of the arena.
        demoters: of the tiers that blocks are written to on eviction.
    """

    def __init__(self, index: BlockIndex, demoters: Sequence[Demoter]) -> None:
        self._index = index
        self._demoters = demoters
        self._leaving: dict[Block, set[Demoter]] = {}

    def make_room(self) -> None:
        """Write what would be evicted next."""
        demoters = [demoter for demoter in self._demoters if not demoter.paused]
        if not demoters:
            return
        goal = -(-self._index.num_slots // _LEAVING_SHARE)
        victims: list[Block] = []
        while self._index.free_slots + len(self._leaving) < goal:
            victim = self._index.lease_victim()
            if victim is None:
                break
            self._leaving[victim] = set()
            victims.append(victim)
        for demoter in demoters if victims else ():
            for victim in demoter.write_leaving(victims):
                self._leaving[victim].add(demoter)
        for victim in victims:
            self._retire_written(victim)

    def wrote(self, demoter: Demoter, block: Block) -> None:
        """The write of a block to a tier has ended."""
        if block in self._leaving:
            self._leaving[block].discard(demoter)
            self._retire_written(block)

    def _retire_written(self, block: Block) -> None:
        if not self._leaving[block]:
            del self._leaving[block]
            self._index.retire(block)
