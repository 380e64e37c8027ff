# SPDX-License-Identifier: Apache-2.0
"""The ends of loads and stores, of which an error loses none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from flexkv.client import CacheClient, Ended, TransferEnd
from flexkv.types.mover import Direction


class EndedTransfers:
    """The transfers of a cache that have ended, until the scheduler side has handled each. `take`
    yields those that are `waiting`, besides those that the cache finds."""

    def __init__(self, cache: CacheClient) -> None:
        self._cache = cache
        self.waiting: deque[Ended] = deque()

    @property
    def busy(self) -> bool:
        """Whether `take` may find anything."""
        return bool(self.waiting) or self._cache.busy

    def take(self) -> Iterator[Ended]:
        """Poll the cache, and yield the loads and stores that have ended. The next call yields
        those again that the caller has not handled because of an error, behind all others."""
        self.waiting.extend(self._cache.poll())
        while self.waiting:
            self.waiting.rotate(-1)
            yield self.waiting[-1]
            self.waiting.pop()

    def end_lost(self, ordered: AbstractSet[int], running: AbstractSet[int]) -> None:
        """After an error: cancel the transfers that no worker will copy, and let `take` yield those
        as failed whose end was not seen. Workers know, or will know, the transfers `ordered`. The
        caller expects the ends of those that are `running`."""
        for transfer_id in self._cache.status.under_way.keys() - ordered:
            self._cache.end_transfer(transfer_id, TransferEnd.CANCEL)
        known = {*self._cache.status.under_way, *(each.id for each in self.waiting)}
        self.waiting.extend(
            Ended(transfer_id, Direction.LOAD, done=False)
            for transfer_id in sorted(running - known)
        )
