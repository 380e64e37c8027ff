# SPDX-License-Identifier: Apache-2.0
"""Measures how fast one way copies pages of the shape of an engine's."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from flexkv.types.mover import Direction, Status
from flexkv_kernels.cuda_mover import CudaMover
from flexkv_kernels.cuda_options import CudaMode, CudaOptions
from flexkv_kernels.cuda_scratch import Scratch
from flexkv_kernels.native_mover import PlaneTuple

REPEATS = 3
"""Copies after the first one, which warms up. The fastest of all counts. Not tuned."""

SHORTEST_DMA = 2048
"""The shortest runs, in bytes, for which DMA is measured. At about 0.5 us a run, shorter runs go at
less than 4 GB/s."""

_SECONDS = 10.0
"""Time limit for one copy, which takes milliseconds. Not tuned."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to copy, and the thread blocks of its kernel; 0 if the way has no kernel."""

    mode: CudaMode
    thread_blocks: int


@dataclass(frozen=True, slots=True)
class TransferClass:
    """Transfers of the planes ``first`` to before ``last`` in one direction."""

    direction: Direction
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The speed of one way for one class of transfers.

    Attributes:
        direction: direction of the transfers.
        run_bytes: see `run_lengths`.
        slot_run_bytes: see `run_lengths`.
        mode: the way.
        thread_blocks: thread blocks of its kernel; 0 without a kernel.
        speed: bytes per second, the best of a few copies, by the device's clock.
    """

    direction: Direction
    run_bytes: int
    slot_run_bytes: int
    mode: CudaMode
    thread_blocks: int
    speed: float


@dataclass(frozen=True, slots=True)
class Bench:
    """Measures copies in scratch memory.

    Attributes:
        scratch: the memory; borrowed.
        planes: planes of the engine. Their strides count, their addresses are not used.
        transfer_bytes: about the number of bytes that are copied at a time.
    """

    scratch: Scratch
    planes: Sequence[PlaneTuple]
    transfer_bytes: int

    def measure(
        self, part: TransferClass, candidate: Candidate, ring_bytes: int = 0
    ) -> Sample | None:
        """Measure one way for one class of transfers.

        Args:
            part: the class.
            candidate: the way.
            ring_bytes: bytes of the ring, for ``CudaMode.STAGED``; 0 for the default.

        Returns:
            None if transfers of this class do not go this way, or no block fits the memory.

        Raises:
            RuntimeError: a copy fails or does not end.
            ValueError: there can be no such mover.
        """
        copied = self.planes[part.first : part.last]
        run_bytes, slot_run_bytes = run_lengths(copied)
        blocks = self._blocks()
        if blocks == 0 or (candidate.mode is CudaMode.DMA and run_bytes < SHORTEST_DMA):
            return None
        options = CudaOptions(
            candidate.mode,
            thread_blocks=candidate.thread_blocks,
            ring_bytes=ring_bytes,
            driver=self.scratch.driver,
        )
        with closing(self._mover(blocks, options)) as mover:
            seconds = min(self._copy(mover, part, blocks) for _ in range(REPEATS + 1))
            if mover.bytes_by_mode()[CudaMode.AUTO]:
                return None
        size = blocks * sum(rows * row_bytes for _, _, rows, _, row_bytes, _ in copied)
        way = (candidate.mode, candidate.thread_blocks)
        return Sample(part.direction, run_bytes, slot_run_bytes, *way, size / seconds)

    @property
    def _span(self) -> int:
        return max(place + rows * size for _, _, rows, _, size, place in self.planes)

    def _blocks(self) -> int:
        _, block_bytes = placed_at(self.scratch.pages, self.planes, 1)
        fit = min(
            2 * self.scratch.arena_bytes // block_bytes, self.scratch.arena_bytes // self._span
        )
        return min(fit, max(1, self.transfer_bytes // self._span))

    def _mover(self, blocks: int, options: CudaOptions) -> CudaMover:
        placed, _ = placed_at(self.scratch.pages, self.planes, blocks)
        scratch = self.scratch
        return CudaMover(
            placed, blocks, scratch.arena, scratch.arena_bytes, scratch.device, options
        )

    def _copy(self, mover: CudaMover, part: TransferClass, blocks: int) -> float:
        """Seconds of one transfer of all blocks, in an order that makes no neighbours one run."""
        rng = random.Random(0)
        numbers = array("Q", rng.sample(range(blocks), blocks))
        offsets = array("Q", (slot * self._span for slot in rng.sample(range(blocks), blocks)))
        planes = range(part.first, part.last)
        ticket = mover.submit(part.direction, numbers, offsets, planes=planes)
        status = mover.wait(ticket, _SECONDS)
        seconds = mover.copy_seconds(ticket)
        if status is not Status.DONE or seconds is None:
            raise RuntimeError(mover.error() or f"a copy is {status.name} after {_SECONDS:.0f} s")
        return seconds


def run_lengths(planes: Sequence[PlaneTuple]) -> tuple[int, int]:
    """Mean bytes of a block's runs: first of those that are contiguous both among the pages and in
    the arena, then of those that are contiguous in the arena. ``planes`` must not be empty."""
    runs = slot_runs = total = 0
    page_end = slot_end = -1
    for base, _, rows, row_stride, row_bytes, place in planes:
        pieces = 1 if row_stride == row_bytes else rows
        runs += pieces - (base == page_end and place == slot_end)
        page_end = base + (rows - 1) * row_stride + row_bytes
        slot_end = place + rows * row_bytes
        total += rows * row_bytes
    slot_end = -1
    for _, _, rows, _, row_bytes, place in sorted(planes, key=lambda plane: plane[5]):
        slot_runs += place != slot_end
        slot_end = place + rows * row_bytes
    return total // runs, total // slot_runs


def placed_at(
    address: int, planes: Sequence[PlaneTuple], blocks: int
) -> tuple[list[PlaneTuple], int]:
    """Move planes to other memory. Planes whose rows lie between those of another keep their place
    relative to it.

    Args:
        address: address of the memory.
        planes: the planes.
        blocks: engine blocks in each plane.

    Returns:
        The planes with their new addresses, in the same order, and the bytes that they all take.
    """
    moved: dict[int, int] = {}
    taken = end = shift = 0
    for base, block_stride, *_ in sorted(planes):
        if base >= end:
            end, shift = base + block_stride, address + taken - base
            taken += blocks * block_stride
        moved[base] = base + shift
    return [(moved[plane[0]], *plane[1:]) for plane in planes], taken
