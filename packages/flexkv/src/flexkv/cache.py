# SPDX-License-Identifier: Apache-2.0
"""KVCache: what an adapter's scheduler side talks to.

Nothing here copies and nothing blocks. `load` and `store` reserve and return a transfer, which
the adapter hands to its workers; their movers report on the completion board; `poll` reads the
board and publishes or releases.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexkv.arena import Arena
from flexkv.counters import Counters
from flexkv.eviction import EvictionPolicy
from flexkv.index import Block, BlockIndex
from flexkv.transfer.mover import Direction, Status

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Transfer:
    """Blocks on their way. Made by `KVCache`; the adapter reads it.

    Attributes:
        id: grows with every transfer of this cache.
        direction: LOAD or STORE, as seen from the engine's pages.
        cell: where the ranks report on the completion board.
        blocks: in the order of the prefix; the slot of each is what the workers copy from or to.
        status: PENDING until `KVCache.poll` returned it.
    """

    id: int
    direction: Direction
    cell: int
    blocks: list[Block] = field(repr=False)
    status: Status = Status.PENDING

    @property
    def slots(self) -> list[int]:
        return [block.slot for block in self.blocks]


class KVCache:
    """The cache of one engine: an index over the slots of an arena. Single-threaded.

    Args:
        arena: attached, and owned by the caller. Its board's cells are handed out here, so one
            process must have only one KVCache on it.
        policy: decides what leaves when the arena is full.
    """

    def __init__(self, arena: Arena, policy: EvictionPolicy) -> None:
        self._board = arena.board
        self._block_bytes = sum(arena.spec.format.shard_bytes)
        self._index = BlockIndex(arena.spec.num_slots, policy)
        self._pending: dict[int, Transfer] = {}
        self._next_id = 1
        self._counters = Counters()

    @property
    def counters(self) -> Counters:
        self._counters.evicted_blocks = self._index.evictions
        return self._counters

    @property
    def ready_blocks(self) -> int:
        return len(self._index)

    @property
    def pending_transfers(self) -> int:
        return len(self._pending)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many blocks of this prefix can be loaded, from the first key on. No side effect."""
        return self._index.lookup(keys)

    def load(self, keys: Sequence[bytes]) -> Transfer | None:
        """Lease the blocks of `keys`, all of them ready, for a copy into the engine.

        Returns None if one of them is not, or too much is under way: then it is a miss.
        """
        blocks = self._index.lease(keys)
        if blocks is None:
            return None
        transfer = self._begin(Direction.LOAD, blocks)
        if transfer is None:
            self._index.release(blocks)
            return None
        self._counters.loads += 1
        return transfer

    def missing(self, keys: Sequence[bytes], start: int = 0) -> list[int]:
        """Positions, from `start` on, of the keys whose blocks have no slot."""
        index = self._index
        return [i for i in range(start, len(keys)) if keys[i] not in index]

    def store(self, keys: Sequence[bytes], positions: Sequence[int]) -> Transfer | None:
        """Reserve slots for blocks of a prefix.

        Args:
            keys: the whole prefix, first block first.
            positions: which of them to store, ascending; as `missing` returned them.

        Returns:
            A transfer of the first blocks of `positions` that slots could be had for, or None if
            there is none. The prefix itself is never evicted to make room for its own end.
        """
        keep: set[bytes] = set()
        if self._index.free_slots < len(positions):
            keep = set(keys)
            self._index.touch(keys)
        blocks = []
        for position in positions:
            block = self._index.reserve(keys[position], keep)
            if block is None:
                break
            blocks.append(block)
        self._counters.refused_blocks += len(positions) - len(blocks)
        if not blocks:
            return None
        transfer = self._begin(Direction.STORE, blocks)
        if transfer is None:
            self._counters.refused_blocks += len(blocks)
            self._index.abandon(blocks)
            return None
        self._counters.stores += 1
        return transfer

    def poll(self) -> list[Transfer]:
        """Finish what all ranks have reported: publish stores, release loads.

        Returns the transfers that finished, their status DONE or FAILED.
        """
        finished = []
        for transfer in self._pending.values():
            status = self._board.status(transfer.cell)
            if status is not Status.PENDING:
                transfer.status = status
                finished.append(transfer)
        for transfer in finished:
            self._finish(transfer)
        return finished

    def clear(self) -> None:
        """Forget every block. Safe with transfers under way: what they carry is not published."""
        self._index.clear()
        self._counters.resets += 1

    def _begin(self, direction: Direction, blocks: list[Block]) -> Transfer | None:
        cell = self._board.acquire()
        if cell is None:
            return None
        transfer = Transfer(self._next_id, direction, cell, blocks)
        self._next_id += 1
        self._pending[transfer.id] = transfer
        return transfer

    def _finish(self, transfer: Transfer) -> None:
        del self._pending[transfer.id]
        self._board.give_back(transfer.cell)
        count = len(transfer.blocks)
        if transfer.direction is Direction.STORE:
            self._finish_store(transfer, count)
        else:
            self._finish_load(transfer, count)

    def _finish_store(self, transfer: Transfer, count: int) -> None:
        if transfer.status is Status.DONE:
            self._index.publish(transfer.blocks)
            self._counters.stored_blocks += count
            self._counters.stored_bytes += count * self._block_bytes
        else:
            self._index.abandon(transfer.blocks)
            self._counters.failed_stores += 1
            if self._counters.failed_stores == 1:
                logger.warning("a store of %d blocks failed: not cached (logged once)", count)

    def _finish_load(self, transfer: Transfer, count: int) -> None:
        if transfer.status is Status.DONE:
            self._counters.loaded_blocks += count
            self._counters.loaded_bytes += count * self._block_bytes
        else:
            self._counters.failed_loads += 1
            self._index.drop(transfer.blocks)
            if self._counters.failed_loads == 1:
                logger.warning("a load of %d blocks failed: dropped (logged once)", count)
        self._index.release(transfer.blocks)
