# SPDX-License-Identifier: Apache-2.0
"""The completion board: how workers report to the scheduler that a transfer is done.

A table of 32-bit words in shared memory, one row ("cell") per transfer under way and one column
per rank. The scheduler clears a cell before it orders a transfer; each rank's mover writes its
word when its bytes are in place; the scheduler reads it. No process waits, no message is sent, and
the engine need not forward anything from its workers. Each word has one writer at a time and is
aligned, so no reader sees half of a word. One more row records which ranks have ended their copies
for good.
"""

from __future__ import annotations

from flexkv.mover import Status

_ROWS = 4096
CELLS = _ROWS - 1
"""Transfers that can be under way at once. An engine step orders at most a few per request. A load
that does not fit is a miss; a store that does not fit is dropped."""

_STOPPED = CELLS
"""The row behind the cells: a rank's word is FAILED once the rank has ended its copies."""

WORD = 4
"""Bytes of a word; CUDA's stream-ordered memory writes have this size too."""


def board_bytes(ranks: int) -> int:
    """Size of the board of `ranks` ranks."""
    return _ROWS * ranks * WORD


class CompletionBoard:
    """A view of the board in this process's mapping of the arena.

    Does not own the memory; `release` gives the view back before the mapping is closed.
    """

    __slots__ = ("_address", "_free", "_ranks", "_words")

    def __init__(self, memory: memoryview, ranks: int, address: int) -> None:
        """View `memory`, `board_bytes(ranks)` bytes that lie at `address` in this process."""
        self._words = memory.cast("I")
        self._ranks = ranks
        self._address = address
        self._free = list(range(CELLS - 1, -1, -1))

    def acquire(self, reserve: int = 0) -> int | None:
        """Take a free cell, all its words PENDING; None if no more than `reserve` are free.
        Scheduler only."""
        if len(self._free) <= reserve:
            return None
        cell = self._free.pop()
        start = cell * self._ranks
        for word in range(start, start + self._ranks):
            self._words[word] = Status.PENDING
        return cell

    def give_back(self, cell: int) -> None:
        """Return a cell whose words are all final. Scheduler only."""
        self._free.append(cell)

    def status(self, cell: int) -> Status:
        """PENDING until every rank has reported, then FAILED if any has, else DONE."""
        start = cell * self._ranks
        words = self._words[start : start + self._ranks].tolist()
        if Status.PENDING in words:
            return Status.PENDING
        return Status.DONE if words.count(Status.DONE) == len(words) else Status.FAILED

    def report(self, cell: int, rank: int, status: Status) -> None:
        """Write a rank's word from Python: for a transfer that its mover never accepted."""
        self._words[cell * self._ranks + rank] = status

    def stop(self, rank: int) -> None:
        """A rank has ended its copies: all transfers fail from now on."""
        self.report(_STOPPED, rank, Status.FAILED)

    @property
    def stopped_ranks(self) -> list[int]:
        """Ranks that have ended their copies."""
        start = _STOPPED * self._ranks
        words = self._words[start : start + self._ranks].tolist()
        return [rank for rank, word in enumerate(words) if word == Status.FAILED]

    def flag_address(self, cell: int, rank: int) -> int:
        """Address of a rank's word in this process, for the rank's mover."""
        return self._address + (cell * self._ranks + rank) * WORD

    def release(self) -> None:
        """Give the view back; the board cannot be used after it."""
        self._words.release()
