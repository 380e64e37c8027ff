# SPDX-License-Identifier: Apache-2.0
"""Loads that the forward of the same step follows, layer by layer."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from flexkv.adapter.guard import Edge
from flexkv.adapter.layers import LayerParts
from flexkv.adapter.orders import CopyOrder
from flexkv.adapter.rank_copies import RankCopies
from flexkv.mover import Direction, Status


@dataclass(slots=True)
class LayerwiseLoad:
    """A load that the running forward follows, part by part.

    Attributes:
        order: what is loaded.
        blocks: the engine's blocks.
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


class LayerwiseLoads:
    """The layer-wise loads of one rank in a step.

    Args:
        copies: of the rank.
        parts: of a block, in the order in which layers need them.
        work_so_far: see `WorkerSide`.
        edge: where errors of single loads end.

    Attributes:
        failed: transfer ids of those that have failed.
    """

    def __init__(
        self, copies: RankCopies, parts: LayerParts, work_so_far: Callable[[], int], edge: Edge
    ) -> None:
        self.failed: set[int] = set()
        self._bad_blocks: set[int] = set()
        self._copies = copies
        self._parts = parts
        self._work_so_far = work_so_far
        self._edge = edge
        self._running: list[LayerwiseLoad] = []

    def __bool__(self) -> bool:
        """Whether one has not ended."""
        return bool(self._running)

    def start(self, orders: Sequence[CopyOrder], after: int) -> None:
        """Begin the loads of a step."""
        loads = [
            LayerwiseLoad(order, array("Q", order.engine_blocks), self._copies.offsets(order))
            for order in orders
        ]
        self._running += loads
        # The forward needs the first part of all before the second of one.
        for number, planes in enumerate(self._parts.planes):
            for load in loads:
                if len(load.tickets) == number:
                    self._start_part(load, planes, after)

    def started(self) -> Iterable[int]:
        """Transfer ids of the loads that have begun and not ended."""
        return (load.order.transfer_id for load in self._running)

    def wait_for_layer(self, layer: str) -> None:
        """Let the forward go on with `layer` only when what it looks at is loaded."""
        for load in self._running:
            self._follow(load, self._parts.last.get(layer, -1) + 1)

    def end(self) -> None:
        """See the step's loads to their end: what failed must be told with this step, and nothing
        may be written any more into blocks that are computed anew."""
        while self._running:
            load = self._running[-1]
            for ticket in load.tickets:
                status = self._copies.wait_for_end(ticket, "a load that the step computed on")
                self._end_part(load, ticket, status)
            if load.failed or len(load.tickets) < len(self._parts.planes):
                self.fail(load.order)
            else:
                self._copies.report(load.order, Status.DONE)
            self._running.pop()

    def take_bad_blocks(self) -> set[int]:
        """The engine's blocks that failed loads were to fill, since the last call."""
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks

    def give_up(self) -> None:
        """In place of `end`, which failed, and after the mover has been closed: all fail."""
        for load in self._running:
            self.fail(load.order)
        self._running.clear()

    def fail(self, order: CopyOrder) -> None:
        """A load fails; it may not have begun."""
        self._bad_blocks.update(order.engine_blocks)
        self.failed.add(order.transfer_id)
        self._copies.report(order, Status.FAILED)

    def _start_part(self, load: LayerwiseLoad, planes: range, after: int) -> None:
        with self._edge.guard("load of blocks", "they count as a miss"):
            load.tickets.append(
                self._copies.mover.submit(
                    Direction.LOAD, load.blocks, load.offsets, after, planes=planes
                )
            )
            self._copies.begun_part(load.tickets[-1], planes, len(load.blocks))

    def _follow(self, load: LayerwiseLoad, parts: int) -> None:
        """Let the engine's work from now on follow the first parts of a load."""
        if load.followed >= parts:
            return
        with self._edge.guard("waiting for a layer", "its blocks count as not loaded"):
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
