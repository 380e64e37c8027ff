# SPDX-License-Identifier: Apache-2.0
"""The link between the arena and the engine's pages.

The engine's workers copy; here is only what has been ordered and what they have reported.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from flexkv.counters import Latencies
from flexkv.host.board import CELLS, CompletionBoard
from flexkv.index import Block
from flexkv.mover import Direction, Status

LOAD_RESERVE = CELLS // 4
"""Cells that only loads may take, so that a flood of stores never turns a load into a miss."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Blocks on their way. Made by `KVCache`; the adapter reads it.

    Attributes:
        id: grows with every transfer of this cache.
        direction: LOAD or STORE, as seen from the engine's pages.
        cell: where the ranks report on the completion board.
        blocks: in the order of the prefix; the slot of each is what the workers copy from or to.
        status: PENDING until `KVCache.poll` returned it.
        begun: time.monotonic() when it was made.
    """

    id: int
    direction: Direction
    cell: int
    blocks: list[Block] = field(repr=False)
    status: Status = Status.PENDING
    begun: float = field(default_factory=time.monotonic, repr=False)

    @property
    def slots(self) -> list[int]:
        return [block.slot for block in self.blocks]


class DeviceLink:
    """Transfers under way between the arena and the engine. Bounded by the board's cells.

    Args:
        board: where ranks report.
        latencies: get the times of transfers that succeed.
    """

    def __init__(self, board: CompletionBoard, latencies: Latencies) -> None:
        self._board = board
        self._seconds = {Direction.LOAD: latencies.load, Direction.STORE: latencies.store}
        self._pending: dict[int, Transfer] = {}
        self._next_id = 1

    def __len__(self) -> int:
        """Transfers under way."""
        return len(self._pending)

    @property
    def loading_blocks(self) -> int:
        """Blocks of the loads under way."""
        pending = self._pending.values()
        return sum(len(t.blocks) for t in pending if t.direction is Direction.LOAD)

    @property
    def stopped_ranks(self) -> list[int]:
        """Ranks that copy nothing any more."""
        return self._board.stopped_ranks

    def begin(self, direction: Direction, blocks: list[Block]) -> Transfer | None:
        """A transfer for the adapter to order; None if too many are under way."""
        cell = self._board.acquire(LOAD_RESERVE if direction is Direction.STORE else 0)
        if cell is None:
            return None
        transfer = Transfer(self._next_id, direction, cell, blocks)
        self._next_id += 1
        self._pending[transfer.id] = transfer
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """A transfer that was never ordered is under way no more."""
        del self._pending[transfer.id]
        self._board.give_back(transfer.cell)

    def poll(self) -> list[Transfer]:
        """Transfers that all ranks have reported since the last call, DONE or FAILED."""
        finished = []
        for transfer in self._pending.values():
            status = self._board.status(transfer.cell)
            if status is not Status.PENDING:
                transfer.status = status
                finished.append(transfer)
        for transfer in finished:
            del self._pending[transfer.id]
            self._board.give_back(transfer.cell)
            if transfer.status is Status.DONE:
                seconds = time.monotonic() - transfer.begun
                self._seconds[transfer.direction].observe(seconds)
        return finished
