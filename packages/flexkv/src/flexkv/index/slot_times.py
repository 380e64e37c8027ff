# SPDX-License-Identifier: Apache-2.0
"""When the blocks of an index in shared memory were stored. The times lie beside the keys, so they
outlive the owner of the index, and readers know them without it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from flexkv.index.block_index import (
    BlockIndex,
    Buffer,
    IndexReader,
    index_bytes,
    index_reader,
)
from flexkv.types.ages import SPARE_SECONDS, BlockAges, oldest_of

_HEADER_BYTES = 64
_RECORD_BYTES, _TIME_BYTE = 128, 124
"""`Header` and `StoredKey` of the index's memory, which leave this room; see memory.hpp."""
_BEGIN, _SECONDS, _EARLIEST = range(3)


class SlotTimes:
    """The times, in seconds as `BlockAges` counts them, and what is too old.

    Args:
        memory: of the index; kept.
        num_slots: its slots.
    """

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


class YoungReader:
    """An `IndexReader` that finds no block that is too old, whether or not the owner of the index
    lives to remove it.

    Args:
        reader: of the index; kept.
        times: of the index.
    """

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
        ages.bind(index.__contains__, partial(_slot_of, index))
    if memory is None:
        return
    times, blocks = SlotTimes(memory, index.num_slots), index.blocks
    if ages is None:
        times.set(times.begin, 0, 0)
    else:
        ages.share(times, blocks.keys, blocks.slots)


def _slot_of(index: BlockIndex, key: bytes) -> int:
    block = index.pin(key)
    assert block is not None
    index.unpin(block)
    return block.slot
