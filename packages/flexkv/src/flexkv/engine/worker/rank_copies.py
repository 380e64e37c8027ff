# SPDX-License-Identifier: Apache-2.0
"""The copies of one rank between its pages and the arena: ordered, measured, reported."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.orders import CopyOrder
from flexkv.engine.side_figures import CopyFigures
from flexkv.engine.worker.block_sizes import BlockSizes
from flexkv.engine.worker.offsets import SlotOffsets
from flexkv.host.arena import Arena
from flexkv.types.mover import Direction, Mover, Status

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 1.0
"""Seconds between two warnings about a copy that does not end. Not tuned."""

_CALIBRATION_BYTES = 8 << 20
"""Bytes copied to measure the link: 0.2 ms at 40 GB/s, much more than the start of a copy takes."""

_CALIBRATIONS = 3
"""Copies that measure the link. The first one touches memory that nothing has touched before. Not
tuned."""


class RankCopies:
    """The copies of one rank's mover. Single-threaded.

    Args:
        arena: attached; owned by the caller.
        mover: of this rank's pages; owned by the caller.
        rank: this rank.
        block_step: bytes from one engine block to the next in a slot.
        sizes: bytes of the blocks.
        boundary: catches errors of single transfers.

    Attributes:
        mover: as given.
        figures: the figures of the copies.
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
        boundary: ErrorBoundary,
    ) -> None:
        self.mover = mover
        self.figures = CopyFigures(boundary, self._copy_seconds, self._bytes_by_way)
        self.tickets: dict[int, int] = {}
        self.suspended = False
        self._arena = arena
        self._rank = rank
        self._boundary = boundary
        self._slot_offsets = SlotOffsets(arena, rank, block_step)
        self._sizes = sizes

    def calibrate(self, engine_blocks: int) -> None:
        """Measure loads before the engine uses its pages. The first hits are then judged by several
        measurements, not by a single load that something slowed down.

        Args:
            engine_blocks: number of the engine's blocks, as far as they are alike.
        """
        spec = self._arena.spec
        step = spec.format.engine_blocks
        slots = range(min(spec.num_slots, engine_blocks // step))
        block_bytes = self._sizes.of(Direction.LOAD, [0])
        count = max(1, _CALIBRATION_BYTES // (block_bytes or 1))
        blocks = array("Q", range(min(count, len(slots) * step)))
        offsets = self._slot_offsets.of(slots, count=len(blocks))
        with self._boundary.guard("measuring copies", "the first loads measure them"):
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
        with self._boundary.guard(place, "they count as a miss"):
            self.tickets[order.transfer_id] = self.mover.submit(
                direction,
                array("Q", order.engine_blocks),
                self.offsets(order),
                after,
                self._arena.board.flag_address(order.cell, self._rank),
                mark=mark,
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
        return self._slot_offsets.of(order.slots, order.skip, len(order.engine_blocks))

    def report(self, order: CopyOrder, status: Status) -> None:
        """Report a copy that the mover does not report itself."""
        self._arena.board.report(order.cell, self._rank, status)

    def wait_for_end(self, ticket: int, what: str) -> Status:
        """Wait for a copy and return its final status."""
        while (status := self.mover.wait(ticket, _PATIENCE_SECONDS)) is Status.PENDING:
            logger.warning("still waiting for %s", what)
        return status

    def stop(self) -> None:
        """End all copies for good. Once a copy has failed, the scheduler side offers no more
        loads."""
        self._arena.board.stop(self._rank)
        self.mover.close()

    def _bytes_by_way(self) -> Mapping[str, int]:
        return self.mover.bytes_by_way()

    def _copy_seconds(self, ticket: int) -> float | None:
        return self.mover.copy_seconds(ticket)
