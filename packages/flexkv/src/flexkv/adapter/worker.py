# SPDX-License-Identifier: Apache-2.0
"""The worker side: copies the shard of one rank, as ordered."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flexkv import Direction, Mover, Session, Status
from flexkv.adapter.figures import CopyFigures
from flexkv.adapter.guard import Edge
from flexkv.adapter.layers import LayerParts
from flexkv.adapter.metrics import Samples
from flexkv.adapter.offsets import SlotOffsets
from flexkv.adapter.orders import CopyOrder, StepOrders, StepReport

logger = logging.getLogger(__name__)

IDLE_WAIT_SECONDS = 0.001
"""How long a step without a forward waits for a copy instead of returning empty-handed. Such
steps follow one another at once while a copy runs, and on a machine whose cores also copy they
slow it down; 1 ms is the time of a few of them on 2 cores. It bounds what a request that arrives
meanwhile waits."""

_PATIENCE_SECONDS = 1.0

_CALIBRATION_BYTES = 8 << 20
"""Copied to measure the link: 0.2 ms at 40 GB/s, much more than it takes to begin a copy."""

_CALIBRATIONS = 3
"""The first one touches memory that nobody has touched yet."""


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


@dataclass(slots=True)
class LayerwiseLoad:
    """A load that the running forward follows, part by part.

    Attributes:
        order: what is loaded.
        blocks: vLLM's blocks.
        offsets: where each lies in the arena.
        tickets: of its parts, in the order in which layers need them; fewer than there are parts if
            one could not be begun.
        ended: those of them that are known to have ended.
        followed: how many of them the forward follows already.
        failed: whether one has failed, or the forward could not be made to follow.
    """

    order: CopyOrder
    blocks: array[int]
    offsets: array[int]
    tickets: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    followed: int = 0
    failed: bool = False


class WorkerSide:
    """All that vLLM's model runner calls. One per worker process; single-threaded.

    Args:
        session: with the arena; owned, closed after the mover.
        mover: of this rank's pages.
        rank: this rank.
        block_step: bytes from one engine block to the next in a slot.
        plane_bytes: of an engine block in each plane of the mover.
        stored: the planes that this rank stores.
        parts: of a block, in the order in which layers need them.
        work_so_far: what a copy submitted now must wait for, as `Mover.submit` takes it.
        edge: where errors of single transfers end.
        fails_by_request: whether a load that failed in part has failed whole, as where a part is
            worth nothing; else its blocks are told.
    """

    def __init__(
        self,
        session: Session,
        mover: Mover,
        rank: int,
        *,
        block_step: int,
        plane_bytes: Sequence[int],
        stored: range,
        parts: LayerParts,
        work_so_far: Callable[[], int],
        edge: Edge,
        fails_by_request: bool = False,
    ) -> None:
        self._session = session
        self._arena = session.arena
        self._mover = mover
        self._rank = rank
        self._slot_offsets = SlotOffsets(session.arena, rank, block_step)
        self._engine_blocks = session.arena.spec.format.engine_blocks
        self._work_so_far = work_so_far
        self._edge = edge
        self._plane_bytes = plane_bytes
        self._block_bytes = {
            Direction.LOAD: sum(plane_bytes),
            Direction.STORE: sum(plane_bytes[i] for i in stored),
        }
        self._parts = parts
        self._figures = CopyFigures(edge, self._copy_seconds)
        self._layerwise: list[LayerwiseLoad] = []
        self._failed_layerwise: set[int] = set()
        self._begun_loads: set[int] = set()
        self._loads: dict[str, RunningLoad] = {}
        self._received: set[str] = set()
        self._stores: dict[int, int] = {}
        self._last_store = 0
        self._releases: dict[str, list[int]] = {}
        self._released: set[str] = set()
        self._fails_by_request = fails_by_request
        self._bad_blocks: set[int] = set()
        self._failed_requests: set[str] = set()

    def calibrate(self, engine_blocks: int) -> None:
        """Measure what a load takes, before the engine uses its pages: the first hits are judged by
        that, and not by one load that something slowed down.

        Args:
            engine_blocks: that there are.
        """
        slots = range(min(self._arena.spec.num_slots, engine_blocks // self._engine_blocks))
        count = max(1, _CALIBRATION_BYTES // (self._block_bytes[Direction.LOAD] or 1))
        blocks = array("Q", range(min(count, len(slots) * self._engine_blocks)))
        offsets = self._slot_offsets.of(slots, count=len(blocks))
        with self._edge.guard("measuring copies", "the first loads measure them"):
            for _ in range(_CALIBRATIONS):
                ticket = self._mover.submit(Direction.LOAD, blocks, offsets)
                status = self._wait_for_end(ticket, "a load that is measured")
                seconds = self._mover.copy_seconds(ticket)
                if status is Status.DONE and seconds is not None:
                    size = len(blocks) * self._block_bytes[Direction.LOAD]
                    self._figures.measured(size, seconds)

    def fence(self, orders: StepOrders) -> None:
        """Wait for stores whose source blocks the coming forward may overwrite."""
        for transfer_id in orders.fences:
            ticket = self._stores.pop(transfer_id, None)
            if ticket is None:
                continue
            status = self._wait_for_end(ticket, "a store of a preempted request's blocks")
            self._figures.end(ticket, status)

    def stop_copying(self) -> None:
        """In place of `fence`, which failed: copies end, now and for good. Once one of them has
        failed, the scheduler side offers nothing any more."""
        self._arena.board.stop(self._rank)
        self._mover.close()

    def start_loads(self, orders: StepOrders) -> None:
        """Start this step's loads, behind the engine's work so far: it may still read what the
        blocks held before."""
        self._begun_loads.clear()
        after = self._work_so_far()
        self._start_layerwise(orders, after)
        for request_id, order in orders.loads.items():
            load = self._loads.setdefault(request_id, RunningLoad())
            load.complete = order.last
            ticket = self._submit(Direction.LOAD, order, after)
            self._begun_loads.add(order.transfer_id)
            if ticket is None:
                load.bad_blocks.extend(order.engine_blocks)
            else:
                load.parts[ticket] = order.engine_blocks
                self._note_begin(ticket, Direction.LOAD, order)
        self._refuse_loads(orders)

    def fail_loads(self, orders: StepOrders) -> None:
        """In place of what `start_loads` has not done: the loads that were not started fail."""
        for order in orders.layerwise:
            if order.transfer_id not in self._begun_loads:
                self._fail_layerwise(order)
        for request_id, order in orders.loads.items():
            if order.transfer_id not in self._begun_loads:
                self._report(order, Status.FAILED)
                load = self._loads.setdefault(request_id, RunningLoad())
                load.complete = order.last
                load.bad_blocks.extend(order.engine_blocks)
        self._refuse_loads(orders)

    def wait_for_layer(self, layer: str) -> None:
        """Let the forward go on with `layer` only when what it looks at is loaded."""
        for load in self._layerwise:
            self._follow(load, self._parts.last.get(layer, -1) + 1)

    def start_stores(self, orders: StepOrders) -> None:
        """Start this step's stores, behind the engine's work so far: the forward that computes
        what they copy. Those that were started before are left alone."""
        self._end_layerwise()
        after = self._work_so_far()
        for order in self._not_started(orders):
            if order.built_on in self._failed_layerwise:
                # It was computed on what is not there.
                self._report(order, Status.FAILED)
            elif (ticket := self._submit(Direction.STORE, order, after)) is not None:
                self._stores[order.transfer_id] = ticket
                self._note_begin(ticket, Direction.STORE, order)
            self._last_store = order.transfer_id

    def fail_stores(self, orders: StepOrders) -> None:
        """In place of what `start_stores` has not done: the stores that were not started fail."""
        for order in self._not_started(orders):
            if order.transfer_id not in self._stores:
                self._report(order, Status.FAILED)
            self._last_store = order.transfer_id

    def finished(self, orders: StepOrders) -> tuple[set[str], set[str]]:
        """Requests whose blocks are read no more, and requests whose loads have ended."""
        # With speculative decoding vLLM asks this, and what failed, before it lets stores begin.
        self._end_layerwise()
        self._releases.update(orders.releases)
        if not orders.has_forward:
            # Up to 0.30 vLLM lets no stores begin in such a step.
            self.start_stores(orders)
            self._wait_a_little()
        self._poll_stores()
        self._poll_loads()
        released, self._released = self._released, set()
        received, self._received = self._received, set()
        return released, received

    def poll_later(self, orders: StepOrders) -> None:
        """In place of `finished`, which failed: the next step's tells what this one's should have,
        but for loads that the forward needed."""
        for request_id, transfer_ids in orders.releases.items():
            if request_id not in self._released:
                self._releases[request_id] = transfer_ids
        if not orders.has_forward:
            self.fail_stores(orders)
        if self._layerwise:
            # Nothing may be written any more into blocks that are computed anew.
            self.stop_copying()
            for load in self._layerwise:
                self._fail_layerwise(load.order)
            self._layerwise.clear()

    def take_bad_blocks(self) -> set[int]:
        """vLLM blocks that were to be loaded and were not, since the last call."""
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks

    def take_failed_requests(self) -> set[str]:
        """Requests whose loads have failed, of those that `finished` said have ended since the last
        call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def report(self, orders: StepOrders) -> StepReport | None:
        """What the scheduler side is to be told of this step; None if it is nothing."""
        rate = self._figures.take_load_rate()
        return StepReport(orders.number, rate) if orders.number or rate else None

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

    def _refuse_loads(self, orders: StepOrders) -> None:
        """What the scheduler side could not order."""
        self._bad_blocks.update(orders.unfilled)
        for request_id, engine_blocks in orders.failed_loads.items():
            load = self._loads.setdefault(request_id, RunningLoad())
            load.complete = True
            load.bad_blocks.extend(engine_blocks)

    def _start_layerwise(self, orders: StepOrders, after: int) -> None:
        loads = [
            LayerwiseLoad(order, array("Q", order.engine_blocks), self._offsets(order))
            for order in orders.layerwise
        ]
        self._layerwise += loads
        self._begun_loads.update(load.order.transfer_id for load in loads)
        # The forward needs the first part of all before the second of one.
        for number, planes in enumerate(self._parts.planes):
            for load in loads:
                if len(load.tickets) == number:
                    self._start_part(load, planes, after)

    def _start_part(self, load: LayerwiseLoad, planes: range, after: int) -> None:
        with self._edge.guard("load of blocks", "they count as a miss"):
            load.tickets.append(
                self._mover.submit(Direction.LOAD, load.blocks, load.offsets, after, planes=planes)
            )
            size = sum(self._plane_bytes[planes.start : planes.stop])
            self._figures.begin(load.tickets[-1], Direction.LOAD, len(load.blocks) * size)

    def _follow(self, load: LayerwiseLoad, parts: int) -> None:
        """Let the engine's work from now on follow the first parts of a load."""
        if load.followed >= parts:
            return
        with self._edge.guard("waiting for a layer", "its blocks count as not loaded"):
            stream = self._work_so_far()
            for ticket in load.tickets[load.followed : parts]:
                self._end_part(load, ticket, self._mover.hold(ticket, stream))
            load.followed = parts
            return
        load.followed = parts
        load.failed = True

    def _end_part(self, load: LayerwiseLoad, ticket: int, status: Status) -> None:
        if status is not Status.PENDING and ticket not in load.ended:
            load.ended.add(ticket)
            self._figures.end(ticket, status)
            load.failed |= status is Status.FAILED

    def _end_layerwise(self) -> None:
        """See the step's layer-wise loads to their end: what failed must be told with this step,
        and nothing may be written any more into blocks that are computed anew."""
        while self._layerwise:
            load = self._layerwise[-1]
            for ticket in load.tickets:
                status = self._wait_for_end(ticket, "a load that the step computed on")
                self._end_part(load, ticket, status)
            if load.failed or len(load.tickets) < len(self._parts.planes):
                self._fail_layerwise(load.order)
            else:
                self._report(load.order, Status.DONE)
            self._layerwise.pop()

    def _fail_layerwise(self, order: CopyOrder) -> None:
        self._bad_blocks.update(order.engine_blocks)
        self._failed_layerwise.add(order.transfer_id)
        self._report(order, Status.FAILED)

    def _report(self, order: CopyOrder, status: Status) -> None:
        """Of what the mover does not report itself."""
        self._arena.board.report(order.cell, self._rank, status)

    def _wait_for_end(self, ticket: int, what: str) -> Status:
        while (status := self._mover.wait(ticket, _PATIENCE_SECONDS)) is Status.PENDING:
            logger.warning("still waiting for %s", what)
        return status

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
        self._report(order, Status.FAILED)
        return None

    def _note_begin(self, ticket: int, direction: Direction, order: CopyOrder) -> None:
        size = len(order.engine_blocks) * self._block_bytes[direction]
        self._figures.begin(ticket, direction, size)

    def _copy_seconds(self, ticket: int) -> float | None:
        return self._mover.copy_seconds(ticket)

    def _not_started(self, orders: StepOrders) -> list[CopyOrder]:
        """The stores of a step that were not started before."""
        return [order for order in orders.stores if order.transfer_id > self._last_store]

    def _offsets(self, order: CopyOrder) -> array[int]:
        """Where each engine block of `order` lies in the arena."""
        return self._slot_offsets.of(order.slots, order.skip, len(order.engine_blocks))

    def _poll_loads(self) -> None:
        for request_id, load in list(self._loads.items()):
            for ticket, engine_blocks in list(load.parts.items()):
                status = self._mover.poll(ticket)
                if status is Status.PENDING:
                    continue
                if status is Status.FAILED:
                    load.bad_blocks.extend(engine_blocks)
                del load.parts[ticket]
                self._figures.end(ticket, status)
            if load.complete and not load.parts:
                if not self._fails_by_request:
                    self._bad_blocks.update(load.bad_blocks)
                elif load.bad_blocks:
                    self._failed_requests.add(request_id)
                self._received.add(request_id)
                del self._loads[request_id]

    def _poll_stores(self) -> None:
        for transfer_id, ticket in list(self._stores.items()):
            status = self._mover.poll(ticket)
            if status is not Status.PENDING:
                del self._stores[transfer_id]
                self._figures.end(ticket, status)
        for request_id, transfer_ids in list(self._releases.items()):
            if not any(self._is_running(transfer_id) for transfer_id in transfer_ids):
                self._released.add(request_id)
                del self._releases[request_id]

    def _is_running(self, transfer_id: int) -> bool:
        # A store may be released before it is started: with speculative decoding vLLM asks what
        # has finished before it lets the stores of the same step begin.
        return transfer_id in self._stores or transfer_id > self._last_store
