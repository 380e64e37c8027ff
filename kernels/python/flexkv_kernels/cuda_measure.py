# SPDX-License-Identifier: Apache-2.0
"""Measures how fast one way copies pages of the shape of an engine's."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.types.mover import Direction, Status
from flexkv_kernels.cuda_options import CudaMode
from flexkv_kernels.cuda_scratch import Scratch
from flexkv_kernels.native_mover import PlaneTuple

REPEATS = 3
"""Copies after the first one, which warms up. The fastest of all counts. Not tuned."""

SIZES_APART = 3
"""The larger of the two transfers that are measured has as many times the blocks of the smaller."""

MOST_FILL = 0.1
"""The most of a transfer's time that its start and its end may take. Filling a ring takes 2 % of
192 MiB; what is measured beyond that is noise."""

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
        ring_bytes: bytes of the ring of a direction; 0 for ways without one.
        speed: bytes per second, by the device's clock; see `speed_of`.
    """

    direction: Direction
    run_bytes: int
    slot_run_bytes: int
    mode: CudaMode
    thread_blocks: int
    ring_bytes: int
    speed: float


class Bench:
    """Measures copies in scratch memory, all by one mover. Close it before the memory is freed.
    Raises ValueError if there can be no mover on this device, or no block fits the memory.

    Args:
        scratch: the memory; borrowed.
        planes: planes of the engine. Their strides count, their addresses are not used.
        ring_bytes: bytes of the ring of a direction; 0 for no ring. The attribute has fewer if the
            device lacks memory.
    """

    def __init__(self, scratch: Scratch, planes: Sequence[PlaneTuple], ring_bytes: int) -> None:
        self._planes = planes
        self._blocks = blocks_in(planes, scratch.arena_bytes)
        if self._blocks == 0:
            raise ValueError(f"a block does not fit scratch memory of {scratch.arena_bytes} bytes")
        placed, _ = placed_at(scratch.pages, planes, self._blocks)
        self._mover = scratch.open_mover(placed, self._blocks, ring_bytes)
        self.ring_bytes = self._mover.ring_bytes
        rng = random.Random(0)
        span = span_of(planes)
        # In an order that makes no neighbours one run.
        self._numbers = array("Q", rng.sample(range(self._blocks), self._blocks))
        self._offsets = array(
            "Q", (slot * span for slot in rng.sample(range(self._blocks), self._blocks))
        )

    def close(self) -> None:
        """End the mover. Idempotent."""
        self._mover.close()

    def measure(
        self, part: TransferClass, candidate: Candidate, ring_bytes: int = 0
    ) -> Sample | None:
        """Measure one way for one class of transfers. Returns None if transfers of this class do
        not go this way. Raises RuntimeError if a copy fails or does not end.

        Args:
            part: the class.
            candidate: the way.
            ring_bytes: bytes of the ring, for ``CudaMode.STAGED`` alone; at most those of this
                bench's ring.
        """
        copied = self._planes[part.first : part.last]
        run_bytes, slot_run_bytes = run_lengths(copied)
        if candidate.mode is CudaMode.DMA and run_bytes < SHORTEST_DMA:
            return None
        if candidate.mode is CudaMode.STAGED and not 0 < ring_bytes <= self.ring_bytes:
            return None
        self._mover.force(candidate.mode, candidate.thread_blocks, ring_bytes)
        fallback = self._mover.bytes_by_mode()[CudaMode.AUTO]
        size = sum(rows * row_bytes for _, _, rows, _, row_bytes, _ in copied)
        counts = sorted({self._blocks // SIZES_APART or self._blocks, self._blocks})
        times = [
            (count * size, min(self._copy(part, count) for _ in range(REPEATS + 1)))
            for count in counts
        ]
        if self._mover.bytes_by_mode()[CudaMode.AUTO] != fallback:
            return None
        way = (candidate.mode, candidate.thread_blocks, ring_bytes)
        return Sample(part.direction, run_bytes, slot_run_bytes, *way, speed_of(times))

    def _copy(self, part: TransferClass, count: int) -> float:
        """Seconds of one transfer of so many blocks."""
        planes = range(part.first, part.last)
        numbers, offsets = self._numbers[:count], self._offsets[:count]
        ticket = self._mover.submit(part.direction, numbers, offsets, planes=planes)
        status = self._mover.wait(ticket, _SECONDS)
        seconds = self._mover.copy_seconds(ticket)
        if status is not Status.DONE or seconds is None:
            reason = f"a copy is {status.name} after {_SECONDS:.0f} s"
            raise RuntimeError(self._mover.error() or reason)
        return seconds


def speed_of(times: Sequence[tuple[int, float]]) -> float:
    """The speed at which a long transfer goes on, in bytes per second. `times`: bytes and seconds
    of the fastest transfer of one size, or of two sizes, the smaller one first. From two, the time
    in which a transfer starts and ends is left out, as far as that is less than a tenth."""
    size, seconds = times[-1]
    speed = size / seconds
    small, least = times[0]
    if size <= small or seconds <= least:
        return speed
    return min((size - small) / (seconds - least), speed / (1 - MOST_FILL))


def span_of(planes: Sequence[PlaneTuple]) -> int:
    """Bytes of the arena from the start of a block to its end."""
    return max(place + rows * size for _, _, rows, _, size, place in planes)


def blocks_in(planes: Sequence[PlaneTuple], arena_bytes: int) -> int:
    """How many blocks are measured in an arena of so many bytes: as many as fit, and whose pages
    take at most twice the memory."""
    _, block_bytes = placed_at(0, planes, 1)
    return min(arena_bytes // span_of(planes), 2 * arena_bytes // block_bytes)


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
    relative to it. Returns the planes with their new addresses, in the same order, and the bytes
    that they all take.

    Args:
        address: address of the memory.
        planes: the planes.
        blocks: engine blocks in each plane.
    """
    moved: dict[int, int] = {}
    taken = end = shift = 0
    for base, block_stride, *_ in sorted(planes):
        if base >= end:
            end, shift = base + block_stride, address + taken - base
            taken += blocks * block_stride
        moved[base] = base + shift
    return [(moved[plane[0]], *plane[1:]) for plane in planes], taken
