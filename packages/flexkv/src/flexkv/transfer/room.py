# SPDX-License-Identifier: Apache-2.0
"""Slots for fetches and stores that find none, because blocks wait to be written to shared stores.

Blocks that wait for a tier cannot be evicted. A store on a network may be slow or hang, and a write
to it is best effort. So a write that has not begun gives its slots up, the newest first: blocks of
a prefix are of use to other engines only behind their predecessors.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.index import BlockIndex
from flexkv.tiers.base import AskedTier, BlockResult
from flexkv.transfer.demote import Demoter
from flexkv.transfer.leaving import Leaving


class Room:
    """Makes room in the arena. Single-threaded.

    Args:
        index: index of the arena; the caller's.
        demoters: the writers of all tiers, those of the fastest first.
        leaving: learns of each write that has ended.
    """

    def __init__(self, index: BlockIndex, demoters: Sequence[Demoter], leaving: Leaving) -> None:
        self._index = index
        self._demoters = demoters
        self._leaving = leaving
        self._reads: dict[Demoter, list[BlockResult]] = {each: [] for each in demoters}

    def poll(self, demoter: Demoter) -> list[BlockResult]:
        """Take the results of a demoter's tier. Returns those of reads since the last call."""
        self._take(demoter)
        reads, self._reads[demoter] = self._reads[demoter], []
        return reads

    def make(self) -> bool:
        """If the arena has no slot to give, take back some waiting writes to a shared store; the
        slowest store comes first. Returns whether there may be a slot now that was not before."""
        if self._index.has_room:
            return False
        return any(self._take_back(demoter) for demoter in reversed(self._demoters))

    def _take_back(self, demoter: Demoter) -> bool:
        if not isinstance(demoter.source.tier, AskedTier):
            return False
        newest = demoter.drop_newest()
        for block in newest:
            self._leaving.wrote(demoter, block)
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
                self._leaving.wrote(demoter, demoter.take(result))
                ended = True
            else:
                self._reads[demoter].append(result)
        return ended
