# SPDX-License-Identifier: Apache-2.0
"""One direction at a time: FlexKV against one large copy, and against other ways to copy pages."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from flexkv.types.mover import Direction
from flexkv_kernels import CudaMode
from integration.bench.rows import Goal, Row
from integration.gpu import contenders, goals
from integration.gpu.lab import Lab
from integration.gpu.results import Log
from integration.gpu.rig import Copy, mover_copies
from integration.gpu.shapes import KIB, LAYOUTS, MIB, SHAPES, Order, Shape
from integration.gpu.smoke import check_row, modes_for
from integration.gpu.timing import interleaved, rates, ratio_of_rates

CONTENDER_RUNS = {contenders.TRITON: 1 << 20, contenders.PAGEWISE: 1 << 17}
"""Runs of an order that each contender copies at most: of those of 256 bytes, at some 1 us each,
all would take minutes."""

CHECKED_BYTES = 32 * MIB
OURS = "FlexKV"


def goal_of(shape: Shape) -> Goal | None:
    """What part of one large copy's speed is aimed at."""
    if shape in LAYOUTS:
        return goals.ONE_WAY_LAYOUTS
    if shape.run_bytes >= 16 * KIB:
        return goals.ONE_WAY_LONG
    return goals.ONE_WAY_SHORT if shape.run_bytes <= 256 else None


def one_way_rows(lab: Lab, log: Log) -> Iterator[Row]:
    """Rows of both directions and all shapes; before them, one for each mover that is wrong."""
    for shape in log.units((*SHAPES, *LAYOUTS), lambda shape: shape.name):
        order = lab.rig.order(shape)
        with ExitStack() as stack:
            ours: dict[str, dict[Direction, Copy]] = {}
            for mode in modes_for(lab, shape):
                mover = stack.enter_context(lab.mover(shape, mode))
                copies = mover_copies(mover, order)
                wrong = check_row(lab.rig, shape, _name(mode), order, copies)
                if wrong is None:
                    ours[_name(mode)] = copies
                else:
                    yield wrong
            for direction in Direction:
                chosen = {name: copies[direction] for name, copies in ours.items()}
                yield from _measure(lab, shape, direction, chosen, log)


def contender_order(name: str, shape: Shape, order: Order) -> Order:
    """As much of an order as the contender copies."""
    return order.part(0, max(1, CONTENDER_RUNS[name] // shape.runs))


def _name(mode: CudaMode) -> str:
    return OURS if mode is CudaMode.AUTO else f"{OURS}, {mode.name} only"


def _measure(
    lab: Lab,
    shape: Shape,
    direction: Direction,
    ours: dict[str, Copy],
    log: Log,
) -> Iterator[Row]:
    order = lab.rig.order(shape)
    large = contenders.finished(lab, contenders.large(lab, direction, 0, order.bytes))
    others = _contenders(lab, shape, direction, log)
    seconds = interleaved({contenders.LARGE: large, **ours, **others}, lab.sizes.repeats)
    parts = {name: contender_order(name, shape, order) for name in others}
    speed = {name: rates(taken, parts.get(name, order).bytes) for name, taken in seconds.items()}
    what = f"{direction.name.lower()}, {shape.name}"
    for name in ours:
        goal = goal_of(shape) if name == OURS else None
        theirs = (contenders.LARGE, speed[contenders.LARGE])
        label = f"{what}: {name} ÷ {contenders.LARGE}"
        yield ratio_of_rates(label, goal, (name, speed[name]), theirs)
    for name in others if OURS in ours else ():
        label = f"{what}: {OURS} ÷ {name}"
        yield ratio_of_rates(label, Goal(">=", 1.0), (OURS, speed[OURS]), (name, speed[name]))


def _contenders(lab: Lab, shape: Shape, direction: Direction, log: Log) -> dict[str, Copy]:
    """Those that work here. Each is checked with a few blocks, so that none is fast but wrong."""
    order = lab.rig.order(shape)
    few = order.first(CHECKED_BYTES)
    makers: dict[str, Callable[[Direction, Order], Copy]] = {
        contenders.TRITON: lambda d, o: _best_triton(lab, shape, d, o),
        contenders.PAGEWISE: lambda d, o: contenders.finished(
            lab, contenders.page_by_page(lab, shape, d, o)
        ),
    }
    working: dict[str, Copy] = {}
    for name, make in makers.items():
        try:
            lab.rig.check(shape, few, {d: make(d, few) for d in Direction})
            working[name] = make(direction, contender_order(name, shape, order))
        except Exception as error:  # noqa: BLE001 - a contender's failure must not hide our figures
            log.note(f"no {name}, {shape.name}: {type(error).__name__}: {error}")
    return working


def _best_triton(lab: Lab, shape: Shape, direction: Direction, order: Order) -> Copy:
    candidates = contenders.by_triton(lab, shape, direction, order)
    copies = {str(i): contenders.finished(lab, enqueue) for i, enqueue in enumerate(candidates)}
    seconds = interleaved(copies, repeats=2)
    return copies[min(copies, key=lambda name: statistics.median(seconds[name]))]
