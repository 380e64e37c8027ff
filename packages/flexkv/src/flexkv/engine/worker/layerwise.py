# SPDX-License-Identifier: Apache-2.0
"""Loads that the forward pass of the same step waits for, layer by layer."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.orders import CopyOrder
from flexkv.engine.worker.layers import LayerParts
from flexkv.engine.worker.rank_copies import RankCopies
from flexkv.engine.worker.step_marks import StepMarks
from flexkv.types.mover import Direction, Status


@dataclass(slots=True)
class LayerwiseLoad:
    """A load that the running forward pass waits for, part by part.

    Attributes:
        order: the order of the load.
        blocks: the engine's blocks.
        offsets: the place of each block in the arena.
        tickets: tickets of its parts, in the order in which layers need them; fewer than parts if
            one could not begin.
        ended: tickets that are known to have ended.
        followed: how many parts the forward pass already waits for.
        failed: whether a part has failed, or the forward pass could not be made to wait.
    """

    order: CopyOrder
    blocks: array[int]
    offsets: array[int]
    tickets: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    followed: int = 0
    failed: bool = False


class LayerwiseLoads:
    """The layer-wise loads of one rank in a step.

    Args:
        copies: the copies of the rank.
        parts: the parts of a block, in the order in which layers need them.
        work_so_far: see `WorkerSide`.
        marks: behind the last steps.
        boundary: catches errors of single loads.

    Attributes:
        failed: transfer ids of failed loads.
        running: the loads that have not ended.
        bad_blocks: what `take_bad_blocks` will return.
    """

    def __init__(
        self,
        copies: RankCopies,
        parts: LayerParts,
        work_so_far: Callable[[], int],
        marks: StepMarks,
        boundary: ErrorBoundary,
    ) -> None:
        self.failed: set[int] = set()
        self.bad_blocks: set[int] = set()
        self._copies = copies
        self._parts = parts
        self._work_so_far = work_so_far
        self._marks = marks
        self._boundary = boundary
        self.running: list[LayerwiseLoad] = []

    def start(self, orders: Sequence[CopyOrder], after: int) -> None:
        """Begin the loads of a step, behind `after` where the steps that they follow are not
        marked."""
        loads = [
            LayerwiseLoad(order, array("Q", order.engine_blocks), self._copies.offsets(order))
            for order in orders
        ]
        self.running += loads
        # The forward pass needs the first part of all loads before the second part of any.
        for number, planes in enumerate(self._parts.planes):
            for load in loads:
                if len(load.tickets) == number:
                    self._start_part(load, planes, after)

    def started(self) -> Iterable[int]:
        """Transfer ids of the loads that have begun and not ended."""
        return (load.order.transfer_id for load in self.running)

    def wait_for_layer(self, layer: str) -> None:
        """Make the forward pass wait until the blocks that `layer` reads are loaded."""
        for load in self.running:
            self._follow(load, self._parts.last.get(layer, -1) + 1)

    def end(self) -> None:
        """Wait for the end of the step's loads. Failures must be reported with this step, and no
        copy may write to blocks that are recomputed."""
        while self.running:
            load = self.running[-1]
            for ticket in load.tickets:
                status = self._copies.wait_for_end(ticket, "a load that the step computed on")
                self._end_part(load, ticket, status)
            if load.failed or len(load.tickets) < len(self._parts.planes):
                self.fail(load.order)
            else:
                self._copies.report(load.order, Status.DONE)
            self.running.pop()

    def take_bad_blocks(self) -> set[int]:
        """The engine's blocks that failed loads were to fill, since the last call."""
        bad_blocks, self.bad_blocks = self.bad_blocks, set()
        return bad_blocks

    def give_up(self) -> None:
        """Fail all loads, after `end` has failed and the mover has been closed."""
        for load in self.running:
            self.fail(load.order)
        self.running.clear()

    def fail(self, order: CopyOrder) -> None:
        """Fail a load, which may not have begun."""
        self.bad_blocks.update(order.engine_blocks)
        self.failed.add(order.transfer_id)
        self._copies.report(order, Status.FAILED)

    def _start_part(self, load: LayerwiseLoad, planes: range, after: int) -> None:
        if self._copies.suspended:
            return
        with self._boundary.guard("load of blocks", "they count as a miss"):
            load.tickets.append(
                self._copies.mover.submit(
                    Direction.LOAD,
                    load.blocks,
                    load.offsets,
                    after,
                    planes=planes,
                    mark=self._marks.behind(load.order.follows),
                )
            )
            self._copies.begun(load.tickets[-1], Direction.LOAD, load.blocks, planes)

    def _follow(self, load: LayerwiseLoad, parts: int) -> None:
        """Make later work of the engine wait for the first parts of a load."""
        if load.followed >= parts:
            return
        with self._boundary.guard("waiting for a layer", "its blocks count as not loaded"):
            stream = self._work_so_far()
            for ticket in load.tickets[load.followed : parts]:
                self._end_part(load, ticket, self._copies.mover.hold(ticket, stream))
            load.followed = parts
            return
        load.followed = parts
        load.failed = True

    def _end_part(self, load: LayerwiseLoad, ticket: int, status: Status) -> None:
        if status is not Status.PENDING and ticket not in load.ended:
            load.ended.add(ticket)
            self._copies.figures.end(ticket, status)
            load.failed |= status is Status.FAILED
