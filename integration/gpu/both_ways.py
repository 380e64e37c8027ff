# SPDX-License-Identifier: Apache-2.0
"""Loads and stores at once, half of the blocks each: GB/s of both together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flexkv.mover import Direction
from integration.bench.rows import Goal, Row
from integration.gpu import contenders
from integration.gpu.contenders import Enqueue
from integration.gpu.lab import Lab
from integration.gpu.results import Log
from integration.gpu.rig import AnyMover, Copy, finish
from integration.gpu.shapes import KIB, SHAPES, Order
from integration.gpu.timing import interleaved, median_row, rates

GOAL = Goal(">=", 83.0)
"""GB/s, for pages of at least 16 KiB."""


def both_ways_rows(lab: Lab, log: Log) -> Iterator[Row]:
    """A row for each shape, and one of two large copies."""
    rig, order = lab.rig, lab.rig.order
    half = len(order) // 2
    parts = {Direction.LOAD: order.part(0, half), Direction.STORE: order.part(half, 2 * half)}
    size = parts[Direction.LOAD].bytes
    large = at_once(
        [
            contenders.large(rig, Direction.LOAD, 0, size),
            contenders.large(rig, Direction.STORE, size, size),
        ]
    )
    yardstick: list[float] = []
    for shape in SHAPES:
        log.say(shape.name)
        with lab.mover(shape) as mover:
            copies = {contenders.LARGE: large, "FlexKV": by_mover(mover, parts)}
            seconds = interleaved(copies, lab.repeats)
        yardstick += rates(seconds[contenders.LARGE], 2 * size)
        goal = GOAL if shape.run_bytes >= 16 * KIB else None
        speed = rates(seconds["FlexKV"], 2 * size)
        yield median_row(f"both ways at once, {shape.name}", goal, speed, "GB/s", "")
    what = "both ways at once, two large copies"
    yield median_row(what, None, yardstick, "GB/s", "for comparison")


def by_mover(mover: AnyMover, parts: dict[Direction, Order]) -> Copy:
    """One transfer each way, ended with the later one."""

    def copy() -> None:
        tickets = [mover.submit(d, order.blocks, order.offsets) for d, order in parts.items()]
        for ticket in tickets:
            finish(mover, ticket)

    return copy


def at_once(enqueues: list[Enqueue]) -> Copy:
    """Each in a stream of its own."""
    streams = [torch.cuda.Stream() for _ in enqueues]

    def copy() -> None:
        for stream, enqueue in zip(streams, enqueues, strict=True):
            with torch.cuda.stream(stream):
                enqueue()
        for stream in streams:
            stream.synchronize()

    return copy
