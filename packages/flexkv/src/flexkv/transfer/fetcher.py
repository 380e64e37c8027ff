# SPDX-License-Identifier: Apache-2.0
"""Brings prefixes from lower tiers into the arena."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from flexkv.client import FetchId, FetchState
from flexkv.figures.meter import Histogram
from flexkv.index.block_index import Block, BlockIndex, BlockState
from flexkv.tiers.job import Priority, Urgency
from flexkv.transfer.reads import Read, Reads
from flexkv.transfer.running_fetch import RunningFetch
from flexkv.transfer.sources import Source
from flexkv.types.changes import Medium
from flexkv.types.tenants import NO_TENANT

_ASK_SECONDS = 0.05
"""Pause between two queries for a block that another node is writing to a store."""

_ANNOUNCED_SECONDS = 10.0
"""A fetch waits so long for the next block that another node is said to write. Then that node has
failed, or takes longer than a request should wait. Not tuned."""


class Fetcher:
    """Fetches of requests. Single-threaded.

    If a tier cannot give a block, and a fetch waits for it, the next tier that has the block reads
    it. If no tier has it, the block ends the prefix.

    A fetch stalls if no block arrives for as long as the tier of its next block may stall. If that
    tier gives nothing to other fetches either, or cannot be read, the fetch takes the block from a
    slower tier. If there is none, the fetch ends with the blocks that it has.

    A fetch may be told that another node writes blocks to a shared store. Then stores are queried
    for the first that is lacking until it is there, and after that for all others.

    Args:
        sources: lower tiers, the fastest first.
        seconds: histograms of the seconds of fetches, by the tier that gave blocks.
        make_room: called if a request waits and the arena has no slot. Returns whether to try
            again.
    """

    def __init__(
        self,
        index: BlockIndex,
        slot_view: Callable[[int], memoryview],
        sources: Sequence[Source],
        seconds: Mapping[Medium, Histogram],
        make_room: Callable[[], bool],
    ) -> None:
        self._index = index
        self._make_room = make_room
        self._sources = sources
        self._tier_ranks = {source.medium: source.tier_rank for source in sources}
        self._seconds = seconds
        self.reads = Reads(index, slot_view, sources, self._urgency_of, self.complete)
        self._ids = itertools.count(1)
        self._forget_fetches()
        self._announced: Counter[bytes] = Counter()
        self._longest_stall = max((source.stall_seconds for source in sources), default=0.0)

    def _forget_fetches(self) -> None:
        self._fetches: dict[FetchId, RunningFetch] = {}
        self._waiting: dict[bytes, list[tuple[RunningFetch, int]]] = {}
        self._arrived: dict[RunningFetch, int] = {}

    @property
    def busy(self) -> bool:
        """Whether a fetch, a read or a query has not ended, or `drain_arrivals` would return
        something. A query ends with its deadline."""
        if self._fetches or self._arrived or self.reads:
            return True
        for source in self._sources:  # noqa: SIM110 - `any` makes a call for each
            if source.busy:
                return True
        return False

    def begin(
        self,
        keys: Sequence[bytes],
        urgency: Urgency,
        tenant: int = NO_TENANT,
        announced: int = 0,
    ) -> FetchId | None:
        """Begin to bring the blocks of a prefix into the arena, as many as tiers have and the arena
        has room for; see `CacheClient.fetch`. None if no lower tier has a block to add.

        Prefetches bring no blocks that take all fetches beyond half of the arena. So requests in
        the queue do not evict the blocks that running requests store."""
        first = self._index.lookup(keys)
        if first == len(keys):
            return None
        if not (self._may_come(keys[first]) or (announced > first and self._store() is not None)):
            return None
        if urgency.priority is not Priority.LOAD and first >= self._room():
            self.query(keys[first:])
            return None
        leased = self._index.lease(keys[:first]) or ()
        now, fetch_id = time.monotonic(), FetchId(next(self._ids))
        media: list[Medium | None] = [None] * len(leased)
        fetch = RunningFetch(fetch_id, list(keys), urgency, tenant, now, now, [*leased], media)
        fetch.announced, fetch.announced_until = announced, now + _ANNOUNCED_SECONDS
        self._fetches[fetch_id] = fetch
        with contextlib.ExitStack() as undo:
            undo.callback(self.end, fetch_id)  # nobody else could
            self._extend(fetch)
            undo.pop_all()
        fetch.first = fetch.arrived
        return fetch_id

    def extend(
        self, fetch_id: FetchId, keys: Sequence[bytes], *, raise_priority: bool = False
    ) -> bool:
        """See `CacheClient.extend_fetch`. Returns whether blocks behind these can be of use: the
        fetch has not ended, and all its blocks have arrived or may arrive."""
        fetch = self._fetches.get(fetch_id)
        if fetch is None:
            return False
        looks_again = False
        if raise_priority and fetch.may_wait:
            fetch.urgency = fetch.urgency._replace(priority=Priority.LOAD)
            self.reads.raise_priority(_lacking(fetch), fetch.urgency)
            looks_again = self._may_go_on(fetch)
        if not looks_again and fetch.stop + fetch.beyond < len(fetch.keys):
            return False
        with contextlib.ExitStack() as undo:
            undo.callback(self.end, fetch_id)
            fetch.keys += keys
            goes_on = keys or raise_priority or self._may_have_room(fetch)
            if goes_on and len(fetch.blocks) < len(fetch.keys):
                self._extend(fetch)
            undo.pop_all()
        return fetch.stop == len(fetch.keys)

    def state(self, fetch_id: FetchId) -> FetchState:
        """The state of a fetch; that of a fetch without a block if it has ended."""
        fetch = self._fetches.get(fetch_id)
        return FetchState(time.monotonic()) if fetch is None else fetch.state

    def query(self, keys: Sequence[bytes], scattered: Sequence[bytes] = ()) -> bool:
        """See `CacheClient.query`."""
        first, others = self._unknown(keys), self._unknown(scattered)
        for source, unknown in first.items():
            # Without an answer for the first block, the other blocks may be of use.
            source.query(unknown, others.pop(source, ()) if unknown[0] == keys[0] else ())
        for source, unknown in others.items():
            source.query((), unknown)
        return bool(first or others)

    def end(self, fetch_id: FetchId) -> FetchState:
        """Release the fetch's leases, and cancel the reads that no other fetch waits for. Returns
        its last state. Idempotent."""
        state = self.state(fetch_id)
        fetch = self._fetches.pop(fetch_id, None)
        if fetch is None:
            return state
        for medium, (_, last) in fetch.gave.items():
            self._seconds[medium].observe(last - fetch.begun)
        self._index.release([block for block in fetch.blocks if block is not None])
        lacking = _lacking(fetch)
        for key in lacking:
            waiting = [entry for entry in self._waiting.pop(key, ()) if entry[0] is not fetch]
            if waiting:
                self._waiting[key] = waiting
        self.reads.cancel_unwanted(lacking)
        return state

    def complete(self, keys: Iterable[bytes], source: Source | None = None) -> None:
        """The blocks of `keys` are no longer being written: give them to the fetches that wait.
        `source` is the tier that gave them, if one did."""
        medium = None if source is None else source.medium
        completed: dict[RunningFetch, list[int]] = {}
        for key in keys if self._waiting else ():
            for fetch, position in self._waiting.pop(key, ()):
                completed.setdefault(fetch, []).append(position)
        for fetch, positions in completed.items():
            blocks = self._lease([fetch.keys[position] for position in positions])
            fetch.complete(positions, blocks, medium)
            self._advance(fetch)

    def announce(self, keys: Iterable[bytes]) -> list[bytes]:
        """Somebody stores blocks of these keys, which have no slots yet: fetches wait for them, as
        long as they are announced. Returns those that were not announced before."""
        announced = self._announced
        new = [key for key in dict.fromkeys(keys) if not announced[key]]
        announced.update(keys)
        return new

    def retract(self, keys: Iterable[bytes]) -> list[bytes]:
        """What `announce` was called for has ended, after the blocks that were stored are ready.
        Returns the keys that are announced no more."""
        announced = self._announced
        announced.subtract(keys)
        gone = [key for key in dict.fromkeys(keys) if announced[key] <= 0]
        for key in gone:
            del announced[key]
        self.complete(gone)
        return gone

    def cut_dropped(self) -> None:
        """End each fetch before its first block that the arena has dropped as unreadable."""
        for fetch in self._fetches.values():
            for position, block in enumerate(fetch.blocks):
                if block is not None and block.state is BlockState.DROPPED:
                    fetch.cut(position)
                    break

    def poll(self) -> None:
        """Go on after all results of tiers were taken. Blocks that a tier did not give are read
        from the next tier, fetches whose queries were answered take further blocks, and stalled
        fetches go on to another tier or end."""
        polled = [source.poll() for source in self._sources]  # `any` would skip some
        news = any(polled)
        self.reads.retry()
        now = time.monotonic()
        for fetch in self._fetches.values():
            if fetch.queried is None:
                continue
            if fetch.awaits_others:
                if (news or now >= fetch.ask_at) and self._has_come(fetch):
                    self._extend(fetch)
            elif news:
                self._extend(fetch)
        if self._waiting or news:
            self._end_stalled()

    def drain_arrivals(self) -> list[tuple[Sequence[bytes], int]]:
        """The blocks that have arrived since the last call: for each fetch their keys in order, and
        the `tier_rank` of the slowest tier that gave one. Without fetches from the fastest tier
        alone."""
        arrived, self._arrived = self._arrived, {}
        arrivals: list[tuple[Sequence[bytes], int]] = []
        for fetch, start in arrived.items():
            media = set(fetch.media[start : fetch.arrived])
            ranks = [rank for medium, rank in self._tier_ranks.items() if medium in media]
            if any(ranks):
                arrivals.append((fetch.keys[start : fetch.arrived], max(ranks)))
        return arrivals

    def clear(self) -> None:
        """End all fetches without a block, because the arena was cleared."""
        for fetch in self._fetches.values():
            self._index.release([block for block in fetch.blocks if block is not None])
        self.reads.clear()
        self._forget_fetches()

    def forget(self) -> None:
        """End all fetches without a block: the index has ended all leases, and no tier reads any
        more."""
        self.reads.forget()
        self._forget_fetches()

    def _unknown(self, keys: Sequence[bytes]) -> dict[Source, list[bytes]]:
        """The keys that tiers have to be queried about, by the fastest tier that may have the
        block."""
        unknown: dict[Source, list[bytes]] = {}
        answers = [source.contains(keys) for source in self._sources]
        fastest = self._fastest(answers, len(keys))
        for i in self._index.missing(keys):
            source, has = fastest[i]
            if source is not None and has is None:
                unknown.setdefault(source, []).append(keys[i])
        return unknown

    def _urgency_of(self, key: bytes) -> Urgency | None:
        """How urgently fetches wait for the block of `key`; None if none waits."""
        return min((fetch.urgency for fetch, _ in self._waiting.get(key, ())), default=None)

    def _room(self) -> int:
        """How many more blocks prefetches may hold."""
        held = sum(len(fetch.blocks) for fetch in self._fetches.values())
        return self._index.num_slots // 2 - held

    def _may_come(self, key: bytes) -> bool:
        """Whether a lower tier has the block of `key` or has to be queried, or it is announced."""
        return key in self._announced or any(
            source.contains([key])[0] is not False for source in self._sources
        )

    def _may_go_on(self, fetch: RunningFetch) -> bool:
        """Whether a fetch ends with a block that no tier had, or for which the arena had no room,
        and that may come by now."""
        if not fetch.stop == len(fetch.blocks) < len(fetch.keys):
            return False
        key = fetch.keys[fetch.stop]
        return key in self._index or self._may_come(key)

    def _may_have_room(self, fetch: RunningFetch) -> bool:
        """Whether a fetch that lacked room may get a block now. To plan all takes long, and a
        request looks again and again."""
        index, head = self._index, fetch.keys[len(fetch.blocks) : len(fetch.blocks) + 1]
        has_room = index.has_room or (not fetch.may_wait and self._make_room())
        return has_room or any(key in index for key in head)

    def _extend(self, fetch: RunningFetch) -> None:
        """Add further blocks to a fetch, up to the first for which a tier has to be queried."""
        start = len(fetch.blocks)
        store = self._store() if fetch.announced > start else None
        announced = fetch.announced - start if store is not None else 0
        plan, reach, queried = self._plan(fetch.keys[start:], announced)
        if plan and fetch.ask_at and start == fetch.first:
            fetch.begun = fetch.progressed = time.monotonic()
        fetch.awaits_others = queried is None and len(plan) < reach
        if store is not None and fetch.awaits_others:
            queried, fetch.ask_at = store.medium, time.monotonic() + _ASK_SECONDS
        most = max(0, self._room()) if fetch.may_wait else len(plan)
        self._fill(fetch, plan[:most])
        lacking = plan[len(fetch.blocks) - start :]
        if lacking:
            fetch.fall_short([None if source is None else source.medium for source in lacking])
        elif len(plan) < reach:
            fetch.wait_for_answer(queried, reach - len(plan))
        self._advance(fetch)

    def _advance(self, fetch: RunningFetch) -> None:
        start = fetch.arrived
        if fetch.advance() and len(self._sources) > 1:
            self._arrived.setdefault(fetch, start)

    def _has_come(self, fetch: RunningFetch) -> bool:
        """Whether a store has got the block that a fetch waits for, or the fetch is to wait for it
        no longer. Queries stores about that block again after each pause."""
        now, start = time.monotonic(), len(fetch.blocks)
        stores = [source for source in self._sources if source.may_get]
        head = fetch.keys[start : start + 1]
        if not stores or now > fetch.announced_until:
            fetch.announced = 0
            return True
        if any(store.contains(head)[0] for store in stores):
            fetch.announced_until = now + _ANNOUNCED_SECONDS
            for store in stores:
                store.doubt(fetch.keys[start + 1 : fetch.announced])
            return True
        if now >= fetch.ask_at:
            fetch.ask_at = now + _ASK_SECONDS
            for store in stores:
                store.doubt(head)
                store.query(head)
        return False

    def _store(self) -> Source | None:
        """The fastest tier to which other nodes write, if it can be queried."""
        return next((source for source in self._sources if source.may_get), None)

    def _plan(
        self, wanted: Sequence[bytes], announced: int
    ) -> tuple[list[Source | None], int, Medium | None]:
        """Choose the tier that each block is read from, and query tiers about blocks for which that
        is unknown. Another node writes the first `announced` of the blocks to a store.

        Returns for each key up to the first unknown one the tier that reads its block, or None if
        the arena has the block, a read of it is under way, or an engine of this node stores it; how
        many of `wanted` can arrive, from the first on; and the first tier that is queried."""
        answers = [source.contains(wanted) for source in self._sources]
        end = self._reroute_hung(wanted, answers) if self.reads.by_key else len(wanted)
        absent = set(self._index.missing(wanted))
        if self._announced:
            absent = {i for i in absent if wanted[i] not in self._announced}
        plan: list[Source | None] = []
        queries: dict[Source, list[bytes]] = {}
        is_known = True
        reach = 0
        for i, (source, has) in enumerate(self._fastest(answers, end)):
            if i in absent:
                if source is None and i >= announced:
                    break  # no tier has it
                if source is not None and has is None:
                    queries.setdefault(source, []).append(wanted[i])
                is_known = is_known and source is not None and has is not None
            if is_known:
                plan.append(source if i in absent else None)
            reach += 1
        for queried, keys in queries.items():
            queried.query(keys)
        return plan, reach, next((source.medium for source in queries), None)

    def _fastest(
        self, answers: Sequence[Sequence[bool | None]], count: int
    ) -> list[tuple[Source | None, bool | None]]:
        """For each of `count` blocks, the fastest tier that has it or has to be queried, and its
        answer; None and False without such a tier. `answers` are those of the tiers."""
        fastest: list[tuple[Source | None, bool | None]] = [(None, False)] * count
        for source, answer in zip(reversed(self._sources), reversed(answers), strict=True):
            both = zip(fastest, answer, strict=False)
            fastest = [other if has is False else (source, has) for other, has in both]
        return fastest

    def _reroute_hung(
        self, wanted: Sequence[bytes], answers: Sequence[Sequence[bool | None]]
    ) -> int:
        """Have other tiers read those blocks whose reads hang. Returns how many of `wanted`, from
        the first on, can come."""
        now = time.monotonic()
        hung: dict[Read, set[bytes]] = {}
        for i, key in enumerate(wanted):
            read = self.reads.by_key.get(key)
            if read is None:
                continue
            if read not in hung:
                hung[read] = self.reads.hung_in(read, now)
            hangs = key in hung[read] or answers[read.source.tier_rank][i] is False
            if hangs and not self._reroute(key, now):
                return i
        return len(wanted)

    def _fill(self, fetch: RunningFetch, plan: Sequence[Source | None]) -> None:
        """Lease the blocks that the arena has and read the others, until no slot is left."""
        index, first, by_key = self._index, len(fetch.blocks), self.reads.by_key
        wanted = fetch.keys[first : first + len(plan)]
        there: list[Block | None] = [None] * len(wanted)
        # All blocks that the arena has, so that it does not evict them for the others.
        present = [i for i, source in enumerate(plan) if source is None]
        for i, block in zip(present, self._lease([wanted[i] for i in present]), strict=True):
            there[i] = block
        positions = {wanted[i]: i for i in reversed(range(len(plan))) if plan[i] is not None}
        absent = sorted(positions.values())  # a key that is wanted twice is read once
        before = fetch.keys[first - 1 : first] if first else []
        blocks = self._reserve(before, wanted, absent, fetch)
        stop = len(wanted) if len(blocks) == len(absent) else absent[len(blocks)]
        index.release([block for block in there[stop:] if block is not None])
        reserved, joined = {block.key: block for block in blocks}, []
        reads: dict[Source, list[Block]] = {}
        media: list[Medium | None] = [None] * stop
        for i, key in enumerate(wanted[:stop]):
            if there[i] is not None:
                continue
            self._waiting.setdefault(key, []).append((fetch, first + i))
            block, source = reserved.pop(key, None), plan[i]
            if block is None:
                joined.append(key)
                source = by_key[key].source if key in by_key else source
            elif source is not None:
                reads.setdefault(source, []).append(block)
            media[i] = Medium.HOST if source is None else source.medium
        fetch.add(there[:stop], media)
        self.reads.raise_priority(joined, fetch.urgency)
        for source, own in reads.items():
            self.reads.begin(source, own, fetch.urgency)

    def _lease(self, keys: Sequence[bytes]) -> Sequence[Block | None]:
        """Lease the blocks of `keys`; None for each that is not ready."""
        lease = self._index.lease
        found = lease(keys)
        if found is not None:
            return list(found)
        return [None if (one := lease([key])) is None else one[0] for key in keys]

    def _reserve(
        self,
        before: Sequence[bytes],
        keys: Sequence[bytes],
        absent: Sequence[int],
        fetch: RunningFetch,
    ) -> list[Block]:
        """Reserve slots for the blocks at the positions `absent`, up to the first for which there
        is none. For a request that waits, other blocks give up their slots. `before` is the key of
        the block before the first of `keys`, if there is one."""
        index, shift = self._index, len(before)
        chain = [*before, *keys]
        prefix_starts = () if before else (0,)
        tenants = [fetch.tenant] * len(chain) if fetch.tenant else None
        blocks: list[Block] = []
        while len(blocks) < len(absent):
            left = absent[len(blocks) :]
            places = [shift + i for i in left]
            more = index.reserve_all(chain, places, prefix_starts, True, tenants)
            # Behind a block without a slot, another one that has its own may have been followed.
            fit = 0
            while fit < len(more) and more[fit].key == keys[left[fit]]:
                fit += 1
            index.abandon(more[fit:])
            blocks += more[:fit]
            if len(blocks) == len(absent) or fetch.may_wait or not self._make_room():
                break
        return blocks

    def _reroute(self, key: bytes, now: float) -> bool:
        """See `Reads.reroute`. All fetches that wait for the batch wait for the next tier."""
        keys = [block.key for block in self.reads.by_key[key].blocks.values()]
        if not self.reads.reroute(key):
            return False
        for each in keys:
            for fetch, _ in self._waiting.get(each, ()):
                fetch.progressed = now
        return True

    def _end_stalled(self) -> None:
        now = time.monotonic()
        for fetch in self._fetches.values():
            if fetch.arrived >= fetch.stop:
                continue
            key = fetch.keys[fetch.arrived]
            awaits_others = fetch.awaits_others and fetch.arrived == len(fetch.blocks)
            if awaits_others or key in self._announced:
                continue
            read = self.reads.by_key.get(key)
            stall = self._longest_stall if read is None else read.source.stall_seconds
            if fetch.progressed >= now - stall:
                continue
            if read is not None:
                if not self.reads.is_hung(key, now):
                    continue
                read.source.counters.stalled_fetches += 1
                if self._reroute(key, now):
                    continue
            fetch.cut(fetch.arrived)


def _lacking(fetch: RunningFetch) -> list[bytes]:
    """Keys of the blocks that a fetch waits for."""
    return [key for key, block in zip(fetch.keys, fetch.blocks, strict=False) if block is None]
