# SPDX-License-Identifier: Apache-2.0
"""Copies between the arena and the engine's pages.

The engine's workers copy. This module keeps the ordered transfers and reads the workers' reports.
"""

from __future__ import annotations

import logging
import time
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
    """A transfer that `DeviceLink.poll` has not returned, with what only the cache knows of it.

    Attributes:
        held: whether `DeviceLink.poll` passes over it.
        keeps_cell: whether its cell stays in use after the end, until `DeviceLink.free_cell`,
            because another process reads it.
        status: PENDING until all ranks have reported; its cell belongs to it until then.
        finished: whether `poll` has finished it, and returns it next.
    """

    transfer: Transfer
    blocks: RowType = field(repr=False)
    held: bool = False
    keeps_cell: bool = False
    status: Status = Status.PENDING
    finished: bool = False
    begun: float = field(default_factory=time.monotonic, repr=False)

    @property
    def done(self) -> bool:
        """Whether all ranks have copied all blocks."""
        return self.status is Status.DONE


class DeviceLink(Generic[RowType]):
    """Transfers under way between the arena and the engine, at most one for each cell of the board,
    whose cells no other object acquires. `unreported` has by id those that `poll` has not returned;
    only this object changes it. Single-threaded."""

    def __init__(self, board: CompletionBoard, meter: Meter) -> None:
        self._board = board
        self._seconds = {
            Direction.LOAD: meter.histogram(LOAD_SECONDS),
            Direction.STORE: meter.histogram(STORE_SECONDS),
        }
        self.unreported: dict[int, DeviceCopy[RowType]] = {}
        self._kept_cells: set[int] = set()
        self._next_id = 1

    @property
    def under_way(self) -> dict[int, Transfer]:
        """The transfers whose end no rank, or not every rank, has reported, by id."""
        copies = self.unreported
        if not copies:  # as in most steps: an engine reads this several times in each
            return {}
        return {i: copy.transfer for i, copy in copies.items() if copy.status is Status.PENDING}

    @property
    def stores(self) -> list[DeviceCopy[RowType]]:
        """The stores under way."""
        return [each for each in self._pending if each.transfer.direction is Direction.STORE]

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
        self.unreported[transfer.id] = DeviceCopy(transfer, blocks, held, keeps_cell)
        return transfer

    def confirm(self, transfer_id: int) -> None:
        """Let `poll` report the end of a held transfer, if it is under way."""
        copy = self.unreported.get(transfer_id)
        if copy is not None:
            copy.held = False

    def cancel(self, transfer_id: int) -> DeviceCopy[RowType] | None:
        """Take back a transfer that was never ordered, and return it; None if it is not under
        way."""
        copy = self.unreported.get(transfer_id)
        if copy is None or copy.status is not Status.PENDING:
            return None
        del self.unreported[transfer_id]
        self._board.give_back(copy.transfer.cell)
        return copy

    def free_cell(self, cell: int) -> None:
        """Nobody reads any more what ranks have reported in a cell that was kept. Idempotent."""
        if cell in self._kept_cells:
            self._kept_cells.remove(cell)
            self._board.give_back(cell)

    def blocks_of(self, transfer_id: int) -> RowType | None:
        """The blocks of a transfer that is not finished; None for another."""
        copy = self.unreported.get(transfer_id)
        return None if copy is None or copy.finished else copy.blocks

    def rows_in_use(self, direction: Direction) -> list[RowType]:
        """The blocks of the loads or the stores that have not been finished, after an error that
        may have lost some; frees the cells of all others."""
        self._board.keep({copy.transfer.cell for copy in self._pending} | self._kept_cells)
        copies = [copy for copy in self.unreported.values() if not copy.finished]
        return [each.blocks for each in copies if each.transfer.direction is direction]

    def poll(self, finish: Callable[[DeviceCopy[RowType]], None]) -> list[Ended]:
        """The transfers that all ranks have reported since the last call, apart from held ones.
        Does not wait. Calls `finish` with each of them, once. If that raises, this raises; the next
        call goes on with the other transfers and returns all."""
        ended: list[DeviceCopy[RowType]] = []
        for copy in self.unreported.values():
            if copy.status is Status.PENDING:
                if copy.held:
                    continue
                cell = copy.transfer.cell
                status = self._board.status(cell)
                if status is Status.PENDING:
                    continue
                if copy.keeps_cell:
                    self._kept_cells.add(cell)
                copy.status = status
                if not copy.keeps_cell:
                    self._board.give_back(cell)
                if copy.done:
                    self._seconds[copy.transfer.direction].observe(time.monotonic() - copy.begun)
            ended.append(copy)
        for copy in ended:
            if not copy.finished:
                copy.finished = True
                finish(copy)
        if not ended:
            return []
        self.unreported = {i: copy for i, copy in self.unreported.items() if not copy.finished}
        return [Ended(each.transfer.id, each.transfer.direction, each.done) for each in ended]

    @property
    def _pending(self) -> list[DeviceCopy[RowType]]:
        return [each for each in self.unreported.values() if each.status is Status.PENDING]
