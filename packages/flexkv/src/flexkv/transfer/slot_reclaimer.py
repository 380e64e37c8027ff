# SPDX-License-Identifier: Apache-2.0
"""Reclaims slots from blocks that wait to be written to lower tiers, for fetches and stores.

A waiting block cannot be evicted. If a fetch or a store finds no slot, writes that have not begun
are cancelled. The newest go first, because a block is of use only after its predecessors.

A fetch that a request waits for cancels writes to any tier: a block that is used now is worth more
than one that may be used later. A store of the engine cancels only writes to shared stores, which
may be slow or hang. It cancels no write to a disk, because one of two new blocks would be lost
either way.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.index.block_index import BlockIndex
from flexkv.tiers.base import AskedTier, BlockResult
from flexkv.transfer.demote import Demoter, EvictionWriteback


class SlotReclaimer:
    """Frees slots of the arena. Single-threaded.

    Args:
        index: index of the arena; the caller's.
        demoters: the writers of all tiers, those of the fastest first.
        writeback: learns of each write that has ended.
    """

    def __init__(
        self, index: BlockIndex, demoters: Sequence[Demoter], writeback: EvictionWriteback
    ) -> None:
        self._index = index
        self._demoters = demoters
        self._writeback = writeback
        self._reads: dict[Demoter, list[BlockResult]] = {each: [] for each in demoters}

    def poll(self, demoter: Demoter) -> list[BlockResult]:
        """Take the results of a demoter's tier. Returns the results of reads since the last
        call."""
        self._take(demoter)
        reads, self._reads[demoter] = self._reads[demoter], []
        return reads

    def forget(self) -> None:
        """Discard all results."""
        for results in self._reads.values():
            results.clear()

    def make_for_fetch(self) -> bool:
        """If the arena has no free or evictable slot, cancel some waiting writes, those to the
        slowest tier first. Returns whether a slot may have become free."""
        return self._make(self._demoters)

    def make_for_store(self) -> bool:
        """`make_for_fetch`, but cancel only writes to shared stores."""
        return self._make([each for each in self._demoters if _is_shared(each)])

    def _make(self, demoters: Sequence[Demoter]) -> bool:
        if self._index.has_room:
            return False
        return any(self._take_back(demoter) for demoter in reversed(demoters))

    def _take_back(self, demoter: Demoter) -> bool:
        newest = demoter.drop_newest()
        for block in newest:
            self._writeback.wrote(demoter, block)
        if newest:
            return True
        for ticket in demoter.tickets:
            demoter.source.tier.cancel(ticket)
            if self._take(demoter):
                return True
        return False

    def _take(self, demoter: Demoter) -> bool:
        """Take the results of a tier. Results of reads are kept for `poll`, because the caller may
        be in the middle of a fetch. Returns whether a write has ended."""
        ended = False
        for result in demoter.source.tier.poll():
            if demoter.is_write(result.ticket):
                self._writeback.wrote(demoter, demoter.take(result))
                ended = True
            else:
                self._reads[demoter].append(result)
        return ended


def _is_shared(demoter: Demoter) -> bool:
    return isinstance(demoter.source.tier, AskedTier)
