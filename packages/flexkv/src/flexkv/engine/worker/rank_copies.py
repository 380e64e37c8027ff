# SPDX-License-Identifier: Apache-2.0
"""The copies of one rank between its pages and the arena: ordered, measured, reported."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.orders import CopyOrder
from flexkv.engine.side_figures import CopyFigures
from flexkv.engine.worker.pages import PlacedPages
from flexkv.engine.worker.pool_mover import common
from flexkv.host.arena import Arena
from flexkv.types.mover import MARKS, BlockMover, Direction, Mover, Status

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 1.0
"""Seconds between two warnings about a copy that does not end."""

_CALIBRATION_BYTES = 8 << 20
"""Bytes copied to measure the link: 0.2 ms at 40 GB/s, much more than the start of a copy takes."""

_CALIBRATIONS = 3
"""Copies that measure the link. The first one touches memory that nothing has touched before."""


class RankSlots:
    """One rank's part of the slots of an attached arena, and its words of the completion board.

    `block_step` is the number of bytes from one engine block to the next in a slot.
    """

    def __init__(self, arena: Arena, rank: int, block_step: int = 0) -> None:
        self._board = arena.board
        self._rank = rank
        self._slot_bytes = arena.spec.format.slot_bytes
        steps = np.arange(arena.spec.format.engine_blocks, dtype=np.uint64)
        self._blocks = steps * np.uint64(block_step) + np.uint64(arena.shard_offset(0, rank))

    def offsets(self, slots: Sequence[int], skip: int = 0, count: int | None = None) -> array[int]:
        """Bytes from the arena's address to each engine block of `slots`, in order: `count` blocks,
        or all, from the one of number `skip` on."""
        # By an array: NumPy takes ten times as long for a list of Python's integers.
        starts = np.frombuffer(array("Q", slots), dtype=np.uint64) * np.uint64(self._slot_bytes)
        places = (starts[:, None] + self._blocks).reshape(-1)[skip:]
        return array("Q", places[:count].tobytes())

    def submit(  # noqa: PLR0917 - the arguments of `BlockMover.submit`
        self,
        mover: BlockMover,
        direction: Direction,
        cell: int,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: int = 0,
        mark: int = 0,
    ) -> int:
        """Begin a copy whose end the mover reports in a cell of the board. Returns its ticket."""
        return mover.submit(
            direction,
            array("Q", blocks),
            offsets,
            after,
            self._board.flag_address(cell, self._rank),
            mark=mark,
        )

    def report(self, cell: int, status: Status) -> None:
        """Report a copy that the mover does not report itself."""
        self._board.report(cell, self._rank, status)

    def stop(self) -> None:
        """Report that this rank has ended its copies for good."""
        self._board.stop(self._rank)


class BlockSizes:
    """Bytes that a rank copies. The engine's blocks may be of several layouts, whose pages are as
    `RankPages.place` returns them."""

    def __init__(self, placed: Sequence[PlacedPages]) -> None:
        self._placed = placed
        self._bytes: dict[Direction, list[int]] = {Direction.LOAD: [], Direction.STORE: []}
        for pages in placed:
            sizes = [plane.page_bytes for plane in pages.planes]
            stored = [size if i in pages.stored else 0 for i, size in enumerate(sizes)]
            self._bytes[Direction.LOAD] += sizes
            self._bytes[Direction.STORE] += stored
        self._firsts = np.array([pages.first for pages in placed], dtype=np.uint64)
        everything = range(len(self._bytes[Direction.LOAD]))
        self._whole = {each: self._of_planes(each, everything) for each in Direction}

    def of(self, direction: Direction, blocks: Sequence[int], planes: range | None = None) -> int:
        """Bytes of engine blocks; `planes`: of these planes only."""
        sizes = self._whole[direction] if planes is None else self._of_planes(direction, planes)
        if len(sizes) == 1:
            return len(blocks) * sizes[0]
        numbers = np.frombuffer(array("Q", blocks), dtype=np.uint64)
        layout_of = np.searchsorted(self._firsts, numbers, side="right") - 1
        counts = np.bincount(layout_of, minlength=len(sizes)).tolist()
        return sum(count * size for count, size in zip(counts, sizes, strict=True))

    def _of_planes(self, direction: Direction, planes: range) -> list[int]:
        """Bytes of a block of each layout in these planes."""
        sizes = self._bytes[direction]
        both = (common(pages.numbers, planes) for pages in self._placed)
        return [sum(sizes[each.start : each.stop]) for each in both]


class RankCopies:
    """The copies of one rank's mover, and marks behind the last steps, so that a load need not wait
    for later ones. Single-threaded.

    Args:
        mover: of this rank's pages; owned by the caller.
        block_step: see `RankSlots`.
        work_so_far: see `Device`.
        boundary: catches errors of single transfers.

    Attributes:
        tickets: of the copies of this step, by transfer. A copy is entered here as it begins, so
            that no error can lose it; the caller clears this for each step.
        suspended: whether the engine's pages have no memory, so that no copy may begin.
    """

    def __init__(
        self,
        arena: Arena,
        mover: Mover,
        rank: int,
        *,
        block_step: int,
        sizes: BlockSizes,
        work_so_far: Callable[[], int],
        boundary: ErrorBoundary,
    ) -> None:
        self.mover = mover
        self.work_so_far = work_so_far
        self.boundary = boundary
        self.figures = CopyFigures(boundary, self._copy_seconds, self._bytes_by_way)
        self.tickets: dict[int, int] = {}
        self.suspended = False
        self._spec = arena.spec
        self._marks: deque[tuple[int, int]] = deque(maxlen=MARKS)
        self._slots = RankSlots(arena, rank, block_step)
        self._sizes = sizes

    def calibrate(self, engine_blocks: int) -> None:
        """Measure loads before the engine uses its pages. The first hits are then judged by several
        measurements, not by a single load that something slowed down. `engine_blocks` is the number
        of the engine's blocks, as far as they are alike."""
        step = self._spec.format.engine_blocks
        slots = range(min(self._spec.num_slots, engine_blocks // step))
        block_bytes = self._sizes.of(Direction.LOAD, [0])
        count = max(1, _CALIBRATION_BYTES // (block_bytes or 1))
        blocks = array("Q", range(min(count, len(slots) * step)))
        offsets = self._slots.offsets(slots, count=len(blocks))
        with self.boundary.guard("measuring copies", "the first loads measure them"):
            for _ in range(_CALIBRATIONS):
                ticket = self.mover.submit(Direction.LOAD, blocks, offsets)
                status = self.wait_for_end(ticket, "a load that is measured")
                seconds = self.mover.copy_seconds(ticket)
                if status is Status.DONE and seconds is not None:
                    self.figures.measured(len(blocks) * block_bytes, seconds)
            self.figures.begin_counting()

    def submit(
        self, direction: Direction, order: CopyOrder, after: int, mark: int = 0
    ) -> int | None:
        """Begin a copy that the mover reports itself, behind `after` or `mark`, see `Mover.submit`.
        Returns its ticket, or None if it could not be begun; then it is reported as failed."""
        if self.suspended:
            self.report(order, Status.FAILED)
            return None
        place = f"{direction.name.lower()} of blocks"
        with self.boundary.guard(place, "they count as a miss"):
            offsets = self.offsets(order)
            self.tickets[order.transfer_id] = self._slots.submit(
                self.mover, direction, order.cell, order.engine_blocks, offsets, after, mark
            )
        ticket = self.tickets.get(order.transfer_id)
        if ticket is None:
            self.report(order, Status.FAILED)
        return ticket

    def begun(
        self,
        ticket: int,
        direction: Direction,
        blocks: Sequence[int],
        planes: range | None = None,
    ) -> None:
        """Count a submitted copy of engine blocks, or of some planes of them."""
        self.figures.begin(ticket, direction, self._sizes.of(direction, blocks, planes))

    def offsets(self, order: CopyOrder) -> array[int]:
        """The place of each engine block of `order` in the arena, in bytes from its address."""
        return self._slots.offsets(order.slots, order.skip, len(order.engine_blocks))

    def report(self, order: CopyOrder, status: Status) -> None:
        """Report a copy that the mover does not report itself."""
        self._slots.report(order.cell, status)

    def step_ended(self, step: int) -> None:
        """Mark the end of a step, once the engine has queued all of its work on the device. On
        CPUs, the engine has computed the step by then, and no mark is needed."""
        with self.boundary.guard("marking a step", "loads wait for all work of the engine"):
            stream = self.work_so_far()
            if stream:
                self._marks.append((step, self.mover.mark(stream)))

    def mark_behind(self, step: int) -> int:
        """The first mark behind a step, for `Mover.submit`; 0 if there is none."""
        return next((mark for marked, mark in self._marks if marked >= step), 0)

    def wait_for_end(self, ticket: int, what: str) -> Status:
        """Wait for a copy and return its final status."""
        while (status := self.mover.wait(ticket, _PATIENCE_SECONDS)) is Status.PENDING:
            logger.warning("still waiting for %s", what)
        return status

    def stop(self) -> None:
        """End all copies for good. Once a copy has failed, the scheduler side offers no more
        loads."""
        self._slots.stop()
        self.mover.close()

    def _bytes_by_way(self) -> Mapping[str, int]:
        return self.mover.bytes_by_way()

    def _copy_seconds(self, ticket: int) -> float | None:
        return self.mover.copy_seconds(ticket)
