# SPDX-License-Identifier: Apache-2.0
"""Loads and stores at once, half of the blocks each: FlexKV against two large copies at once."""

from __future__ import annotations

from collections.abc import Iterator

from flexkv.types.mover import Direction
from integration.bench.rows import Row
from integration.gpu import contenders, goals
from integration.gpu.contenders import Enqueue
from integration.gpu.lab import Lab
from integration.gpu.results import Log
from integration.gpu.rig import AnyMover, Copy, finish, start
from integration.gpu.shapes import LAYOUTS, SHAPES, Order
from integration.gpu.timing import interleaved, rates, ratio_of_rates

LARGE = "two large copies"


def both_ways_rows(lab: Lab, log: Log) -> Iterator[Row]:
    """A row for each shape: GB/s of both directions together."""
    for shape in log.units((*SHAPES, *LAYOUTS), lambda shape: shape.name):
        order = lab.rig.order(shape)
        half = len(order) // 2
        parts = {Direction.LOAD: order.part(0, half), Direction.STORE: order.part(half, 2 * half)}
        size = parts[Direction.LOAD].bytes
        large = [contenders.large(lab, d, i * size, size) for i, d in enumerate(parts)]
        with lab.mover(shape) as mover:
            copies = {LARGE: at_once(lab, large), "FlexKV": by_mover(mover, parts)}
            seconds = interleaved(copies, lab.sizes.repeats)
        speed = {name: rates(taken, 2 * size) for name, taken in seconds.items()}
        yield ratio_of_rates(
            f"both ways at once, {shape.name}: FlexKV ÷ {LARGE}",
            goals.BOTH_WAYS,
            ("FlexKV", speed["FlexKV"]),
            (LARGE, speed[LARGE]),
        )


def by_mover(mover: AnyMover, parts: dict[Direction, Order]) -> Copy:
    """One transfer each way, ended with the later one."""

    def copy() -> None:
        tickets = [start(mover, d, order) for d, order in parts.items()]
        for of_direction in tickets:
            finish(mover, of_direction)

    return copy


def at_once(lab: Lab, enqueues: list[Enqueue]) -> Copy:
    """Each in a stream of its own."""
    streams = [lab.gpu.stream() for _ in enqueues]

    def copy() -> None:
        for stream, enqueue in zip(streams, enqueues, strict=True):
            enqueue(stream)
        for stream in streams:
            stream.synchronize()

    return copy
