# SPDX-License-Identifier: Apache-2.0
"""The worker side: copies the shard of one rank, as ordered."""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass

from flexkv import Direction, Mover, Session, Status
from flexkv_vllm.edge import Edge
from flexkv_vllm.orders import CopyOrder, StepOrders

logger = logging.getLogger("flexkv.vllm")

IDLE_WAIT_SECONDS = 0.001
"""How long a step without a forward waits for a copy instead of returning empty-handed. Such
steps follow one another at once while a copy runs, and on a machine whose cores also copy they
slow it down; 1 ms is the time of a few of them on 2 cores. It bounds what a request that arrives
meanwhile waits."""

_FENCE_SLICE_SECONDS = 1.0


@dataclass(slots=True)
class RunningLoad:
    """A load under way: the mover's ticket, and the vLLM blocks that it fills."""

    ticket: int
    engine_blocks: list[int]


class WorkerSide:
    """All that vLLM's model runner calls. One per worker process; single-threaded.

    Args:
        session: with the arena; owned, closed after the mover.
        mover: of this rank's pages.
        rank: this rank.
        block_bytes: bytes of one engine block of this rank.
        edge: where errors of single transfers end.
    """

    def __init__(
        self, session: Session, mover: Mover, rank: int, block_bytes: int, edge: Edge
    ) -> None:
        self._session = session
        self._arena = session.arena
        self._mover = mover
        self._rank = rank
        self._block_bytes = block_bytes
        self._engine_blocks = session.arena.spec.format.engine_blocks
        self._edge = edge
        self._loads: dict[str, RunningLoad] = {}
        self._stores: dict[int, int] = {}
        self._last_store = 0
        self._releases: dict[str, list[int]] = {}
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()

    def fence(self, orders: StepOrders) -> None:
        """Wait for stores whose source blocks the coming forward may overwrite."""
        for transfer_id in orders.fences:
            ticket = self._stores.pop(transfer_id, None)
            if ticket is None:
                continue
            while self._mover.wait(ticket, _FENCE_SLICE_SECONDS) is Status.PENDING:
                logger.warning("still waiting for a store of a preempted request's blocks")

    def start_loads(self, orders: StepOrders, after: int) -> None:
        """Start this step's loads, behind the work that `after` names (see `Mover.submit`)."""
        for request_id, engine_blocks in orders.failed_loads.items():
            self._received.add(request_id)
            self._bad_blocks.update(engine_blocks)
        for request_id, order in orders.loads.items():
            ticket = self._submit(Direction.LOAD, order, after)
            if ticket is None:
                self._received.add(request_id)
                self._bad_blocks.update(order.engine_blocks)
            else:
                self._loads[request_id] = RunningLoad(ticket, order.engine_blocks)

    def start_stores(self, orders: StepOrders, after: int) -> None:
        """Start this step's stores, behind the forward that `after` names."""
        for order in orders.stores:
            ticket = self._submit(Direction.STORE, order, after)
            if ticket is not None:
                self._stores[order.transfer_id] = ticket
            self._last_store = order.transfer_id

    def finished(self, orders: StepOrders) -> tuple[set[str], set[str]]:
        """Requests whose blocks are read no more, and requests whose loads have ended."""
        self._releases.update(orders.releases)
        if not orders.has_forward:
            self._wait_a_little()
        self._poll_loads()
        received, self._received = self._received, set()
        return self._poll_stores(), received

    def take_bad_blocks(self) -> set[int]:
        """vLLM blocks that were to be loaded and were not, since the last call."""
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks

    def close(self) -> None:
        """End all copies, then leave the session. Idempotent."""
        self._mover.close()
        self._session.close()

    def _wait_a_little(self) -> None:
        if self._loads:
            ticket = next(iter(self._loads.values())).ticket
        elif self._releases and self._stores:
            ticket = next(iter(self._stores.values()))
        else:
            return
        self._mover.wait(ticket, IDLE_WAIT_SECONDS)

    def _submit(self, direction: Direction, order: CopyOrder, after: int) -> int | None:
        place = f"{direction.name.lower()} of blocks"
        with self._edge.guard(place, "they count as a miss"):
            return self._mover.submit(
                direction,
                array("Q", order.engine_blocks),
                self._offsets(order),
                after,
                self._arena.board.flag_address(order.cell, self._rank),
            )
        self._arena.board.report(order.cell, self._rank, Status.FAILED)
        return None

    def _offsets(self, order: CopyOrder) -> array[int]:
        """Where each engine block of `order` lies in the arena."""
        starts = [self._arena.shard_offset(slot, self._rank) for slot in order.slots]
        steps = range(0, self._engine_blocks * self._block_bytes, self._block_bytes)
        offsets = [start + step for start in starts for step in steps]
        return array("Q", offsets[order.skip : order.skip + len(order.engine_blocks)])

    def _poll_loads(self) -> None:
        for request_id, load in list(self._loads.items()):
            status = self._mover.poll(load.ticket)
            if status is Status.PENDING:
                continue
            del self._loads[request_id]
            self._received.add(request_id)
            if status is Status.FAILED:
                self._bad_blocks.update(load.engine_blocks)

    def _poll_stores(self) -> set[str]:
        if not self._stores and not self._releases:
            return set()
        for transfer_id, ticket in list(self._stores.items()):
            if self._mover.poll(ticket) is not Status.PENDING:
                del self._stores[transfer_id]
        released = {
            request_id
            for request_id, transfer_ids in self._releases.items()
            if not any(self._is_running(transfer_id) for transfer_id in transfer_ids)
        }
        for request_id in released:
            del self._releases[request_id]
        return released

    def _is_running(self, transfer_id: int) -> bool:
        # A store may be released before it is started: with speculative decoding vLLM asks what
        # has finished before it lets the stores of the same step begin.
        return transfer_id in self._stores or transfer_id > self._last_store
