# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way from lower tiers into the arena."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from flexkv.counters import Counters
from flexkv.index import Block, BlockIndex, BlockState
from flexkv.tiers.base import BlockResult, LowerTier
from flexkv.tiers.job import Outcome, Priority

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
        progressed: time.monotonic() when it began or last had another block without a gap.
        priority: of its reads.
        tickets: batches that read for it, those that others began included.
        awaited: keys of the blocks that were not there when it began.
    """

    keys: Sequence[bytes]
    blocks: list[Block | None] = field(repr=False)
    arrived: int = 0
    stop: int = 0
    begun: float = field(default=0.0, repr=False)
    first: int = 0
    progressed: float = field(default=0.0, repr=False)
    priority: Priority = Priority.LOAD
    tickets: dict[Ticket, None] = field(default_factory=dict, repr=False)
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
        before = self.arrived
        while self.arrived < self.stop and self.blocks[self.arrived] is not None:
            self.arrived += 1
        if self.arrived > before:
            self.progressed = time.monotonic()


@dataclass(slots=True)
class _Read:
    """A batch that a tier reads: its blocks without a result, by position."""

    blocks: dict[int, Block]
    cancelled: bool = False


class Fetcher:
    """Reads blocks from lower tiers into free slots of the arena. Single-threaded.

    A block that its tier cannot give is read from the next one that has it, as long as a fetch
    waits for it. If there is none, it ends the prefix.

    Args:
        index: of the arena.
        slot_view: memory of an arena slot.
        tiers: lower tiers, the fastest first.
        stall_seconds: a fetch that goes on by no block for as long ends with what it has, if the
            tier of the next block gives nothing to others either, or says that it cannot be read.
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
        self._reads: dict[Ticket, _Read] = {}
        self._ticket_of: dict[bytes, Ticket] = {}
        self._again: dict[LowerTier, list[Block]] = {}
        self._fetches: dict[Fetch, None] = {}
        self._waiting: dict[bytes, list[tuple[Fetch, int]]] = {}
        self._last_arrival = dict.fromkeys(tiers, 0.0)

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
        fetch = Fetch(keys, list(index.lease(keys[:first]) or ()), priority=priority)
        fetch.begun = fetch.progressed = time.monotonic()
        self._fetches[fetch] = None
        self._fill(fetch, sources)
        fetch.stop = len(fetch.blocks)
        fetch.advance()
        fetch.first = fetch.arrived
        return fetch

    def hasten(self, fetch: Fetch) -> None:
        """A request waits for this fetch now."""
        fetch.priority = Priority.LOAD
        for tier, number in fetch.tickets:
            tier.hasten(number, fetch.priority)

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
            read = self._reads.get(ticket)
            if read and not any(block.key in self._waiting for block in read.blocks.values()):
                read.cancelled = True
                tier, number = ticket
                tier.cancel(number)

    def take(self, tier: LowerTier, result: BlockResult) -> bool:
        """Note a result of `tier`. False if it is not one of a fetch."""
        ticket = (tier, result.ticket)
        read = self._reads.get(ticket)
        if read is None:
            return False
        block = read.blocks.pop(result.position)
        if not read.blocks:
            del self._reads[ticket]
        done = result.outcome is Outcome.DONE
        if done:
            self._last_arrival[tier] = time.monotonic()
        if block.state is BlockState.DROPPED:  # the arena was cleared meanwhile
            self._index.abandon([block])
            return True
        del self._ticket_of[block.key]
        self._counters.fetched_blocks += done
        self._counters.failed_fetches += not done and result.outcome is not Outcome.DROPPED
        self._counters.damaged_fetches += result.outcome is Outcome.DAMAGED
        # Nothing is wrong with what a fetch that has ended cancelled: another may want it now.
        cancelled = read.cancelled and result.outcome is Outcome.DROPPED
        other = None if done else self._next_tier(tier, block.key, same=cancelled)
        if other is not None:
            self._again.setdefault(other, []).append(block)
            return True
        if done:
            self._index.publish([block])
        else:
            self._index.abandon([block])
        self.settle(block.key)
        return True

    def read_again(self) -> None:
        """Read what was not given and another tier has."""
        again, self._again = self._again, {}
        for tier, blocks in again.items():
            waiting = [fetch for block in blocks for fetch, _ in self._waiting[block.key]]
            ticket = self._read(tier, blocks, min(fetch.priority for fetch in waiting))
            for fetch in waiting:
                fetch.tickets[ticket] = None

    def settle(self, key: bytes) -> None:
        """The block of `key` is no longer being written: hand it to the fetches that wait."""
        for fetch, position in self._waiting.pop(key, ()):
            found = self._index.lease([key])
            if found is None:
                fetch.stop = min(fetch.stop, position)
            else:
                fetch.blocks[position] = found[0]
            fetch.advance()

    def give_up_stalled(self) -> None:
        """End the waiting of fetches whose next block does not come."""
        if not self._waiting:
            return
        before = time.monotonic() - self._stall_seconds
        for fetch in self._fetches:
            if not fetch.done and fetch.progressed < before and self._hangs(fetch, before):
                fetch.stop = fetch.arrived
                self._counters.stalled_fetches += 1

    def clear(self) -> None:
        """The arena was cleared: no fetch has or gets anything."""
        for fetch in self._fetches:
            self._index.release([block for block in fetch.blocks if block is not None])
            fetch.blocks.clear()
            fetch.arrived = fetch.stop = 0
        for tier, number in self._reads:
            tier.cancel(number)
        self._ticket_of.clear()
        self._waiting.clear()

    def _held_blocks(self) -> int:
        return sum(len(fetch.blocks) for fetch in self._fetches)

    def _hangs(self, fetch: Fetch, before: float) -> bool:
        """Whether the next block of `fetch` need not be waited for: its source has given nothing
        since `before`, or is one part of a tier whose others go on."""
        key = fetch.keys[fetch.arrived]
        ticket = self._ticket_of.get(key)
        if ticket is None:
            return True
        tier, _ = ticket
        return self._last_arrival[tier] < before or not tier.contains([key])[0]

    def _next_tier(self, tier: LowerTier, key: bytes, same: bool) -> LowerTier | None:
        """A tier behind `tier`, or itself if `same`, to read a block from that `tier` did not
        give; None if nobody waits for it or has it."""
        if key not in self._waiting:
            return None
        others = self._tiers[self._tiers.index(tier) + (not same) :]
        return next((other for other in others if other.contains([key])[0]), None)

    def _tier_of(self, key: bytes) -> LowerTier | None:
        return next((tier for tier in self._tiers if tier.contains([key])[0]), None)

    def _sources(self, keys: Sequence[bytes], first: int) -> list[LowerTier | None]:
        """For each key from `first` on, up to the first that nobody can give, the tier to read its
        block from; None for those that the arena has or is about to have."""
        wanted = keys[first:]
        answers = {tier: tier.contains(wanted) for tier in self._tiers}
        sources: list[LowerTier | None] = []
        for i, key in enumerate(wanted):
            ticket = self._ticket_of.get(key)
            if ticket is not None and not answers[ticket[0]][i]:
                break  # what reads it hangs
            if key in self._index:
                sources.append(None)
                continue
            tier = next((tier for tier, present in answers.items() if present[i]), None)
            if tier is None:
                break
            sources.append(tier)
        return sources

    def _fill(self, fetch: Fetch, sources: Sequence[LowerTier | None]) -> None:
        """Lease what is there, read what is not, until the arena has no slot left."""
        index = self._index
        reads: dict[LowerTier, list[Block]] = {}
        first = len(fetch.blocks)
        wanted = fetch.keys[first : first + len(sources)]
        # All that is there, so that it does not make room for what is not.
        there = [index.lease([key]) for key in wanted]
        for position, (key, tier) in enumerate(zip(wanted, sources, strict=True), first):
            found = there[position - first]
            if found is None and key not in index:
                before = fetch.keys[position - 1] if position else None
                block = None if tier is None else index.reserve(key, before)
                if tier is None or block is None:
                    break
                reads.setdefault(tier, []).append(block)
            if found is None:
                fetch.awaited.append(key)
                if key in self._ticket_of:
                    fetch.tickets[self._ticket_of[key]] = None
                self._waiting.setdefault(key, []).append((fetch, position))
            fetch.blocks.append(found[0] if found else None)
        unused = there[len(fetch.blocks) - first :]
        index.release([found[0] for found in unused if found is not None])
        for tier, number in fetch.tickets:
            tier.hasten(number, fetch.priority)
        for tier, blocks in reads.items():
            fetch.tickets[self._read(tier, blocks, fetch.priority)] = None

    def _read(self, tier: LowerTier, blocks: Sequence[Block], priority: Priority) -> Ticket:
        keys = [block.key for block in blocks]
        views = [self._slot_view(block.slot) for block in blocks]
        ticket = (tier, tier.read(keys, views, priority))
        self._reads[ticket] = _Read(dict(enumerate(blocks)))
        self._ticket_of.update(dict.fromkeys(keys, ticket))
        return ticket

    def _forget(self, key: bytes, fetch: Fetch) -> None:
        waiting = [entry for entry in self._waiting.pop(key, ()) if entry[0] is not fetch]
        if waiting:
            self._waiting[key] = waiting
