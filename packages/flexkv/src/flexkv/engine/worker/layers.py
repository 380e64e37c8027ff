# SPDX-License-Identifier: Apache-2.0
"""Loads that the forward pass of the same step waits for, layer by layer. The parts of a block are
loaded one after another, while layers with loaded parts compute."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from flexkv.engine.orders import CopyOrder
from flexkv.engine.worker.pages import PlacedPages
from flexkv.engine.worker.rank_copies import RankCopies
from flexkv.layout import PlacedPlane
from flexkv.types.mover import LAYER_PARTS, Direction, Status


class LayerParts(NamedTuple):
    """Consecutive planes of a mover, part by part, in the order in which layers need them; and the
    number of the last part that each layer needs."""

    planes: tuple[range, ...]
    last: Mapping[str, int]


def layers_of(placed: Sequence[PlacedPages]) -> LayerParts:
    """The parts of all pages, in about the order in which layers need them."""
    most = max(1, LAYER_PARTS // 2 // max(1, len(placed) - 1))
    splits = [
        split_layers(pages.planes, pages.layout.starts, most if number else LAYER_PARTS)
        for number, pages in enumerate(placed)
    ]
    order = sorted(
        (pages.begin + pages.share * part / len(split.planes), number, part)
        for number, (pages, split) in enumerate(zip(placed, splits, strict=True))
        for part in range(len(split.planes))
    )
    planes: list[range] = []
    last: dict[str, int] = {}
    for place, (_, number, part) in enumerate(order):
        split = splits[number]
        planes.append(placed[number].numbers[split.planes[part].start : split.planes[part].stop])
        last |= {layer: place for layer, needed in split.last.items() if needed == part}
    return LayerParts(tuple(planes), last)


def split_layers(
    planes: Sequence[PlacedPlane], starts: Mapping[str, Set[int]], parts: int = LAYER_PARTS
) -> LayerParts:
    """Cut a block into at most `parts`, where the pages of a layer end. The planes are in the order
    of the layers; `starts` is that of a `KVLayout`."""
    ends = {layer: _end(planes, bases) for layer, bases in starts.items()}
    cuts = sorted(set(ends.values()))
    count = min(parts, len(cuts))
    chosen = [cuts[(i + 1) * len(cuts) // count - 1] for i in range(count)]
    begins = [0, *chosen[:-1]]
    ranges = tuple(range(begin, end) for begin, end in zip(begins, chosen, strict=True))
    last = {
        layer: next(i for i, part in enumerate(ranges) if end <= part.stop)
        for layer, end in ends.items()
    }
    return LayerParts(ranges, last)


def _end(planes: Sequence[PlacedPlane], bases: Iterable[int]) -> int:
    """The number of planes up to the last one with bytes of the layer.

    A plane may have pages of several layers, and a page may be cut: following planes that begin no
    page belong to it. The end is therefore found by address.
    """
    wanted = set(bases)
    last = max(i for i, plane in enumerate(planes) if any(_has(plane, base) for base in wanted))
    while last + 1 < len(planes) and _continues(planes[last], planes[last + 1]):
        last += 1
    return last + 1


def _has(plane: PlacedPlane, address: int) -> bool:
    return plane.base <= address < plane.base + plane.row_bytes


def _continues(plane: PlacedPlane, other: PlacedPlane) -> bool:
    """Whether `other` is the rest of the page that `plane` begins."""
    return other.base == plane.base + plane.rows * plane.row_stride and (
        other.slot_offset == plane.slot_offset + plane.page_bytes
    )


@dataclass(slots=True)
class LayerwiseLoad:
    """A load that the running forward pass waits for, part by part: of each part a ticket, if it
    could begin, and whether it has ended. The forward pass already waits for the first `followed`
    parts. The load has failed if a part has, or if the forward pass could not be made to wait."""

    order: CopyOrder
    blocks: array[int]
    offsets: array[int]
    tickets: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    followed: int = 0
    failed: bool = False


class LayerwiseLoads:
    """The layer-wise loads of one rank in a step: those that have not ended, and the transfer ids
    of those that have failed. `take_bad_blocks` will return the `bad_blocks`."""

    def __init__(self, copies: RankCopies, parts: LayerParts) -> None:
        self.failed: set[int] = set()
        self.bad_blocks: set[int] = set()
        self._copies = copies
        self._parts = parts
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
        with self._copies.boundary.guard("load of blocks", "they count as a miss"):
            load.tickets.append(
                self._copies.mover.submit(
                    Direction.LOAD,
                    load.blocks,
                    load.offsets,
                    after,
                    planes=planes,
                    mark=self._copies.mark_behind(load.order.follows),
                )
            )
            self._copies.begun(load.tickets[-1], Direction.LOAD, load.blocks, planes)

    def _follow(self, load: LayerwiseLoad, parts: int) -> None:
        """Make later work of the engine wait for the first parts of a load."""
        if load.followed >= parts:
            return
        with self._copies.boundary.guard("waiting for a layer", "its blocks count as not loaded"):
            stream = self._copies.work_so_far()
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
