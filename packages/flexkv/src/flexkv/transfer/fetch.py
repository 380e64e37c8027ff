# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way from lower tiers into the arena."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from flexkv.counters import Counters
from flexkv.index import Block, BlockIndex
from flexkv.tiers.base import BlockResult, LowerTier
from flexkv.transfer.job import Outcome, Priority

Ticket: TypeAlias = tuple[LowerTier, int]
"""A tier and the number of a batch there."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A prefix that a request wants in the arena. Made by `KVCache.fetch`; whoever asked for it
    reads it and ends it with `KVCache.end_fetch`.

    Attributes:
        keys: of the prefix.
        blocks: by position; those that are there are leased by this fetch.
        arrived: blocks that are there, from the first on.
        stop: blocks that can still be there, from the first on; fewer once one has failed.
        begun: time.monotonic() when it began.
        first: blocks that were there when it began, from the first on.
        progressed: time.monotonic() when it began or last got a block.
        tickets: batches that read for it.
        awaited: keys of the blocks that were not there when it began.
    """

    keys: Sequence[bytes]
    blocks: list[Block | None] = field(repr=False)
    arrived: int = 0
    stop: int = 0
    begun: float = field(default_factory=time.monotonic, repr=False)
    first: int = 0
    progressed: float = field(default_factory=time.monotonic, repr=False)
    tickets: list[Ticket] = field(default_factory=list, repr=False)
    awaited: list[bytes] = field(default_factory=list, repr=False)

    @property
    def done(self) -> bool:
        """Whether waiting brings no further block."""
        return self.arrived >= self.stop

    @property
    def seconds_left(self) -> float:
        """How long the rest will take if it comes as fast as what came so far; infinite as long as
        nothing has come."""
        if self.done:
            return 0.0
        came = self.arrived - self.first
        seconds = time.monotonic() - self.begun
        return seconds * (self.stop - self.arrived) / came if came else math.inf

    def advance(self) -> None:
        """Count the blocks that are there without a gap."""
        while self.arrived < self.stop and self.blocks[self.arrived] is not None:
            self.arrived += 1


class Fetcher:
    """Reads blocks from lower tiers into free slots of the arena. Single-threaded.

    Args:
        index: of the arena.
        slot_view: memory of an arena slot.
        tiers: lower tiers, the fastest first.
        stall_seconds: a fetch ends with what it has if it gets nothing for as long, and no other
            fetch does either.
        counters: of the cache.
    """

    def __init__(
        self,
        index: BlockIndex,
        slot_view: Callable[[int], memoryview],
        tiers: Sequence[LowerTier],
        stall_seconds: float,
        counters: Counters,
    ) -> None:
        self._index = index
        self._slot_view = slot_view
        self._tiers = tiers
        self._stall_seconds = stall_seconds
        self._counters = counters
        self._reads: dict[Ticket, dict[int, Block]] = {}
        self._fetches: dict[Fetch, None] = {}
        self._waiting: dict[bytes, list[tuple[Fetch, int]]] = {}
        self._last_arrival = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._reads or self._fetches)

    def begin(self, keys: Sequence[bytes], priority: Priority) -> Fetch | None:
        """Bring the blocks of a prefix into the arena, as many as are found and have room there.

        A prefetch takes no more than what keeps all fetches within half of the arena, so that
        requests in the queue do not push out what running ones store.

        Returns None if no lower tier adds anything to what the arena has.
        """
        index = self._index
        first = index.lookup(keys)
        if first == len(keys) or self._tier_of(keys[first]) is None:
            return None
        if priority is not Priority.LOAD:
            keys = keys[: max(0, index.num_slots // 2 - self._held_blocks())]
            if first >= len(keys):
                return None
        sources = self._sources(keys, first)
        prefix = keys[: first + len(sources)]
        index.touch(prefix)
        fetch = Fetch(keys, list(index.lease(keys[:first]) or ()))
        self._fetches[fetch] = None
        self._fill(fetch, sources, set(prefix), priority)
        fetch.stop = len(fetch.blocks)
        fetch.advance()
        fetch.first = fetch.arrived
        return fetch

    def hasten(self, fetch: Fetch) -> None:
        """A request waits for this fetch now."""
        for tier, number in fetch.tickets:
            tier.hasten(number, Priority.LOAD)

    def end(self, fetch: Fetch) -> None:
        """Give the leases back; what has not begun and no other fetch wants is not read.
        Idempotent."""
        if fetch not in self._fetches:
            return
        del self._fetches[fetch]
        self._index.release([block for block in fetch.blocks if block is not None])
        for position, block in enumerate(fetch.blocks):
            if block is None:
                self._forget(fetch.keys[position], fetch)
        for ticket in fetch.tickets:
            blocks = self._reads.get(ticket, {}).values()
            if blocks and not any(block.key in self._waiting for block in blocks):
                tier, number = ticket
                tier.cancel(number)

    def take(self, tier: LowerTier, result: BlockResult) -> bool:
        """Note a result of `tier`. False if it is not one of a fetch."""
        read = self._reads.get((tier, result.ticket))
        if read is None:
            return False
        block = read.pop(result.position)
        if not read:
            del self._reads[tier, result.ticket]
        if result.outcome is Outcome.DONE:
            self._index.publish([block])
            self._counters.fetched_blocks += 1
            self._last_arrival = time.monotonic()
        else:
            self._index.abandon([block])
            self._counters.failed_fetches += result.outcome is not Outcome.DROPPED
            self._counters.damaged_fetches += result.outcome is Outcome.DAMAGED
        self.settle(block.key)
        return True

    def settle(self, key: bytes) -> None:
        """The block of `key` is no longer being written: hand it to the fetches that wait."""
        for fetch, position in self._waiting.pop(key, ()):
            found = self._index.lease([key])
            if found is None:
                fetch.stop = min(fetch.stop, position)
            else:
                fetch.blocks[position] = found[0]
                fetch.progressed = time.monotonic()
            fetch.advance()

    def give_up_stalled(self) -> None:
        """End the waiting of fetches that get nothing."""
        if not self._waiting:
            return
        before = time.monotonic() - self._stall_seconds
        if self._last_arrival > before:
            return
        for fetch in self._fetches:
            if not fetch.done and fetch.progressed < before:
                fetch.stop = fetch.arrived
                self._counters.stalled_fetches += 1

    def clear(self) -> None:
        """The arena was cleared: no fetch has or gets anything."""
        for fetch in self._fetches:
            self._index.release([block for block in fetch.blocks if block is not None])
            fetch.blocks.clear()
            fetch.arrived = fetch.stop = 0
        self._waiting.clear()

    def _held_blocks(self) -> int:
        return sum(len(fetch.blocks) for fetch in self._fetches)

    def _tier_of(self, key: bytes) -> LowerTier | None:
        return next((tier for tier in self._tiers if tier.contains([key])[0]), None)

    def _sources(self, keys: Sequence[bytes], first: int) -> list[LowerTier | None]:
        """For each key from `first` on, up to the first that nobody has, the tier to read its
        block from; None for those that the arena has or is about to have."""
        wanted = keys[first:]
        answers = [(tier, tier.contains(wanted)) for tier in self._tiers]
        sources: list[LowerTier | None] = []
        for i, key in enumerate(wanted):
            if key in self._index:
                sources.append(None)
                continue
            tier = next((tier for tier, present in answers if present[i]), None)
            if tier is None:
                break
            sources.append(tier)
        return sources

    def _fill(
        self,
        fetch: Fetch,
        sources: Sequence[LowerTier | None],
        keep: set[bytes],
        priority: Priority,
    ) -> None:
        """Lease what is there, read what is not, until the arena has no slot left."""
        index = self._index
        reads: dict[LowerTier, list[Block]] = {}
        for tier in sources:
            key = fetch.keys[len(fetch.blocks)]
            # Reserving slots for earlier blocks may have evicted this one.
            there = index.lease([key])
            if there is None and key not in index:
                block = None if tier is None else index.reserve(key, keep)
                if tier is None or block is None:
                    break
                reads.setdefault(tier, []).append(block)
            if there is None:
                fetch.awaited.append(key)
                self._waiting.setdefault(key, []).append((fetch, len(fetch.blocks)))
            fetch.blocks.append(there[0] if there else None)
        for tier, blocks in reads.items():
            views = [self._slot_view(block.slot) for block in blocks]
            ticket = (tier, tier.read([block.key for block in blocks], views, priority))
            self._reads[ticket] = dict(enumerate(blocks))
            fetch.tickets.append(ticket)

    def _forget(self, key: bytes, fetch: Fetch) -> None:
        waiting = [entry for entry in self._waiting.pop(key, ()) if entry[0] is not fetch]
        if waiting:
            self._waiting[key] = waiting
