# SPDX-License-Identifier: Apache-2.0
"""What a transfer costs the engine's thread: the time that one call of submit takes."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator

from flexkv.types.mover import Direction
from integration.bench.rows import Row
from integration.gpu import contenders, goals
from integration.gpu.lab import Lab
from integration.gpu.results import Log
from integration.gpu.rig import AnyMover, finish
from integration.gpu.shapes import KIB, Order, Shape
from integration.gpu.timing import median_row

PAGES = 4096
SHAPES = (Shape(64 * KIB), Shape(16 * KIB), Shape(256, tokens=16, heads=8))


def submit_rows(lab: Lab, log: Log) -> Iterator[Row]:
    """Rows of both directions; the same pages, page by page, for comparison."""
    for shape in log.units(SHAPES, lambda shape: shape.name):
        pages = shape.layers * shape.heads
        order = lab.rig.order(shape).part(0, max(1, PAGES // pages))
        with lab.mover(shape) as mover:
            for direction in Direction:
                what = f"submit of {PAGES:,} pages, {direction.name.lower()}, {shape.name}"
                calls, works = times(mover, direction, order, lab.sizes.submits)
                detail = f"{len(order)} blocks of {pages} pages"
                yield median_row(what, goals.SUBMIT, calls, "us", detail)
                what = (
                    f"processor time of all threads for it, {direction.name.lower()}, {shape.name}"
                )
                yield median_row(what, None, works, "us", detail)
    for _ in log.units([contenders.PAGEWISE], str):
        yield _page_by_page(lab)


def times(
    mover: AnyMover, direction: Direction, order: Order, repeats: int
) -> tuple[list[float], list[float]]:
    """Microseconds of the call by the clock, and of all threads' processor time until the end."""
    calls, works = [], []
    blocks, offsets = array("Q", order.blocks), array("Q", order.offsets)
    for repeat in range(repeats + 1):
        worked, start = time.process_time(), time.perf_counter()
        ticket = mover.submit(direction, blocks, offsets)
        taken = time.perf_counter() - start
        finish(mover, [ticket])
        if repeat > 0:  # the first one warms up
            calls.append(taken * 1e6)
            works.append((time.process_time() - worked) * 1e6)
    return calls, works


def _page_by_page(lab: Lab) -> Row:
    shape = SHAPES[0]
    order = lab.rig.order(shape).first(PAGES * shape.run_bytes)
    enqueue = contenders.page_by_page(lab, shape, Direction.LOAD, order)
    stream = lab.gpu.stream()
    calls = []
    for _ in range(lab.sizes.submits):
        start = time.perf_counter()
        enqueue(stream)
        calls.append((time.perf_counter() - start) * 1e6)
        stream.synchronize()
    what = f"the same by one cuMemcpyAsync for each page, {shape.name}"
    return median_row(what, None, calls, "us", "for comparison")
