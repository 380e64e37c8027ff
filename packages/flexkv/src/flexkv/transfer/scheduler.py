# SPDX-License-Identifier: Apache-2.0
"""The transfer scheduler: the one place that decides what is copied when, over all links.

Three kinds of links: the device (between arena and engine pages; the engine's workers copy), and
downwards a link per disk or store, each with its own threads. What is urgent goes first on every
one (`Priority`); what waits is bounded; what stalls is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexkv.admission import Admission
from flexkv.counters import Counters
from flexkv.eviction import RequestContext
from flexkv.host.board import CompletionBoard
from flexkv.index import Block, BlockIndex
from flexkv.mover import Direction
from flexkv.tiers.base import LowerTier
from flexkv.tiers.job import Priority
from flexkv.transfer.copies import DeviceLink, Transfer
from flexkv.transfer.demote import Demoter
from flexkv.transfer.fetch import Fetch, Fetcher
from flexkv.transfer.uses import UseLog


class TransferScheduler:
    """All copies of one cache. Single-threaded; nothing waits but `close`.

    Args:
        index: of the arena; the scheduler leases, reserves and publishes what lower tiers read.
        board: where the engine's workers report.
        slot_view: memory of an arena slot.
        counters: of the cache.
        tiers: lower tiers, the fastest first; owned. Blocks are demoted to the first.
        admission: what is demoted.
        stall_seconds: see `Fetcher`.
    """

    def __init__(
        self,
        index: BlockIndex,
        board: CompletionBoard,
        slot_view: Callable[[int], memoryview],
        counters: Counters,
        *,
        tiers: Sequence[LowerTier],
        admission: Admission,
        stall_seconds: float,
    ) -> None:
        self._device = DeviceLink(board)
        self._tiers = tuple(tiers)
        self._admission = admission
        self._fetcher = Fetcher(index, slot_view, self._tiers, stall_seconds, counters)
        self._demoter: Demoter | None = None
        if self._tiers:
            self._demoter = Demoter(index, slot_view, self._tiers[0], counters)
        complete = None if self._demoter is None else self._demoter.complete
        self._uses = UseLog(index, self._tiers, complete)

    @property
    def busy(self) -> bool:
        """Whether `poll` may find anything."""
        demotes = self._demoter is not None and self._demoter.busy
        return bool(self._device or self._uses or self._fetcher.busy or demotes)

    @property
    def under_way(self) -> int:
        """Transfers with the engine that have not ended."""
        return len(self._device)

    @property
    def loading_blocks(self) -> int:
        """Blocks on their way to the engine."""
        return self._device.loading_blocks

    @property
    def stopped_ranks(self) -> list[int]:
        """Ranks that copy nothing any more."""
        return self._device.stopped_ranks

    @property
    def tiers(self) -> Sequence[LowerTier]:
        return self._tiers

    def begin(self, direction: Direction, blocks: list[Block]) -> Transfer | None:
        """A transfer between arena and engine; None if too many are under way."""
        return self._device.begin(direction, blocks)

    def cancel(self, transfer: Transfer) -> None:
        """See `DeviceLink.cancel`."""
        self._device.cancel(transfer)

    def fetch(self, keys: Sequence[bytes], priority: Priority) -> Fetch | None:
        """See `Fetcher.begin`."""
        return self._fetcher.begin(keys, priority) if self._tiers else None

    def hasten(self, fetch: Fetch) -> None:
        """See `Fetcher.hasten`."""
        self._fetcher.hasten(fetch)

    def end_fetch(self, fetch: Fetch) -> None:
        """See `Fetcher.end`."""
        self._fetcher.end(fetch)

    def is_demoting(self, key: bytes) -> bool:
        """Whether the block of `key` is being written to a lower tier."""
        return self._demoter is not None and self._demoter.is_writing(key)

    def stored(self, blocks: Sequence[Block], ready: bool) -> None:
        """Blocks came from the engine, or failed to."""
        for block in blocks:
            self._fetcher.settle(block.key)
        if ready and self._demoter is not None and self._admission.on_store:
            self._demoter.offer([block.key for block in blocks])

    def used(self, keys: Sequence[bytes], hit: RequestContext | None) -> None:
        """A prefix was used; `hit` is the scheduled request that found it, if one did."""
        self._uses.note(keys, hit, offers=hit is not None and self._admission.on_hit)

    def poll(self) -> list[Transfer]:
        """Bring everything up to date; returns the transfers with the engine that ended."""
        for tier in self._tiers:
            for result in tier.poll():
                if not self._fetcher.take(tier, result) and self._demoter is not None:
                    self._demoter.take(result)
        self._fetcher.read_again()
        self._fetcher.give_up_stalled()
        self._uses.count()
        if self._demoter is not None and self._admission.on_evict:
            self._demoter.make_room()
        return self._device.poll()

    def forget_fetches(self) -> None:
        """The arena was cleared: what is on its way there arrives nowhere."""
        self._fetcher.clear()

    def clear(self) -> None:
        """The cache was cleared: the lower tiers too, and what is on its way arrives nowhere."""
        self.forget_fetches()
        self._uses.clear()
        for tier in self._tiers:
            tier.clear()

    def close(self, flush_seconds: float) -> bool:
        """End the lower tiers. False if one hangs, and still reads or writes arena memory."""
        ended = [tier.close(flush_seconds) for tier in self._tiers]
        return all(ended)
