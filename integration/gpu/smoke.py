# SPDX-License-Identifier: Apache-2.0
"""Whether every way of copying gives back every byte, before anything is measured for long."""

from __future__ import annotations

from collections.abc import Iterator

from flexkv.types.mover import Direction
from flexkv_kernels import CudaMode
from integration.bench.rows import Row
from integration.gpu import goals
from integration.gpu.lab import Lab
from integration.gpu.results import Log
from integration.gpu.rig import Copy, Rig, WrongBytesError, mover_copies
from integration.gpu.shapes import KIB, LAYOUTS, MIB, SHAPES, Order, Shape

CHECKED_BYTES = 64 * MIB
"""Of each way: more than one launch of every kernel."""


def smoke_rows(lab: Lab, log: Log) -> Iterator[Row]:
    """A row for each shape: bytes that any way of copying has brought to a wrong place, or not."""
    for shape in log.units((*SHAPES, *LAYOUTS), lambda shape: shape.name):
        order = lab.rig.order(shape).first(CHECKED_BYTES)
        calibration = lab.calibration(shape)
        wrong, modes = [], modes_for(lab, shape)
        for mode in modes:
            with lab.mover(shape, mode) as mover:
                found = check_row(lab.rig, shape, mode.name, order, mover_copies(mover, order))
            wrong += [] if found is None else [found]
        yield from wrong
        count = sum(row.value for row in wrong)
        names = ", ".join(mode.name for mode in modes)
        what = f"{shape.name}: wrong bytes of all ways"
        yield Row(what, count, "bytes", goals.NO_WRONG_BYTES, f"{names}; {len(order)} blocks")
        chosen = ", ".join(
            f"{choice.direction.name.lower()} {choice.mode.name} on {choice.thread_blocks}"
            for choice in calibration.choices
        )
        ring = calibration.ring_bytes >> 20
        chosen = chosen or f"{calibration.mode.name} without choices"
        log.note(f"{shape.name}: calibrated to {chosen}; ring of {ring} MiB")


def check_row(
    rig: Rig, shape: Shape, name: str, order: Order, copies: dict[Direction, Copy]
) -> Row | None:
    """A row that misses its goal if copies of an order are wrong; None if every byte is right."""
    try:
        rig.check(shape, order, copies)
    except WrongBytesError as error:
        what = f"{shape.name}, {name}: wrong bytes"
        return Row(what, error.count, "bytes", goals.NO_WRONG_BYTES, str(error))
    return None


def modes_for(lab: Lab, shape: Shape) -> list[CudaMode]:
    """AUTO, what users have, and each way by itself; short runs by DMA would take seconds."""
    modes = [CudaMode.AUTO, CudaMode.STAGED, CudaMode.KERNEL]
    if lab.has_bulk_copies:
        modes.append(CudaMode.TMA)
    if shape.run_bytes >= 4 * KIB:
        modes.append(CudaMode.DMA)
    return modes
