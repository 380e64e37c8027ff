# SPDX-License-Identifier: Apache-2.0
"""Copies between the arena and the engine's pages.

The engine's workers copy. This module keeps the ordered transfers and reads the workers' reports.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from flexkv.figures.definitions import LOAD_SECONDS, STORE_SECONDS
from flexkv.figures.meter import Meter
from flexkv.host.board import CELLS, CompletionBoard
from flexkv.index.block_index import Block
from flexkv.types.mover import Direction, Status

_SLOT: Callable[[Block], int] = attrgetter("slot")

LOAD_RESERVE = CELLS // 4
"""Cells that only loads may take, so that a flood of stores never turns a load into a miss."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Blocks that workers copy between the arena and the engine's pages. Made by `KVCache`; the
    adapter reads it.

    Attributes:
        id: number of the transfer; each transfer of a cache has a greater one than those before.
        direction: LOAD or STORE, as seen from the engine's pages.
        cell: cell of the completion board in which the ranks report.
        blocks: blocks in the order of the prefix. Workers copy from or to the slot of each.
        status: PENDING until `KVCache.poll` returns the transfer.
        begun: time.monotonic() when the transfer was made, in seconds.
        held: whether `KVCache.poll` passes over the transfer. The adapter sets it while it does not
            know whether the bytes to store are right.
    """

    id: int
    direction: Direction
    cell: int
    blocks: list[Block] = field(repr=False)
    status: Status = Status.PENDING
    begun: float = field(default_factory=time.monotonic, repr=False)
    held: bool = False

    @property
    def failed(self) -> bool:
        """Whether it has ended without success."""
        return self.status is Status.FAILED

    @property
    def slots(self) -> list[int]:
        """The arena slots of the blocks, in their order."""
        return list(map(_SLOT, self.blocks))


class DeviceLink:
    """Transfers under way between the arena and the engine, at most one for each cell of the board.
    Single-threaded.

    Args:
        board: completion board of the arena; the caller's. No other object acquires its cells.
        meter: counts the seconds of transfers that succeed.

    Attributes:
        unreported: the number of transfers that `poll` has not returned.
    """

    def __init__(self, board: CompletionBoard, meter: Meter) -> None:
        self._board = board
        self._seconds = {
            Direction.LOAD: meter.histogram(LOAD_SECONDS),
            Direction.STORE: meter.histogram(STORE_SECONDS),
        }
        self._pending: dict[int, Transfer] = {}
        self._ending: deque[Transfer] = deque()
        self._ended: list[Transfer] = []
        self.unreported = 0
        self._next_id = 1

    def __len__(self) -> int:
        """The number of transfers under way."""
        return len(self._pending)

    @property
    def loading_blocks(self) -> int:
        """The number of blocks in the loads under way."""
        pending = self._pending.values()
        if not pending:
            return 0
        return sum(len(t.blocks) for t in pending if t.direction is Direction.LOAD)

    @property
    def stores(self) -> list[Transfer]:
        """The stores under way."""
        return [t for t in self._pending.values() if t.direction is Direction.STORE]

    @property
    def stopped_ranks(self) -> list[int]:
        """Numbers of the ranks that have ended their copies after an error."""
        return self._board.stopped_ranks

    def begin(self, direction: Direction, blocks: list[Block]) -> Transfer | None:
        """Make a transfer that the adapter orders from its workers.

        Args:
            direction: LOAD or STORE; `LOAD_RESERVE` cells are for loads only.
            blocks: blocks that the caller has leased or reserved, in the order of the prefix.

        Returns:
            None if no cell of the board is free.
        """
        cell = self._board.acquire(LOAD_RESERVE if direction is Direction.STORE else 0)
        if cell is None:
            return None
        transfer = Transfer(self._next_id, direction, cell, blocks)
        self._next_id += 1
        self._pending[transfer.id] = transfer
        self.unreported += 1
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Take back a transfer that was never ordered."""
        del self._pending[transfer.id]
        self.unreported -= 1
        self._board.give_back(transfer.cell)

    @property
    def under_way(self) -> list[Transfer]:
        """The transfers that `poll` has not reported as ended."""
        return list(self._pending.values())

    def blocks_in_use(self, direction: Direction) -> list[Block]:
        """The blocks of the loads or the stores that have not been finished, after an error that
        may have lost some; frees the cells of all others, and counts anew."""
        self._board.keep({each.cell for each in self._pending.values()})
        self.unreported = len(self._pending) + len(self._ending) + len(self._ended)
        transfers = [*self._pending.values(), *self._ending]
        return [block for t in transfers if t.direction is direction for block in t.blocks]

    def poll(self, finish: Callable[[Transfer], None]) -> list[Transfer]:
        """The transfers that all ranks have reported since the last call, apart from held ones;
        their status is DONE or FAILED. Does not wait.

        Args:
            finish: called with each of them, once. If it raises, this raises; the next call goes on
                with the other transfers and returns all.
        """
        reported = []
        for transfer in self._pending.values():
            if transfer.held:
                continue
            status = self._board.status(transfer.cell)
            if status is not Status.PENDING:
                transfer.status = status
                reported.append(transfer)
        for transfer in reported:
            if transfer.status is Status.DONE:
                seconds = time.monotonic() - transfer.begun
                self._seconds[transfer.direction].observe(seconds)
            self._ending.append(self._pending.pop(transfer.id))
            self._board.give_back(transfer.cell)
        while self._ending:
            self._ended.append(self._ending.popleft())
            finish(self._ended[-1])
        ended, self._ended = self._ended, []
        self.unreported -= len(ended)
        return ended
