# SPDX-License-Identifier: Apache-2.0
"""Writes of blocks to lower tiers shortly before the arena evicts them."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.index import Block, BlockIndex
from flexkv.transfer.demote import Demoter, share_of

_LEAVING_SHARE = 8
"""With admission on eviction, an eighth of the arena is free or being written: 2 of 16 GiB, which
some long prompts fill before a disk has written as much. If stores need more, blocks are evicted
unwritten. Not tuned."""


class Leaving:
    """Leases the blocks that would be evicted next, and evicts each once every tier that admits it
    has written it. Single-threaded.

    Args:
        index: index of the arena; the caller's.
        demoters: the writers of the tiers whose admission is on eviction.
    """

    def __init__(self, index: BlockIndex, demoters: Sequence[Demoter]) -> None:
        self._index = index
        self._demoters = demoters
        self._leaving: dict[Block, set[Demoter]] = {}

    def make_room(self) -> None:
        """Choose some of the blocks that would be evicted next, and let demoters write them. Once
        each poll."""
        demoters = [demoter for demoter in self._demoters if not demoter.paused]
        if not demoters:
            return
        goal = -(-self._index.num_slots // _LEAVING_SHARE)
        lacking = goal - self._index.free_slots - len(self._leaving)
        victims: list[Block] = []
        for _ in range(min(lacking, share_of(lacking))):
            victim = self._index.lease_victim()
            if victim is None:
                break
            self._leaving[victim] = set(demoters)
            victims.append(victim)
        for demoter in demoters:
            demoter.write_leaving(victims)

    def wrote(self, demoter: Demoter, block: Block) -> None:
        """Note that `demoter` has written `block` or does not write it, and evict the block if no
        other demoter is to write it."""
        writers = self._leaving.get(block)
        if writers is None:
            return
        writers.discard(demoter)
        if not writers:
            del self._leaving[block]
            self._index.retire(block)
