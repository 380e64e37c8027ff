# SPDX-License-Identifier: Apache-2.0
"""How old blocks are, for the setting `max_age_seconds`.

A time is a number of seconds since 2026. A record on disk has 24 bits of it, which count
`UNIT_SECONDS`. A block is too old a little before its time, never after it.

`BlockAges` has the times of the blocks in host memory, by their keys. If that is shared memory,
`SlotTimes` keeps them beside the keys, too. So they outlive the owner of the index, and readers
know them without it.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from flexkv.index.block_index import (
    BlockIndex,
    Buffer,
    IndexReader,
    index_bytes,
    index_reader,
)

UNIT_SECONDS = 32
UNKNOWN = 0
"""The time of a block of which nobody knows it. It is too old."""
LAST = ((1 << 24) - 1) * UNIT_SECONDS
"""The last time that a record can hold: in the year 2043. Later blocks have this one."""
_STEPS = 64
"""Times are rounded down to parts of the greatest age, so many of it, or to `UNIT_SECONDS` if that
is less: the search for old blocks takes memory for each."""
_YEAR_2026 = 1_767_225_600
"""2026-01-01, in seconds of `time.time()`."""
_MARGIN_SECONDS = 8.0
"""A block is too old so much sooner, because nobody looks for old blocks all the time."""
SPARE_SECONDS = 2
"""A block that is found stays young for so long, so that the engine's step can load it."""
_LOOK_SECONDS = 1.0
"""Pause between two searches for old blocks."""
_CHECKED = 4
"""Keys that are checked for each that is noted, while more are known than blocks are there."""

_HEADER_BYTES = 64
_RECORD_BYTES, _TIME_BYTE = 128, 124
"""`Header` and `StoredKey` of the index's memory, which leave this room; see memory.hpp."""
_BEGIN, _SECONDS, _EARLIEST = range(3)


def uptime() -> float:
    """Seconds that the machine has been running; goes on while it sleeps, and nobody sets it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def time_of_day() -> float:
    """Seconds since 1970. Somebody may set it."""
    return time.time()


def oldest_of(begin: int, seconds: int) -> int:
    """Blocks of earlier times are too old; those that were stored so many seconds ago are not.
    `begin` is the time at which the machine began to run."""
    return max(1, begin + int(uptime()) - seconds)


class SlotTimes:
    """The times by slot, in the memory of an index with so many slots, and what is too old. The
    memory is kept."""

    def __init__(self, memory: Buffer, num_slots: int) -> None:
        words = memoryview(memory).cast("B").cast("I")
        records = index_bytes(num_slots) - num_slots * _RECORD_BYTES
        self._head = words[_HEADER_BYTES // 4 :]
        self._times = words[(records + _TIME_BYTE) // 4 :: _RECORD_BYTES // 4]

    @property
    def begin(self) -> int:
        """See `BlockAges`; zero if no owner had ages."""
        return self._head[_BEGIN]

    def set(self, begin: int, seconds: int, earliest: int) -> None:
        """Set what is too old: see `oldest_of`. No block is older than `earliest`. If `seconds` is
        zero, no block is too old."""
        self._head[_EARLIEST] = earliest
        self._head[_BEGIN] = begin
        self._head[_SECONDS] = seconds

    def note(self, slots: Iterable[int], stored: Iterable[int]) -> None:
        """Set the times of blocks, which no reader finds yet."""
        for slot, at in zip(slots, stored, strict=True):
            self._times[slot] = at

    def of(self, slots: Iterable[int]) -> list[int]:
        """The times of blocks; `UNKNOWN` for those that an owner without ages has stored."""
        return [self._times[slot] for slot in slots]

    def _oldest(self, spare: int) -> int:
        seconds = self._head[_SECONDS]
        return oldest_of(self._head[_BEGIN], seconds) + spare if seconds else 0

    @property
    def has_old(self) -> bool:
        """Whether any block may be too old, or will be within `SPARE_SECONDS`."""
        return self._head[_EARLIEST] < self._oldest(SPARE_SECONDS)

    def are_young(self, slots: Iterable[int], spare: int = 0) -> list[bool]:
        """Which of these blocks, none of which may leave meanwhile, are not too old, nor will be
        within `spare` seconds."""
        oldest = self._oldest(spare)
        return [at >= oldest for at in self.of(slots)]


class BlockAges:
    """When the blocks of one cache were stored. It knows those in host memory by their keys; a disk
    keeps the times of its own. Single-threaded, but for `at_least`.

    Args:
        max_age_seconds: blocks that were stored longer ago are too old.
        num_blocks: blocks that host memory has room for.
    """

    def __init__(self, max_age_seconds: float, num_blocks: int) -> None:
        self._seconds = int(max_age_seconds - _MARGIN_SECONDS)
        self._step = max(1, min(UNIT_SECONDS, self._seconds // _STEPS))
        self._most = 2 * num_blocks + 1024
        # The time of day at the start: who sets the clock later does not change the age of a block.
        self._begin = max(0, int(time_of_day() - _YEAR_2026 - uptime()))
        self._least = UNKNOWN
        self._shared: SlotTimes | None = None
        self._index: BlockIndex | None = None
        self._stored: dict[bytes, int] = {}
        self._keys: dict[int, dict[bytes, None]] = {}  # by time
        self._times: list[int] = []  # a heap of the keys of `_keys`
        self._left: Iterator[bytes] | None = None
        self._looked = 0.0

    @property
    def now(self) -> int:
        """The time of a block that is stored now."""
        now = self._begin + int(uptime())
        return min(max(UNIT_SECONDS, now - now % self._step), LAST)

    @property
    def oldest(self) -> int:
        """Blocks of earlier times are too old."""
        return oldest_of(self._begin, self._seconds)

    @property
    def is_due(self) -> bool:
        """Whether to look for old blocks now."""
        return uptime() - self._looked >= _LOOK_SECONDS

    def at_least(self, stored: int) -> None:
        """It is not earlier than this time of a record. If it is by the clock, the clock has
        fallen."""
        self._least = max(self._least, stored)
        behind = stored - self._begin - int(uptime())
        if behind > 0:
            self._begin += behind + UNIT_SECONDS - 1  # a record is rounded down

    def bind(self, index: BlockIndex, memory: Buffer | None = None) -> None:
        """The blocks of host memory are those of this index. Keep their times in its shared memory,
        too, where those of the present blocks go on."""
        self._index = index
        if memory is None:
            return
        times, blocks = SlotTimes(memory, index.num_slots), index.blocks
        if times.begin:
            self._begin = times.begin
            self.at_least(self._least)
        self.note(blocks.keys, times.of(blocks.slots))
        self._shared = times
        self._tell()

    def _tell(self) -> None:
        if self._shared is not None:
            self._shared.set(self._begin, self._seconds, self._times[0] if self._times else LAST)

    def note(
        self,
        keys: Sequence[bytes],
        stored: Sequence[int] | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Blocks come into host memory, where nobody finds them yet. Without times, they are stored
        now; without slots, the index knows them."""
        times = [self.now] * len(keys) if stored is None else stored
        for key, at in zip(keys, times, strict=True):
            self._drop(key)
            self._put(key, at)
        self._tell()
        if self._shared is not None:
            self._shared.note(map(self._slot_of, keys) if slots is None else slots, times)
        self._check(_CHECKED * len(keys))

    def of(self, keys: Sequence[bytes]) -> list[int]:
        """The times of blocks in host memory."""
        return [self._stored.get(key, UNKNOWN) for key in keys]

    def count_young(self, keys: Sequence[bytes]) -> int:
        """How many blocks of host memory, from the first on, are not too old."""
        oldest = self.oldest
        if not self._has_older(oldest):
            return len(keys)
        stored = self._stored
        old = (i for i, key in enumerate(keys) if stored.get(key, oldest) < oldest)
        return next(old, len(keys))

    def are_young(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks of host memory are not too old, nor will be within `SPARE_SECONDS`."""
        oldest = self.oldest + SPARE_SECONDS
        if not self._has_older(oldest):
            return [True] * len(keys)
        return [self._stored.get(key, oldest) >= oldest for key in keys]

    def remove_old(self, most: int, remove: Callable[[list[bytes]], None]) -> None:
        """Remove up to `most` blocks of host memory that are too old. `remove` removes the ready
        ones of its blocks. The others are removed later, as are all after an error."""
        self._looked, oldest = uptime(), self.oldest
        kept: dict[bytes, int] = {}
        try:
            while most and self._has_older(oldest):
                at = self._times[0]
                old = list(itertools.islice(self._keys[at], most))
                remove(old)
                for key in old:
                    self._drop(key)
                    if self._has(key):
                        kept[key] = at
                most -= len(old)
                if not self._keys[at]:
                    del self._keys[heapq.heappop(self._times)]
        finally:
            for key, at in kept.items():
                self._put(key, at)
        if not most:
            self._looked = 0.0
        self._tell()

    def clear(self) -> None:
        """Host memory has no block any more."""
        for known in (self._stored, self._keys, self._times):
            known.clear()
        self._left = None
        self._tell()

    def _has(self, key: bytes) -> bool:
        """Whether host memory has a block, complete or not."""
        return self._index is None or key in self._index

    def _slot_of(self, key: bytes) -> int:
        block = None if self._index is None else self._index.pin(key)
        assert self._index is not None
        assert block is not None
        self._index.unpin(block)
        return block.slot

    def _has_older(self, oldest: int) -> bool:
        return bool(self._times) and self._times[0] < oldest

    def _put(self, key: bytes, at: int) -> None:
        self._stored[key] = at
        if at not in self._keys:
            self._keys[at] = {}
            heapq.heappush(self._times, at)
        self._keys[at][key] = None

    def _drop(self, key: bytes) -> None:
        at = self._stored.pop(key, None)
        if at is not None:
            self._keys[at].pop(key, None)

    def _check(self, count: int) -> None:
        """Forget some blocks that host memory has evicted, if too many are known."""
        if self._left is None and len(self._stored) > self._most:
            self._left = iter(list(self._stored))
        for _ in range(count if self._left is not None else 0):
            key = next(self._left, None) if self._left is not None else None
            if key is None:
                self._left = None
                return
            if not self._has(key):
                self._drop(key)


class YoungReader:
    """An `IndexReader` that finds no block that is too old, whether or not the owner of the index
    lives to remove it. `times`: of the index."""

    def __init__(self, reader: IndexReader, times: SlotTimes) -> None:
        self._reader = reader
        self._times = times
        self.missing, self.release, self.settle = reader.missing, reader.release, reader.settle

    @property
    def held(self) -> int:
        """See `IndexReader`."""
        return self._reader.held

    @property
    def held_slots(self) -> int:
        """See `IndexReader`."""
        return self._reader.held_slots

    def lookup(self, keys: Sequence[bytes], /) -> int:
        """See `IndexReader.lookup`."""
        found = self._reader.lookup(keys)
        if not self._times.has_old:
            return found
        young = self._are_young(keys[:found])
        return young.index(False) if False in young else len(young)

    def present(self, keys: Sequence[bytes], /) -> list[bool]:
        """See `IndexReader.present`."""
        there = self._reader.present(keys)
        if not self._times.has_old:
            return there
        young = iter(self._are_young([k for k, has in zip(keys, there, strict=True) if has]))
        return [has and next(young) for has in there]

    def lease(self, keys: Sequence[bytes], /) -> list[int] | None:
        """See `IndexReader.lease`."""
        slots = self._reader.lease(keys)
        if slots and self._times.has_old and not all(self._times.are_young(slots)):
            self._reader.release(slots)
            return None
        return slots

    def _are_young(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are not too old, nor will be soon, and have not left."""
        slots = self._reader.lease(keys)
        if slots is None:
            return [len(keys) > 1 and all(self._are_young([key])) for key in keys]
        young = self._times.are_young(slots, SPARE_SECONDS)
        self._reader.release(slots)
        return young


def young_reader(memory: Buffer, holds: Buffer, num_slots: int) -> YoungReader:
    """A reader of the index of so many slots in `memory`; see `index_reader`."""
    return YoungReader(index_reader(memory, holds), SlotTimes(memory, num_slots))


def bind_ages(index: BlockIndex, ages: BlockAges | None, memory: Buffer | None) -> None:
    """Let ages be those of the blocks of an index, and of its shared memory. Without ages, no block
    in that memory is too old."""
    if ages is not None:
        ages.bind(index, memory)
    elif memory is not None:
        times = SlotTimes(memory, index.num_slots)
        times.set(times.begin, 0, 0)
