# SPDX-License-Identifier: Apache-2.0
"""The worker side: copies the shard of one rank, as ordered."""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass, field

import torch

from flexkv import Direction, Mover, Session, Status
from flexkv_vllm.device import work_so_far
from flexkv_vllm.edge import Edge
from flexkv_vllm.figures import CopyFigures
from flexkv_vllm.orders import CopyOrder, StepOrders
from flexkv_vllm.stats import Samples

logger = logging.getLogger("flexkv.vllm")

IDLE_WAIT_SECONDS = 0.001
"""How long a step without a forward waits for a copy instead of returning empty-handed. Such
steps follow one another at once while a copy runs, and on a machine whose cores also copy they
slow it down; 1 ms is the time of a few of them on 2 cores. It bounds what a request that arrives
meanwhile waits."""

_FENCE_SLICE_SECONDS = 1.0


@dataclass(slots=True)
class RunningLoad:
    """A request's load under way, in one part or several.

    Attributes:
        parts: ticket of the mover to the vLLM blocks that it fills.
        bad_blocks: vLLM blocks that will not be filled.
        complete: whether no further part follows.
    """

    parts: dict[int, list[int]] = field(default_factory=dict)
    bad_blocks: list[int] = field(default_factory=list)
    complete: bool = False


class WorkerSide:
    """All that vLLM's model runner calls. One per worker process; single-threaded.

    Args:
        session: with the arena; owned, closed after the mover.
        mover: of this rank's pages.
        rank: this rank.
        block_step: bytes from one engine block to the next in a slot.
        block_bytes: of an engine block that this rank copies, by direction.
        device: of the pages.
        edge: where errors of single transfers end.
    """

    def __init__(
        self,
        session: Session,
        mover: Mover,
        rank: int,
        *,
        block_step: int,
        block_bytes: dict[Direction, int],
        device: torch.device,
        edge: Edge,
    ) -> None:
        self._session = session
        self._arena = session.arena
        self._mover = mover
        self._rank = rank
        self._block_step = block_step
        self._engine_blocks = session.arena.spec.format.engine_blocks
        self._device = device
        self._edge = edge
        self._figures = CopyFigures(block_bytes, edge)
        self._loads: dict[str, RunningLoad] = {}
        self._stores: dict[int, int] = {}
        self._last_store = 0
        self._releases: dict[str, list[int]] = {}
        self._bad_blocks: set[int] = set()

    def fence(self, orders: StepOrders) -> None:
        """Wait for stores whose source blocks the coming forward may overwrite."""
        for transfer_id in orders.fences:
            ticket = self._stores.pop(transfer_id, None)
            if ticket is None:
                continue
            while (status := self._mover.wait(ticket, _FENCE_SLICE_SECONDS)) is Status.PENDING:
                logger.warning("still waiting for a store of a preempted request's blocks")
            self._figures.end(ticket, status)

    def start_loads(self, orders: StepOrders) -> None:
        """Start this step's loads, behind the engine's work so far: it may still read what the
        blocks held before."""
        after = work_so_far(self._device)
        for request_id, order in orders.loads.items():
            load = self._loads.setdefault(request_id, RunningLoad())
            load.complete = order.last
            ticket = self._submit(Direction.LOAD, order, after)
            if ticket is None:
                load.bad_blocks.extend(order.engine_blocks)
            else:
                load.parts[ticket] = order.engine_blocks
        for request_id, engine_blocks in orders.failed_loads.items():
            load = self._loads.setdefault(request_id, RunningLoad())
            load.complete = True
            load.bad_blocks.extend(engine_blocks)

    def start_stores(self, orders: StepOrders) -> None:
        """Start this step's stores, behind the engine's work so far: the forward that computes
        what they copy."""
        after = work_so_far(self._device)
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
        return self._poll_stores(), self._poll_loads()

    def take_bad_blocks(self) -> set[int]:
        """vLLM blocks that were to be loaded and were not, since the last call."""
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks

    @property
    def has_samples(self) -> bool:
        """Whether `take_samples` may have something."""
        return self._figures.active

    def take_samples(self) -> Samples:
        """What was counted since the last call."""
        return self._figures.take()

    def close(self) -> None:
        """End all copies, then leave the session. Idempotent."""
        self._mover.close()
        self._session.close()

    def _wait_a_little(self) -> None:
        loading = next((load.parts for load in self._loads.values() if load.parts), None)
        if loading is not None:
            ticket = next(iter(loading))
        elif self._releases and self._stores:
            ticket = next(iter(self._stores.values()))
        else:
            return
        self._mover.wait(ticket, IDLE_WAIT_SECONDS)

    def _submit(self, direction: Direction, order: CopyOrder, after: int) -> int | None:
        place = f"{direction.name.lower()} of blocks"
        with self._edge.guard(place, "they count as a miss"):
            ticket = self._mover.submit(
                direction,
                array("Q", order.engine_blocks),
                self._offsets(order),
                after,
                self._arena.board.flag_address(order.cell, self._rank),
            )
            self._figures.begin(ticket, direction, len(order.engine_blocks))
            return ticket
        self._arena.board.report(order.cell, self._rank, Status.FAILED)
        return None

    def _offsets(self, order: CopyOrder) -> array[int]:
        """Where each engine block of `order` lies in the arena."""
        starts = [self._arena.shard_offset(slot, self._rank) for slot in order.slots]
        steps = range(0, self._engine_blocks * self._block_step, self._block_step)
        offsets = [start + step for start in starts for step in steps]
        return array("Q", offsets[order.skip : order.skip + len(order.engine_blocks)])

    def _poll_loads(self) -> set[str]:
        received = set()
        for request_id, load in list(self._loads.items()):
            for ticket, engine_blocks in list(load.parts.items()):
                status = self._mover.poll(ticket)
                if status is Status.PENDING:
                    continue
                del load.parts[ticket]
                self._figures.end(ticket, status)
                if status is Status.FAILED:
                    load.bad_blocks.extend(engine_blocks)
            if load.complete and not load.parts:
                del self._loads[request_id]
                self._bad_blocks.update(load.bad_blocks)
                received.add(request_id)
        return received

    def _poll_stores(self) -> set[str]:
        if not self._stores and not self._releases:
            return set()
        for transfer_id, ticket in list(self._stores.items()):
            status = self._mover.poll(ticket)
            if status is not Status.PENDING:
                del self._stores[transfer_id]
                self._figures.end(ticket, status)
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
