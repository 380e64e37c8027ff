# SPDX-License-Identifier: Apache-2.0
"""The completion board, on which workers report ended transfers to the scheduler.

It is a table of 32-bit words in shared memory, with a row ("cell") for each transfer under way and
a column for each rank. The scheduler clears a cell before it orders a transfer. Each rank's mover
writes its word when its bytes are in place, and the scheduler polls the words. No process waits or
sends messages, and the engine forwards nothing from its workers. Each word is aligned and has one
writer at a time, so no reader sees half of a word. A last row records which ranks have ended their
copies for good.
"""

from __future__ import annotations

from collections.abc import Collection

from flexkv.types.mover import Status

_ROWS = 4096
"""Rows of the board: the cells, and the row `_STOPPED`. A row has a word for each rank."""
CELLS = _ROWS - 1
"""The most transfers under way at once. An engine step orders a few per request. If no cell is
free, a load is a miss and a store is dropped. Not tuned."""

_STOPPED = CELLS
"""The row after the cells. A rank's word there is FAILED once the rank has ended its copies."""

WORD = 4
"""Bytes of a word, the size of CUDA's stream-ordered memory writes."""


def board_bytes(ranks: int) -> int:
    """Size of the board of `ranks` ranks, in bytes."""
    return _ROWS * ranks * WORD


class CompletionBoard:
    """A view of the board at `address` in this process's mapping of the arena, whose memory of
    `board_bytes(ranks)` bytes it borrows until `release`."""

    __slots__ = ("_address", "_free", "_ranks", "_words")

    def __init__(self, memory: memoryview, ranks: int, address: int) -> None:
        self._words = memory.cast("I")
        self._ranks = ranks
        self._address = address
        self._free = list(range(CELLS - 1, -1, -1))

    def acquire(self, reserve: int = 0) -> int | None:
        """Take a free cell, in use until `give_back`, and set all its words to PENDING. None if at
        most `reserve` cells are free. Only the scheduler may call this."""
        if len(self._free) <= reserve:
            return None
        cell = self._free.pop()
        start = cell * self._ranks
        for word in range(start, start + self._ranks):
            self._words[word] = Status.PENDING
        return cell

    def give_back(self, cell: int) -> None:
        """Free a cell. No word of it may be PENDING. Only the scheduler may call this."""
        self._free.append(cell)

    def keep(self, cells: Collection[int]) -> None:
        """Free all cells but these, after an error that may have lost some. No rank may report in
        the others any more. Only the scheduler may call this."""
        self._free = [cell for cell in range(CELLS - 1, -1, -1) if cell not in cells]

    def status(self, cell: int) -> Status:
        """The state of a transfer: PENDING until every rank has reported, then FAILED if a rank has
        failed, else DONE."""
        start = cell * self._ranks
        words = self._words[start : start + self._ranks].tolist()
        if Status.PENDING in words:
            return Status.PENDING
        return Status.DONE if words.count(Status.DONE) == len(words) else Status.FAILED

    def report(self, cell: int, rank: int, status: Status) -> None:
        """Write a rank's word from Python, for a transfer that the rank's mover did not accept."""
        self._words[cell * self._ranks + rank] = status

    def stop(self, rank: int) -> None:
        """Record that a rank has ended its copies. All transfers fail from now on."""
        self.report(_STOPPED, rank, Status.FAILED)

    @property
    def stopped_ranks(self) -> list[int]:
        """Ranks that have ended their copies."""
        start = _STOPPED * self._ranks
        words = self._words[start : start + self._ranks].tolist()
        return [rank for rank, word in enumerate(words) if word == Status.FAILED]

    def flag_address(self, cell: int, rank: int) -> int:
        """Address of a rank's word in this process, for the rank's mover to write to."""
        return self._address + (cell * self._ranks + rank) * WORD

    def release(self) -> None:
        """Release the view, before the mapping is closed. Other calls fail afterwards."""
        self._words.release()
