# SPDX-License-Identifier: Apache-2.0
"""Every way of copying by itself: path, thread blocks, run length and direction, in GB/s.

It comes first in a run, so that even a visit that ends early shows where the device's limits are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from flexkv.types.mover import Direction
from flexkv_kernels import CudaMode, CudaOptions
from integration.bench.rows import Row
from integration.gpu import contenders
from integration.gpu.lab import Lab
from integration.gpu.results import Log
from integration.gpu.rig import mover_copies
from integration.gpu.shapes import BLOCK_BYTES, KIB, LAYOUTS, MIB, SHAPES, Shape
from integration.gpu.timing import interleaved, median_row, rates

BLOCKS = {
    CudaMode.DMA: (0,),
    CudaMode.STAGED: (4, 8, 16, 32),
    CudaMode.KERNEL: (2, 4, 8, 16),
    CudaMode.TMA: (2, 4, 8, 16),
}
"""Thread blocks of each way's kernel: around those that the calibration chooses from. Those of the
staged way are of one warp."""

LAYOUT_BLOCKS = {CudaMode.STAGED: (8, 16, 32), CudaMode.KERNEL: (8,), CudaMode.TMA: (4,)}
"""The same for layouts of models, in which little but the ring's use differs from the shapes."""

RINGS = (8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
"""Of a direction; each is tried for one shape."""

SHORTEST_DMA = 4 * KIB
"""Shorter runs would take seconds."""


@dataclass(frozen=True, slots=True)
class Point:
    """One combination that is measured."""

    shape: Shape
    mode: CudaMode
    thread_blocks: int
    ring_bytes: int = 0

    @property
    def name(self) -> str:
        how = "" if self.mode is CudaMode.DMA else f" on {self.thread_blocks}"
        ring = f", ring of {self.ring_bytes // MIB} MiB" if self.ring_bytes else ""
        return f"{self.shape.name}, {self.mode.name}{how}{ring}"


def sweep_rows(lab: Lab, log: Log) -> Iterator[Row]:
    """A row for each point and direction, and the same for one large copy."""
    swept = lab.sizes.swept_blocks * BLOCK_BYTES
    repeats = lab.sizes.swept_repeats
    for direction in log.units(Direction, lambda direction: f"large, {direction.name.lower()}"):
        enqueue = contenders.large(lab, direction, 0, swept)
        copies = {"": contenders.finished(lab, enqueue)}
        speed = rates(interleaved(copies, max(repeats, 3))[""], swept)
        what = f"sweep, {direction.name.lower()}, {contenders.LARGE}"
        yield median_row(what, None, speed, "GB/s", "the link itself")
    for point in log.units(points(lab), lambda point: point.name):
        options = CudaOptions(
            point.mode,
            thread_blocks=point.thread_blocks,
            ring_bytes=point.ring_bytes,
            driver=lab.gpu.driver,
        )
        order = lab.rig.order(point.shape).first(swept)
        with closing(lab.mover_by(point.shape, options)) as mover:
            for direction, copy in mover_copies(mover, order).items():
                speed = rates(interleaved({"": copy}, repeats)[""], order.bytes)
                what = f"sweep, {direction.name.lower()}, {point.name}"
                yield median_row(what, None, speed, "GB/s", "")


def points(lab: Lab) -> list[Point]:
    """All combinations that make sense on this device, the shortest runs first."""
    found = [
        Point(shape, mode, thread_blocks)
        for shapes, ways in ((SHAPES, BLOCKS), (LAYOUTS, LAYOUT_BLOCKS))
        for shape in shapes
        for mode, numbers in ways.items()
        for thread_blocks in numbers
        if (mode is not CudaMode.DMA or shape.run_bytes >= SHORTEST_DMA)
        and (mode is not CudaMode.TMA or lab.has_bulk_copies)
    ]
    return found + [Point(SHAPES[0], CudaMode.STAGED, 16, ring) for ring in RINGS]
