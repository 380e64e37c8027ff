# SPDX-License-Identifier: Apache-2.0
"""The worker side: copies the shard of one rank by the scheduler side's orders."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from flexkv.engine.orders import CopyOrder, StepOrders, StepReport
from flexkv.engine.worker.layers import LayerParts, LayerwiseLoads
from flexkv.engine.worker.rank_copies import RankCopies
from flexkv.session import Session
from flexkv.types.mover import Direction, Status

logger = logging.getLogger(__name__)

IDLE_WAIT_SECONDS = 0.001
"""Seconds that a step without a forward pass waits for the end of a copy. Such steps follow one
another at once while a copy runs; if the same cores copy, they slow the copy down. 1 ms is the time
of a few such steps on 2 cores. It bounds the wait of a request that arrives meanwhile."""


@dataclass(slots=True)
class RunningLoad:
    """A request's load under way: the engine's blocks that each ticket of the mover fills, and
    those that will not be filled. If it is `complete`, no further part follows."""

    parts: dict[int, list[int]] = field(default_factory=dict)
    bad_blocks: list[int] = field(default_factory=list)
    complete: bool = False


class WorkerSide:
    """All that the engine's model runner calls. One per worker process; single-threaded.

    Args:
        session: with the arena; owned, closed after the mover. A cache in the same process may use
            it.
        copies: of this rank; their mover is owned.
        parts: of a block, for layer-wise loads.
        fails_by_request: whether a load that failed in part counts as failed as a whole, because a
            part is of no use; otherwise its failed blocks are reported.
        alone: whether nothing but the engine and this worker side reads or writes the blocks. If
            not, every load follows everything.
    """

    def __init__(
        self,
        session: Session,
        copies: RankCopies,
        parts: LayerParts,
        *,
        fails_by_request: bool = False,
        alone: bool = True,
    ) -> None:
        self.session = session
        self.fails_by_request = fails_by_request
        self.figures = copies.figures
        self._copies = copies
        self._layerwise = LayerwiseLoads(copies, parts)
        self._alone = alone
        self._begun_loads: set[int] = set()
        self._loads: dict[str, RunningLoad] = {}
        self._received: set[str] = set()
        self._stores: dict[int, int] = {}
        self._last_store = 0
        self._bad_blocks: set[int] = set()
        self._failed_requests: set[str] = set()

    def rests(self, orders: StepOrders) -> bool:
        """Whether a step has nothing to do but to compute: its orders begin nothing, no copy is
        under way, and the end of each is reported."""
        return orders.has_forward and not (
            orders.loads
            or orders.stores
            or orders.layerwise
            or orders.fences
            or orders.failed_loads
            or orders.unfilled
            or orders.number
            or orders.proves
            or self._loads
            or self._stores
            or self._layerwise.running
            or self._layerwise.bad_blocks
            or self._bad_blocks
            or self._failed_requests
            or self._received
            or self.figures.load_rate
        )

    @property
    def has_figures(self) -> bool:
        """Whether to take the figures now."""
        return self.figures.active or bool(self._copies.boundary.failures)

    def fence(self, orders: StepOrders) -> None:
        """Wait for stores whose source blocks the coming forward may overwrite."""
        for transfer_id in orders.fences:
            ticket = self._stores.pop(transfer_id, None)
            if ticket is None:
                continue
            status = self._copies.wait_for_end(ticket, "a store of a preempted request's blocks")
            self.figures.end(ticket, status)

    def drain(self) -> None:
        """Wait until no ordered copy reads or writes the engine's blocks."""
        self._layerwise.end()
        self.fence(StepOrders(fences=list(self._stores)))
        for load in self._loads.values():
            for ticket in load.parts:
                self._copies.wait_for_end(ticket, "a load, before the engine's blocks are freed")

    def suspend(self) -> None:
        """The engine takes the memory of its pages away: begin no copy from now on, and wait until
        none reads or writes the engine's blocks. Ordered copies count as failed until `resume`."""
        self._copies.suspended = True
        self.drain()

    def resume(self) -> None:
        """The engine's pages have memory again."""
        self._copies.suspended = False

    def stop_copying(self) -> None:
        """End all copies for good, after `fence` has failed. Once a copy has failed, the scheduler
        side offers no more loads."""
        self._copies.stop()

    def start_loads(self, orders: StepOrders) -> None:
        """Start this step's loads, behind the steps that may still read what the blocks held
        before. Where these are not marked, loads start behind the engine's work so far."""
        self._begun_loads.clear()
        self._copies.tickets.clear()
        after = self._copies.work_so_far()
        if orders.layerwise:
            self._layerwise.start(orders.layerwise, after)
        for request_id, order in orders.loads.items():
            load = self._loads.setdefault(request_id, RunningLoad())
            load.complete = order.last
            mark = self._copies.mark_behind(order.follows)
            ticket = self._copies.submit(Direction.LOAD, order, after, mark)
            if ticket is None:
                load.bad_blocks.extend(order.engine_blocks)
            else:
                load.parts[ticket] = order.engine_blocks
                self._copies.begun(ticket, Direction.LOAD, order.engine_blocks)
            self._begun_loads.add(order.transfer_id)
        if orders.unfilled or orders.failed_loads:
            self._refuse_loads(orders)

    def fail_loads(self, orders: StepOrders) -> None:
        """Fail the loads that `start_loads` has not started."""
        layerwise = set(self._layerwise.started())
        for order in orders.layerwise:
            if order.transfer_id not in layerwise:
                self._layerwise.fail(order)
        for request_id, order in orders.loads.items():
            if order.transfer_id not in self._begun_loads:
                ticket = self._copies.tickets.get(order.transfer_id)
                load = self._loads.setdefault(request_id, RunningLoad())
                load.complete = order.last
                if ticket is not None:  # it writes to the blocks
                    load.parts[ticket] = order.engine_blocks
                    continue
                self._copies.report(order, Status.FAILED)
                load.bad_blocks.extend(order.engine_blocks)
        self._refuse_loads(orders)

    def wait_for_layer(self, layer: str) -> None:
        """Make the forward pass wait until the blocks that `layer` reads are loaded."""
        if self._layerwise.running:
            self._layerwise.wait_for_layer(layer)

    def start_stores(self, orders: StepOrders) -> None:
        """Start this step's stores behind the engine's work so far, the forward pass that computes
        their blocks. Stores that have started already are skipped."""
        if self._layerwise.running:
            self._layerwise.end()
        if not orders.stores:
            return
        after = self._copies.work_so_far()
        for order in self._not_started(orders):
            if order.built_on in self._layerwise.failed:
                # Its blocks were computed on a failed load.
                self._copies.report(order, Status.FAILED)
            elif (ticket := self._copies.submit(Direction.STORE, order, after)) is not None:
                self._stores[order.transfer_id] = ticket
                self._copies.begun(ticket, Direction.STORE, order.engine_blocks)
            self._last_store = order.transfer_id

    def fail_stores(self, orders: StepOrders) -> None:
        """Fail the stores that `start_stores` has not started."""
        for order in self._not_started(orders):
            ticket = self._copies.tickets.get(order.transfer_id)
            if ticket is not None:  # it reads the blocks
                self._stores[order.transfer_id] = ticket
            elif order.transfer_id not in self._stores:
                self._copies.report(order, Status.FAILED)
            self._last_store = order.transfer_id

    def finished(self, orders: StepOrders) -> None:
        """At the end of a step: look for copies that have ended, for `take_finished`."""
        # With speculative decoding vLLM asks this, and what failed, before it lets stores begin.
        if self._layerwise.running:
            self._layerwise.end()
        self.step_ended(orders)
        if not orders.has_forward:
            # Up to 0.30 vLLM lets no stores begin in such a step.
            self.start_stores(orders)
            self._wait_a_little()
        self._poll_stores()
        self._poll_loads()

    def take_finished(self) -> set[str]:
        """Requests whose loads have ended, each once. Behind no guard: an error would lose those
        that the engine waits for."""
        received, self._received = self._received, set()
        return received

    def step_ended(self, orders: StepOrders) -> None:
        """The engine has queued all work of a step. `finished` does this, too."""
        if orders.step and self._alone and self._copies.work_so_far():
            self._copies.step_ended(orders.step)

    def poll_later(self, orders: StepOrders) -> None:
        """After `finished` has failed: the next step reports this step's results, except for loads
        that the forward pass needed."""
        if not orders.has_forward:
            self.fail_stores(orders)
        if self._layerwise.running:
            # No copy may write to blocks that are recomputed.
            self.stop_copying()
            self._layerwise.give_up()

    def give_up(self, orders: StepOrders) -> None:
        """Instead of `finished`, once it has failed for too long: end all copies for good, and
        report all loads and stores as ended, the loads as failed. Called in each step from then
        on."""
        self.stop_copying()
        self._layerwise.give_up()
        self.fail_loads(orders)
        self.fail_stores(orders)
        for load in self._loads.values():
            blocks = [block for part in load.parts.values() for block in part]
            self._bad_blocks.update([] if self.fails_by_request else [*load.bad_blocks, *blocks])
        self._received |= self._loads.keys()
        self._failed_requests |= self._loads.keys() if self.fails_by_request else set()
        self._loads.clear()
        self._stores.clear()

    def take_bad_blocks(self) -> set[int]:
        """The engine's blocks whose loads have failed since the last call."""
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks | self._layerwise.take_bad_blocks()

    def take_failed_requests(self) -> set[str]:
        """Requests with failed loads, of those that `finished` reported as ended since the last
        call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def report(self, orders: StepOrders) -> StepReport | None:
        """The report of this step for the scheduler side; None if it is empty."""
        rate = self.figures.take_load_rate()
        if not (orders.number or orders.proves or rate):
            return None
        return StepReport(orders.number, rate, orders.proves)

    def close(self) -> None:
        """End all copies, then leave the session. Idempotent."""
        self._copies.mover.close()
        self.session.close()

    def _wait_a_little(self) -> None:
        loading = next((load.parts for load in self._loads.values() if load.parts), None)
        if loading is not None:
            ticket = next(reversed(loading))  # the parts of a load end in their order
            self._copies.mover.wait(ticket, IDLE_WAIT_SECONDS)

    def _refuse_loads(self, orders: StepOrders) -> None:
        """Fail the loads that the scheduler side could not order."""
        self._bad_blocks.update(orders.unfilled)
        for request_id, engine_blocks in orders.failed_loads.items():
            load = self._loads.setdefault(request_id, RunningLoad())
            load.complete = True
            load.bad_blocks.extend(engine_blocks)

    def _not_started(self, orders: StepOrders) -> list[CopyOrder]:
        """The stores of a step that have not started yet."""
        return [order for order in orders.stores if order.transfer_id > self._last_store]

    def _poll_loads(self) -> None:
        for request_id, load in list(self._loads.items()):
            for ticket, engine_blocks in list(load.parts.items()):
                status = self._copies.mover.poll(ticket)
                if status is Status.PENDING:
                    continue
                if status is Status.FAILED:
                    load.bad_blocks.extend(engine_blocks)
                del load.parts[ticket]
                self.figures.end(ticket, status)
            if load.complete and not load.parts:
                if not self.fails_by_request:
                    self._bad_blocks.update(load.bad_blocks)
                elif load.bad_blocks:
                    self._failed_requests.add(request_id)
                self._received.add(request_id)
                del self._loads[request_id]

    def _poll_stores(self) -> None:
        for transfer_id, ticket in list(self._stores.items()):
            status = self._copies.mover.poll(ticket)
            if status is not Status.PENDING:
                del self._stores[transfer_id]
                self.figures.end(ticket, status)
