# SPDX-License-Identifier: Apache-2.0
"""Brings prefixes from lower tiers into the arena."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile

from flexkv.figures.meter import Histogram
from flexkv.index.block_index import Block, BlockIndex
from flexkv.tiers.job import Priority
from flexkv.transfer.fetch import Fetch
from flexkv.transfer.reads import Read, Reads
from flexkv.transfer.sources import Source
from flexkv.types.changes import Medium


class Fetcher:
    """Fetches of requests. Single-threaded.

    If a tier cannot give a block, and a fetch waits for it, the next tier that has the block reads
    it. If no tier has it, the block ends the prefix.

    A fetch stalls if no block arrives for as long as the tier of its next block may stall. If that
    tier gives nothing to other fetches either, or cannot be read, the fetch takes the block from a
    slower tier. If there is none, the fetch ends with the blocks that it has.

    Args:
        index: index of the arena; the caller's.
        slot_view: returns the memory of an arena slot, `slot_bytes` long.
        sources: lower tiers, the fastest first.
        seconds: histograms by tier. Each takes the seconds of fetches that its tier gave blocks.
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
        self._seconds = seconds
        self._came: dict[Fetch, int] = {}
        self._reads = Reads(index, slot_view, sources, self._priority_of, self.settle)
        self._fetches: dict[Fetch, None] = {}
        self._waiting: dict[bytes, list[tuple[Fetch, int]]] = {}
        self._longest_stall = max((source.stall_seconds for source in sources), default=0.0)

    @property
    def busy(self) -> bool:
        """Whether a fetch, a read or a question has not ended, or `take_arrivals` would return
        something. A question ends with its deadline."""
        asks = any(source.busy for source in self._sources)
        return bool(asks or self._reads or self._fetches or self._came)

    @property
    def reads(self) -> Reads:
        """The batches that lower tiers read."""
        return self._reads

    def begin(self, keys: Sequence[bytes], priority: Priority) -> Fetch | None:
        """Begin to bring the blocks of a prefix into the arena, as many as tiers have and the arena
        has room for. Does not wait.

        Prefetches bring no blocks that take all fetches beyond half of the arena. So requests in
        the queue do not evict the blocks that running requests store.

        Args:
            keys: keys of the prefix from some block on, first block first.
            priority: LOAD if a request waits, PREFETCH if it is still queued.

        Returns:
            None if no lower tier has a block to add.
        """
        first = self._index.lookup(keys)
        if first == len(keys) or not self._may_come(keys[first]):
            return None
        if priority is not Priority.LOAD and first >= self._room():
            self.ask(keys[first:])
            return None
        leased = self._index.lease(keys[:first])
        fetch = Fetch(list(keys), list(leased or ()), priority=priority)
        fetch.begun = fetch.progressed = time.monotonic()
        self._fetches[fetch] = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.end, fetch)  # nobody else could
            self._extend(fetch)
            undo.pop_all()
        fetch.first = fetch.arrived
        self._await(fetch, first)
        return fetch

    def extend(self, fetch: Fetch, keys: Sequence[bytes]) -> bool:
        """Bring the blocks behind a fetch's prefix into the arena, too. Does not wait.

        Args:
            fetch: the fetch.
            keys: keys of the blocks, in order.

        Returns:
            Whether blocks behind these can be of use: the fetch has not ended, and all its blocks
            have arrived or may arrive.
        """
        first = len(fetch.keys)
        if fetch not in self._fetches or fetch.stop < first:
            return False
        with contextlib.ExitStack() as undo:
            # The holder may keep the fetch, and would wait for it.
            undo.callback(fetch.end_empty)
            undo.callback(self.end, fetch)
            fetch.keys += keys
            self._extend(fetch)
            self._await(fetch, first)
            undo.pop_all()
        return fetch.stop == len(fetch.keys)

    def ask(self, keys: Sequence[bytes], behind: Sequence[bytes] = ()) -> bool:
        """Ask tiers which of these blocks they have, as far as that is unknown. Does not wait.
        Returns whether an answer is awaited. The arguments are those of `KVCache.ask`."""
        questions, others = self._unknown(keys), self._unknown(behind)
        for source, unknown in questions.items():
            # Without an answer for the first block, the other blocks may be of use.
            source.ask(unknown, others.pop(source, ()) if unknown[0] == keys[0] else ())
        for source, unknown in others.items():
            source.ask((), unknown)
        return bool(questions or others)

    def raise_priority(self, fetch: Fetch) -> None:
        """Raise a prefetch to the priority of a load, because a request waits for it now."""
        fetch.priority = Priority.LOAD
        self._reads.raise_priority(self._missing(fetch), fetch.priority)

    def end(self, fetch: Fetch) -> None:
        """Release the fetch's leases, and cancel the reads that no other fetch waits for.
        Idempotent."""
        if fetch not in self._fetches:
            return
        del self._fetches[fetch]
        for medium, (_, last) in fetch.gave.items():
            self._seconds[medium].observe(last - fetch.begun)
        self._index.release([block for block in fetch.blocks if block is not None])
        missing = self._missing(fetch)
        for key in missing:
            waiting = [entry for entry in self._waiting.pop(key, ()) if entry[0] is not fetch]
            if waiting:
                self._waiting[key] = waiting
        self._reads.cancel_unwanted(missing)

    def settle(self, key: bytes, source: Source | None = None) -> None:
        """The block of `key` is no longer being written: hand it to the fetches that wait.

        Args:
            key: of the block.
            source: the tier that gave it, if one did.
        """
        for fetch, position in self._waiting.pop(key, ()):
            fetch.settle(key, source)
            found = self._index.lease([key])
            if found is None:
                fetch.cut(position)
            else:
                fetch.blocks[position] = found[0]
            before = fetch.arrived
            fetch.advance()
            self._note_arrivals(fetch, before)

    def settle_stored(self, keys: Iterable[bytes]) -> None:
        """The engine has stored the blocks of `keys`, or could not."""
        if self._waiting:
            for key in keys:
                self.settle(key)

    def poll(self) -> None:
        """Go on after all results of tiers were taken. Blocks that a tier did not give are read
        from the next tier, fetches whose questions were answered take further blocks, and stalled
        fetches give their tier up."""
        polled = [source.poll() for source in self._sources]  # `any` would skip some
        news = any(polled)
        self._reads.settle()
        if news:
            for fetch in self._fetches:
                if fetch.asking is not None:
                    self._extend(fetch)
        if self._waiting or news:
            self._give_up_stalled()

    def take_arrivals(self) -> list[tuple[Sequence[bytes], int]]:
        """The blocks that have arrived since the last call, if a tier gave one that is not the
        fastest. For each fetch: the keys in the order of the prefix, and the place of the slowest
        tier that gave a block."""
        came, self._came = self._came, {}
        arrivals: list[tuple[Sequence[bytes], int]] = []
        for fetch, start in came.items():
            keys = fetch.keys[start : fetch.arrived]
            place = max(
                (fetch.sources[key].place for key in keys if key in fetch.sources), default=0
            )
            if place:
                arrivals.append((keys, place))
        return arrivals

    def clear(self) -> None:
        """End all fetches without a block, because the arena was cleared."""
        for fetch in self._fetches:
            self._index.release([block for block in fetch.blocks if block is not None])
            fetch.end_empty()
        self._reads.clear()
        self._waiting.clear()

    def forget(self) -> None:
        """End all fetches without a block: the index has ended all leases, and no tier reads any
        more."""
        for fetch in self._fetches:
            fetch.end_empty()
        self._reads.forget()
        for known in (self._fetches, self._waiting, self._came):
            known.clear()

    def _await(self, fetch: Fetch, start: int) -> None:
        """Note the blocks from `start` on that the arena lacks and that may come."""
        blocks = fetch.blocks
        fetch.awaited += [
            fetch.keys[i] for i in range(start, fetch.stop) if i >= len(blocks) or blocks[i] is None
        ]

    def _unknown(self, keys: Sequence[bytes]) -> dict[Source, list[bytes]]:
        """The keys that tiers have to be asked for, by the fastest tier that may have the block."""
        looks = [source.look(keys) for source in self._sources]
        unknown: dict[Source, list[bytes]] = {}
        for i, key in enumerate(keys):
            if key in self._index:
                continue
            source = self._first_that_may(looks, i)
            if source is not None and looks[source.place][i] is None:
                unknown.setdefault(source, []).append(key)
        return unknown

    def _missing(self, fetch: Fetch) -> list[bytes]:
        blocks = enumerate(fetch.blocks)
        return [fetch.keys[position] for position, block in blocks if block is None]

    def _priority_of(self, key: bytes) -> Priority | None:
        """How urgently fetches wait for the block of `key`; None if none waits."""
        return min((fetch.priority for fetch, _ in self._waiting.get(key, ())), default=None)

    def _room(self) -> int:
        """How many more blocks prefetches may hold."""
        held = sum(len(fetch.blocks) for fetch in self._fetches)
        return self._index.num_slots // 2 - held

    def _may_come(self, key: bytes) -> bool:
        """Whether a lower tier has the block of `key` or has to be asked."""
        return any(source.look([key])[0] is not False for source in self._sources)

    def _first_that_may(self, looks: Sequence[Sequence[bool | None]], i: int) -> Source | None:
        """The fastest tier that has block `i` or has to be asked."""
        for source, look in zip(self._sources, looks, strict=True):
            if look[i] is not False:
                return source
        return None

    def _extend(self, fetch: Fetch) -> None:
        """Add further blocks to a fetch, up to the first for which a tier has to be asked."""
        start = len(fetch.blocks)
        sources, reach, asked = self._plan(fetch.keys[start:])
        most = len(sources) if fetch.priority is Priority.LOAD else max(0, self._room())
        self._fill(fetch, sources[:most])
        filled = len(fetch.blocks) - start
        fetch.asking = asked if filled == len(sources) < reach else None
        fetch.stop = len(fetch.blocks) if fetch.asking is None else start + reach
        before = fetch.arrived
        fetch.advance()
        self._note_arrivals(fetch, before)

    def _plan(self, wanted: Sequence[bytes]) -> tuple[list[Source | None], int, Medium | None]:
        """Choose the tier that each block is read from, and ask tiers about blocks for which that
        is unknown.

        Args:
            wanted: keys of a prefix from some block on, first block first.

        Returns:
            For each key up to the first unknown one, the tier that reads its block, or None if the
            arena has the block or a read of it is under way; how many of `wanted` can arrive, from
            the first on; and the first tier that is asked.
        """
        index, reads = self._index, self._reads
        looks = [source.look(wanted) for source in self._sources]
        plan: list[Source | None] = []
        questions: dict[Source, list[bytes]] = {}
        reach, now = 0, time.monotonic()
        hung: dict[Read, set[bytes]] = {}
        absent = set(index.missing(wanted))
        for i, key in enumerate(wanted):
            read = reads.of(key)
            if read is not None:
                if read not in hung:
                    hung[read] = reads.hung_in(read, now)
                hangs = key in hung[read] or looks[read.source.place][i] is False
                if hangs and not self._leave(key, now):
                    break  # no other tier has it
                if hangs:
                    absent = set(index.missing(wanted))
            source = None
            if i in absent:
                source = self._first_that_may(looks, i)
                if source is None:
                    break
                if looks[source.place][i] is None:
                    questions.setdefault(source, []).append(key)
            reach += 1
            if not questions:
                plan.append(source)
        for source, keys in questions.items():
            source.ask(keys)
        return plan, reach, next((source.medium for source in questions), None)

    def _fill(self, fetch: Fetch, plan: Sequence[Source | None]) -> None:
        """Lease the blocks that the arena has and read the others, until no slot is left."""
        index, priority, waiting = self._index, fetch.priority, self._waiting
        first = len(fetch.blocks)
        wanted = fetch.keys[first : first + len(plan)]
        absent = [i for i, source in enumerate(plan) if source is not None]
        there: list[Block | None] = [None] * len(wanted)
        if len(absent) < len(wanted):
            # All blocks that the arena has, so that it does not evict them for the others.
            for i in set(range(len(wanted))).difference(absent):
                found = index.lease([wanted[i]])
                there[i] = found[0] if found else None
        first_of = {wanted[i]: i for i in reversed(absent)}
        absent = [i for i in absent if first_of[wanted[i]] == i]
        before = fetch.keys[first - 1 : first] if first else []
        blocks = self._reserve(before, wanted, absent, priority)
        stop = len(wanted) if len(blocks) == len(absent) else absent[len(blocks)]
        index.release([block for block in there[stop:] if block is not None])
        reserved, joined = {block.key: block for block in blocks}, []
        reads: dict[Source, list[Block]] = {}
        expected: dict[Source, list[bytes]] = {}
        for i, key in enumerate(wanted[:stop]):
            if there[i] is not None:
                continue
            waiting.setdefault(key, []).append((fetch, first + i))
            block, source = reserved.pop(key, None), plan[i]
            if block is None:
                joined.append(key)
                read = self._reads.of(key)
                source = source if read is None else read.source
            if source is not None:
                expected.setdefault(source, []).append(key)
                if block is not None:
                    reads.setdefault(source, []).append(block)
        fetch.blocks += there[:stop]
        for source, keys in expected.items():
            fetch.expect(keys, source)
        self._reads.raise_priority(joined, priority)
        for source, own in reads.items():
            self._reads.begin(source, own, priority)

    def _reserve(
        self,
        before: Sequence[bytes],
        keys: Sequence[bytes],
        absent: Sequence[int],
        priority: Priority,
    ) -> list[Block]:
        """Reserve slots for blocks without one, up to the first for which there is none.

        Args:
            before: the key of the block before them; empty if they begin a prefix.
            keys: keys of blocks, each of which builds on the one before.
            absent: positions in `keys` of the blocks without a slot, ascending.
            priority: of the fetch. For a request that waits, blocks give up their slots.
        """
        index, shift = self._index, len(before)
        chain = [*before, *keys]
        begins = () if before else (0,)
        blocks: list[Block] = []
        while len(blocks) < len(absent):
            left = absent[len(blocks) :]
            more = index.reserve_all(chain, [shift + i for i in left], begins, True)
            # Behind a block without a slot, another one that has its own may have been followed.
            fit = sum(1 for _ in takewhile(_same, zip(more, (keys[i] for i in left), strict=False)))
            index.abandon(more[fit:])
            blocks += more[:fit]
            if len(blocks) == len(absent) or priority is not Priority.LOAD or not self._make_room():
                break
        return blocks

    def _note_arrivals(self, fetch: Fetch, start: int) -> None:
        if len(self._sources) > 1 and fetch.arrived > start:
            self._came.setdefault(fetch, start)

    def _leave(self, key: bytes, now: float) -> bool:
        """See `Reads.leave`. All fetches that wait for the batch wait for the next tier."""
        read = self._reads.of(key)
        assert read is not None
        keys = [block.key for block in read.blocks.values()]
        if not self._reads.leave(key):
            return False
        for each in keys:
            for fetch, _ in self._waiting.get(each, ()):
                fetch.progressed = now
        return True

    def _give_up_stalled(self) -> None:
        now = time.monotonic()
        for fetch in self._fetches:
            if fetch.done:
                continue
            key = fetch.keys[fetch.arrived]
            read = self._reads.of(key)
            stall = self._longest_stall if read is None else read.source.stall_seconds
            if fetch.progressed >= now - stall:
                continue
            if read is not None:
                if not self._reads.is_hung(key, now):
                    continue
                read.source.counters.stalled_fetches += 1
                if self._leave(key, now):
                    continue
            fetch.cut(fetch.arrived)


def _same(pair: tuple[Block, bytes]) -> bool:
    """Whether a block has this key."""
    return pair[0].key == pair[1]
