# SPDX-License-Identifier: Apache-2.0
"""Copies between the arena and the engine's pages.

The engine's workers copy. This module keeps the ordered transfers and reads the workers' reports.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from flexkv.client import Ended, Transfer
from flexkv.figures.definitions import LOAD_SECONDS, STORE_SECONDS
from flexkv.figures.meter import Meter
from flexkv.host.board import CELLS, CompletionBoard
from flexkv.types.mover import Direction, Status

logger = logging.getLogger(__name__)

LOAD_RESERVE = CELLS // 4
"""Cells that only loads may take, so that a flood of stores never turns a load into a miss."""


def log_stopped(ranks: Sequence[int]) -> None:
    """Log that ranks have ended their copies, so that the cache does nothing more."""
    logger.error(
        "rank %s has ended its copies after an error (see its log); loads and stores are "
        "disabled; restart the engine to use the cache again",
        ", ".join(map(str, ranks)),
    )


class TransferRow(Protocol):
    """Blocks in the order of the prefix."""

    @property
    def slots(self) -> Sequence[int]: ...
    @property
    def keys(self) -> Sequence[bytes]: ...
    def __len__(self) -> int: ...


RowType = TypeVar("RowType", bound=TransferRow)


@dataclass(slots=True, eq=False)
class DeviceCopy(Generic[RowType]):
    """A transfer under way, with what only the cache knows of it.

    Attributes:
        held: whether `DeviceLink.poll` passes over it.
        keeps_cell: whether its cell stays in use after the end, until `DeviceLink.free_cell`,
            because another process reads it.
        done: whether all ranks have copied all blocks; set once they have reported.
    """

    transfer: Transfer
    blocks: RowType = field(repr=False)
    held: bool = False
    keeps_cell: bool = False
    done: bool = False
    begun: float = field(default_factory=time.monotonic, repr=False)


class DeviceLink(Generic[RowType]):
    """Transfers under way between the arena and the engine, at most one for each cell of the board,
    whose cells no other object acquires. Single-threaded.

    Attributes:
        unreported: the number of transfers that `poll` has not returned.
        under_way: the transfers whose end no rank, or not every rank, has reported, by id.
    """

    def __init__(self, board: CompletionBoard, meter: Meter) -> None:
        self._board = board
        self._seconds = {
            Direction.LOAD: meter.histogram(LOAD_SECONDS),
            Direction.STORE: meter.histogram(STORE_SECONDS),
        }
        self._pending: dict[int, DeviceCopy[RowType]] = {}
        self.under_way: dict[int, Transfer] = {}
        self._ending: deque[DeviceCopy[RowType]] = deque()
        self._ended: list[DeviceCopy[RowType]] = []
        self._kept_cells: set[int] = set()
        self.unreported = 0
        self._next_id = 1

    @property
    def stores(self) -> list[DeviceCopy[RowType]]:
        """The stores under way."""
        pending = self._pending.values()
        return [each for each in pending if each.transfer.direction is Direction.STORE]

    @property
    def stopped_ranks(self) -> list[int]:
        """Numbers of the ranks that have ended their copies after an error."""
        return self._board.stopped_ranks

    def begin(
        self,
        direction: Direction,
        keys: Sequence[bytes],
        blocks: RowType,
        *,
        held: bool,
        keeps_cell: bool = False,
    ) -> Transfer | None:
        """Make a transfer that the adapter orders from its workers, of blocks that the caller has
        leased or reserved. `keys` are those of the blocks, or more in the same order. None if no
        cell of the board is free; `LOAD_RESERVE` cells are for loads only."""
        cell = self._board.acquire(LOAD_RESERVE if direction is Direction.STORE else 0)
        if cell is None:
            return None
        if len(keys) != len(blocks):
            keys = blocks.keys
        transfer = Transfer(self._next_id, direction, cell, keys, blocks.slots)
        self._next_id += 1
        self.under_way[transfer.id] = transfer
        self._pending[transfer.id] = DeviceCopy(transfer, blocks, held, keeps_cell)
        self.unreported += 1
        return transfer

    def confirm(self, transfer_id: int) -> None:
        """Let `poll` report the end of a held transfer, if it is under way."""
        copy = self._pending.get(transfer_id)
        if copy is not None:
            copy.held = False

    def cancel(self, transfer_id: int) -> DeviceCopy[RowType] | None:
        """Take back a transfer that was never ordered, and return it; None if it is not under
        way."""
        copy = self._pending.pop(transfer_id, None)
        self.under_way.pop(transfer_id, None)  # after an error in between, the next call does it
        if copy is not None:
            self.unreported -= 1
            self._board.give_back(copy.transfer.cell)
        return copy

    def free_cell(self, cell: int) -> None:
        """Nobody reads any more what ranks have reported in a cell that was kept. Idempotent."""
        if cell in self._kept_cells:
            self._kept_cells.remove(cell)
            self._board.give_back(cell)

    def blocks_of(self, transfer_id: int) -> RowType | None:
        """The blocks of a transfer that is not finished; None for another."""
        copy = self._pending.get(transfer_id)
        if copy is None:
            ending = (each for each in self._ending if each.transfer.id == transfer_id)
            copy = next(ending, None)
        return None if copy is None else copy.blocks

    def rows_in_use(self, direction: Direction) -> list[RowType]:
        """The blocks of the loads or the stores that have not been finished, after an error that
        may have lost some; frees the cells of all others, and counts anew."""
        pending = {each.transfer.cell for each in self._pending.values()}
        self._board.keep(pending | self._kept_cells)
        self.unreported = len(self._pending) + len(self._ending) + len(self._ended)
        self.under_way = {number: each.transfer for number, each in self._pending.items()}
        copies = [*self._pending.values(), *self._ending]
        return [each.blocks for each in copies if each.transfer.direction is direction]

    def poll(self, finish: Callable[[DeviceCopy[RowType]], None]) -> list[Ended]:
        """The transfers that all ranks have reported since the last call, apart from held ones.
        Does not wait. Calls `finish` with each of them, once. If that raises, this raises; the next
        call goes on with the other transfers and returns all."""
        reported = []
        for copy in self._pending.values():
            if copy.held:
                continue
            status = self._board.status(copy.transfer.cell)
            if status is not Status.PENDING:
                copy.done = status is Status.DONE
                reported.append(copy)
        for copy in reported:
            transfer = copy.transfer
            if copy.done:
                seconds = time.monotonic() - copy.begun
                self._seconds[transfer.direction].observe(seconds)
            self.under_way.pop(transfer.id, None)
            self._ending.append(self._pending.pop(transfer.id))
            if copy.keeps_cell:
                self._kept_cells.add(transfer.cell)
            else:
                self._board.give_back(transfer.cell)
        while self._ending:
            self._ended.append(self._ending.popleft())
            finish(self._ended[-1])
        if not self._ended:
            return []
        ended = [
            Ended(each.transfer.id, each.transfer.direction, each.done) for each in self._ended
        ]
        self._ended.clear()
        self.unreported -= len(ended)
        return ended
