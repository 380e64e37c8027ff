# SPDX-License-Identifier: Apache-2.0
"""Writes of blocks to lower tiers shortly before the arena evicts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flexkv.index import Block, BlockIndex
from flexkv.transfer.demote import Demoter, share_of

_LEAVING_SHARE = 8
"""With admission on eviction, an eighth of the arena is free or being written: 2 of 16 GiB, which
some long prompts fill before a disk has written as much. If stores need more, blocks are evicted
unwritten. Not tuned."""


class Leaving:
    """Leases the blocks that would be evicted next, and evicts each once every tier that admits it
    has written it, the end of a prefix first: a block may be used meanwhile, and then all that it
    builds on stays. Single-threaded.

    Args:
        index: index of the arena; the caller's.
        demoters: the writers of the tiers whose admission is on eviction.
    """

    def __init__(self, index: BlockIndex, demoters: Sequence[Demoter]) -> None:
        self._index = index
        self._demoters = demoters
        self._leaving: dict[Block, set[Demoter]] = {}
        self._behind: Counter[Block] = Counter()  # how many of these build on a block

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
            if victim.parent is not None:
                self._behind[victim.parent] += 1
            victims.append(victim)
        for demoter in demoters:
            demoter.write_leaving(victims)

    def forget(self) -> None:
        """No block leaves, because the index has ended all leases."""
        self._leaving.clear()
        self._behind.clear()

    def wrote(self, demoter: Demoter, block: Block) -> None:
        """Note that `demoter` has written `block` or does not write it, and evict the block if no
        other demoter is to write it, and none is to write a block that builds on it."""
        writers = self._leaving.get(block)
        if writers is None:
            return
        writers.discard(demoter)
        last: Block | None = block
        while last is not None and self._leaving.get(last) == set() and last not in self._behind:
            del self._leaving[last]
            self._index.retire(last)
            last = last.parent
            if last is not None:
                self._behind[last] -= 1
                if not self._behind[last]:
                    del self._behind[last]
