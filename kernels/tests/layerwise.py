# SPDX-License-Identifier: Apache-2.0
"""The adapters' worker side over a CUDA mover, on an emulated device or a real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.orders import CopyOrder, StepOrders
from flexkv.engine.worker.layers import LayerParts
from flexkv.engine.worker.pages import PlacedPages
from flexkv.engine.worker.rank_copies import BlockSizes, RankCopies
from flexkv.engine.worker.worker import WorkerSide
from flexkv.figures.definitions import Samples, sample
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.types.mover import Mover
from kernels.tests.worlds import Plane


class OnlyArena(NamedTuple):
    """What `WorkerSide` uses of a session while it copies."""

    arena: Arena


def make_arena(planes: Sequence[Plane], slots: int) -> Arena:
    """An arena whose slots hold a block of these planes."""
    return Arena.create(ArenaSpec(BlockFormat(1, (planes[-1].slot_end,)), slots))


def worker_of(
    arena: Arena,
    mover: Mover,
    planes: Sequence[Plane],
    parts: Sequence[range],
    work_so_far: Callable[[], int],
) -> WorkerSide:
    """A worker side that loads blocks in these parts; layer "0" needs the first of them."""
    session: Any = OnlyArena(arena)
    own: Any = planes
    count = range(len(planes))
    copies = RankCopies(
        arena,
        mover,
        0,
        block_step=planes[-1].slot_end,
        sizes=BlockSizes(
            [PlacedPages(layout=own, planes=own, stored=count, first=0, numbers=count)]
        ),
        work_so_far=work_so_far,
        boundary=ErrorBoundary(),
    )
    last = {str(i): i for i in range(len(parts))}
    return WorkerSide(session, copies, LayerParts(tuple(parts), last))


def layerwise(blocks: Sequence[int], slots: Sequence[int], *, follows: int) -> StepOrders:
    """The orders of step 2: one layer-wise load, behind the step that `follows` names."""
    order = CopyOrder(1, 0, list(blocks), list(slots), follows=follows)
    return StepOrders(layerwise=[order], has_forward=True, step=2)


def end_step(side: WorkerSide, orders: StepOrders) -> Samples:
    """End a step without stores. Returns what the worker counted; no load has failed."""
    side.finished(orders)
    assert side.take_bad_blocks() == set()
    return side.figures.take()


def check_figures(counted: Samples, size: int, seconds: float, overlap: int) -> None:
    """`size` bytes were loaded in at most `seconds`. Each part is timed from its own first byte: as
    parts follow one another, their times add up to no more, but for stages that `overlap`."""
    assert counted[sample("copied_bytes", "device", "load")] == size
    assert 0 < counted[sample("copy_seconds", "device", "load")] <= overlap * seconds
