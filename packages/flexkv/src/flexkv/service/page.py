# SPDX-License-Identifier: Apache-2.0
"""The page of an engine: what it holds of its pool, the states of its fetches and its bell, in one
memory file with the pages of all others.

The file outlives the service, so that the next one sees what living engines hold."""

from __future__ import annotations

import logging
import mmap
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from flexkv.client import FetchState
from flexkv.index.block_index import IndexReader

logger = logging.getLogger(__name__)

MOST_ENGINES = 63
"""Engines of a pool at once; each has a completion board in the arena and a page."""

SENT, READ, PUBLISHED = 0, 1, 2
"""Words of the bell, modulo 2^32: numbers of packets that the service has sent, and that the engine
has read, and of stores that the service has published. So a step in which nothing has come makes no
system call, and the service sends nothing new to an engine that is behind."""

MOST_HELD, LOADS = 3, 4
"""Further words: the slots that loads of the engine may hold together, 0 for any number, from the
service; and the beginnings and ends of loads, modulo 2^32, from the engine."""

FETCH_ROWS = 4096
"""Fetches that an engine has not ended, half of them for queued requests; each has a row."""
FETCH_ROW_BYTES = 2048
"""Room for the state of a fetch from three tiers with `MOST_RANGES`. A row takes memory once it is
used."""
MOST_RANGES = 64
"""Ranges of awaited blocks that the state of a fetch names to an engine, which counts them."""

_HOLD_BYTES = 2
_FETCH_BYTES = FETCH_ROWS * FETCH_ROW_BYTES
_BELL_BYTES = 64


def _page_bytes(slots: int) -> int:
    whole = _HOLD_BYTES * slots + _FETCH_BYTES + _BELL_BYTES
    return -(-whole // mmap.PAGESIZE) * mmap.PAGESIZE


def file_bytes(slots: int) -> int:
    """Bytes of the file for a pool of `slots` slots. Pages that nobody has used take no memory."""
    return MOST_ENGINES * _page_bytes(slots)


class EnginePage:
    """One engine's page, mapped in this process until nobody has its views. `fd` is borrowed;
    engines have numbers from 1. Raises OSError or ValueError if the file cannot be mapped, or has
    another size.

    Attributes:
        holds: 16-bit counters, one for each slot, that the engine alone writes.
        fetches: rows that the service alone writes.
        bell: words of 32 bits; see `SENT` and `MOST_HELD`.
    """

    def __init__(self, fd: int, number: int, slots: int) -> None:
        size = _page_bytes(slots)
        self._map = mmap.mmap(fd, size, offset=(number - 1) * size)
        view = memoryview(self._map)
        self.holds = view[: _HOLD_BYTES * slots]
        bell = size - _BELL_BYTES
        self.fetches = view[bell - _FETCH_BYTES : bell]
        self.bell = view[bell:].cast("I")

    def clear(self) -> None:
        """All becomes zero, for the next engine of this number. The memory is given back."""
        self._map.madvise(mmap.MADV_REMOVE)


_HEAD = struct.Struct("<III")
"""The number of the content in its row, modulo 2^32 and not 0; its size; and its checksum."""


class FetchRow(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The state of a fetch after so many messages about it, the first included; None if no tier has
    a block to add. Keys and places that it names are those of the whole fetch."""

    fetch: int
    messages: int
    state: FetchState | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FetchRow)


class FetchRows:
    """How far fetches are, in the rows of one engine: the service writes, and the engine reads
    without a message or a system call. The reader may look while the writer is at it, since a
    checksum tells. Single-threaded."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._numbers = memory.cast("I")[:: FETCH_ROW_BYTES // 4]
        self._read = [0] * FETCH_ROWS

    def write(self, news: FetchRow) -> None:
        """Replace what the row of a fetch has."""
        state = news.state
        if state is not None and len(state.awaited) + len(state.later) > MOST_RANGES:
            awaited = state.awaited[:MOST_RANGES]
            later = state.later[: MOST_RANGES - len(awaited)]
            state = replace(state, awaited=awaited, later=later)
            news = FetchRow(news.fetch, news.messages, state)
        content, row = _encoder.encode(news), row_of(news.fetch)
        number = self._numbers[row] % 0xFFFFFFFF + 1
        head = _HEAD.pack(number, len(content), zlib.crc32(content, number))
        self._row(row)[: len(head) + len(content)] = head + content

    def read(self, fetch: int) -> FetchRow | None:
        """What the row of a fetch has, which may be about another one; None if it has nothing, or
        nothing new."""
        row = row_of(fetch)
        if self._numbers[row] == self._read[row]:
            return None
        copy = bytes(self._row(row))
        number, size, checksum = _HEAD.unpack_from(copy)
        content = copy[_HEAD.size : _HEAD.size + size]
        if zlib.crc32(content, number) != checksum:
            return None  # it is being written
        self._read[row] = number
        try:
            return _decoder.decode(content)
        except msgspec.DecodeError:
            return None

    def _row(self, row: int) -> memoryview:
        return self._memory[row * FETCH_ROW_BYTES : (row + 1) * FETCH_ROW_BYTES]


def row_of(fetch: int) -> int:
    """The row of a fetch. The engine gives its fetches such numbers that each has its own."""
    return fetch % FETCH_ROWS


def most_at_once(most_held: int) -> int:
    """The slots that a load may hold if it is the only one, by the word `MOST_HELD`: so a long
    prompt is a hit in a small pool, too."""
    return 2 * most_held


class LoadHolds:
    """The holds of an engine that keeps the service's limit. Single-threaded."""

    def __init__(self, reader: IndexReader, bell: memoryview) -> None:
        self._reader = reader
        self._bell = bell

    @property
    def room(self) -> int | None:
        """How many further slots a load may hold now. None if there is no limit."""
        most, held = self._bell[MOST_HELD], self._reader.held_slots
        if not most:
            return None
        return max(0, most - held) if held else most_at_once(most)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """The number of blocks that can be loaded, from the first key on."""
        found, room = self._reader.lookup(keys), self.room
        if room is None or found <= room:
            return found
        slots = self._lease(keys[:found])  # loads may hold some of them already
        if not slots:
            return room
        self._reader.release(slots)
        return found

    def lease(self, keys: Sequence[bytes]) -> list[int] | None:
        """Hold the blocks of `keys`, until `release`. Returns their slots; None, and holds nothing,
        if one of them is not ready, or they would be too many."""
        slots = self._lease(keys) if self._bell[MOST_HELD] else self._reader.lease(keys)
        if slots:
            self._count()
        return slots

    def release(self, slots: Sequence[int]) -> None:
        """End a hold of each slot."""
        self._reader.release(slots)
        self._count()

    def settle(self, slots: Sequence[int]) -> None:
        self._reader.settle(slots)
        self._count()

    def _lease(self, keys: Sequence[bytes]) -> list[int] | None:
        held, room = self._reader.held_slots, self.room
        slots = self._reader.lease(keys)
        if slots and room is not None and self._reader.held_slots - held > room:
            self._reader.release(slots)
            return None
        return slots

    def _count(self) -> None:
        self._bell[LOADS] = (self._bell[LOADS] + 1) % (1 << 32)


_SHARE = 4
"""Of a pool's slots, the loads of an engine may hold one of so many if there are other engines. Not
tuned."""

STALLED_SECONDS = 10.0
"""Loads of an engine that begins and ends none for so long are stalled: a load takes
milliseconds."""


class EngineHolds:
    """The holds of one engine, as the service sees them. Single-threaded.

    A slot that an engine holds is never given away, whatever the limit: the engine may read it. The
    service limits what else the engine gets.
    """

    def __init__(self, page: EnginePage, num_slots: int, name: str) -> None:
        self._holds = page.holds
        self._bell = page.bell
        self._num_slots = num_slots
        self._name = name
        self._most = 0
        self._loads = self._bell[LOADS]
        self._changed_at: float | None = None
        self._is_over = False

    @property
    def slots(self) -> int:
        """How many slots it holds; takes O(slots)."""
        import numpy as np  # `import flexkv` reads this file, and needs no numpy

        return int(np.count_nonzero(np.frombuffer(self._holds, np.uint16)))

    @property
    def is_over(self) -> bool:
        """Whether it held more than any engine should, at the last `look`."""
        return self._is_over

    def limit(self, engines: int) -> None:
        """Tell the engine how much it may hold, for so many engines of the pool. One alone may hold
        all."""
        self._most = max(1, self._num_slots // _SHARE) if engines > 1 else 0
        self._bell[MOST_HELD] = self._most

    def room(self, others: int) -> int:
        """How many blocks a fetch may bring beside those of `others` blocks."""
        most = self._most if others else most_at_once(self._most)
        if self._is_over:
            return 0
        return max(0, most - others) if most else sys.maxsize

    def look(self, now: float, *, is_short: bool) -> None:
        """Look at what it holds. `now` is time.monotonic(); `is_short` says whether evictions have
        met many slots that engines hold."""
        loads = self._bell[LOADS]
        if loads != self._loads or self._changed_at is None:
            self._loads, self._changed_at = loads, now
        if not (is_short or self._is_over):
            return
        most, held = most_at_once(self._most), self.slots
        was_over, self._is_over = self._is_over, 0 < most < held
        if self._is_over and not was_over:
            logger.warning(
                "engine %r holds %d of the pool's %d blocks for its loads; allowed: %d; it gets no "
                "further slots for stores and no fetches until it holds fewer; restart it if it "
                "hangs",
                self._name,
                held,
                self._num_slots,
                most,
            )

    def is_stalled(self, now: float) -> bool:
        """Whether loads that it may have do not end."""
        return self._changed_at is not None and now - self._changed_at > STALLED_SECONDS
