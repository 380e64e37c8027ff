# SPDX-License-Identifier: Apache-2.0
"""The page of an engine: its holds, the states of its fetches and its bell, in one memory file with
those of all others.

The file outlives the service, so that the next one sees what living engines hold.
"""

from __future__ import annotations

import mmap

MOST_ENGINES = 63
"""Engines of a pool at once; each has a completion board in the arena and a page. Not tuned."""

SENT, READ, PUBLISHED = 0, 1, 2
"""Words of the bell, modulo 2^32: numbers of packets that the service has sent, and that the engine
has read, and of stores that the service has published. So a step in which nothing has come makes no
system call, and the service sends nothing new to an engine that is behind."""

MOST_HELD, LOADS = 3, 4
"""Further words: the slots that loads of the engine may hold together, 0 for any number, from the
service; and the beginnings and ends of loads, modulo 2^32, from the engine."""

FETCH_ROWS = 64
"""Fetches at once that have a row; see `flexkv.service.fetch_rows`. Not tuned."""
FETCH_ROW_BYTES = 512
"""Room for the state of a fetch from three tiers. Not tuned."""

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
    """One engine's page, mapped in this process.

    Args:
        fd: descriptor of the file; borrowed.
        number: number of the engine, from 1.
        slots: slots of the pool.

    It is unmapped once nobody has its views.

    Attributes:
        holds: 16-bit counters, one for each slot, that the engine alone writes.
        fetches: rows that the service alone writes.
        bell: words of 32 bits; see `SENT` and `MOST_HELD`.

    Raises:
        OSError, ValueError: the file cannot be mapped, or has another size.
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
