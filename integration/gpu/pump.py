# SPDX-License-Identifier: Apache-2.0
"""Copies without end in threads of their own, and how fast they are meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from flexkv.types.mover import Direction
from integration.gpu.rig import AnyMover, finish, start
from integration.gpu.shapes import Order

IN_FLIGHT = 4
"""Transfers under way in each direction, so that the link is never idle."""

_JOIN_SECONDS = 120.0


@dataclass(slots=True)
class Pump:
    """Copies of one direction, which go on until they are stopped.

    Attributes:
        ends: when each transfer has ended, by `time.perf_counter`, and the bytes copied until then.
        error: why they have ended by themselves.
        stop: ends them.
    """

    ends: list[tuple[float, int]] = field(default_factory=list)
    error: Exception | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def copied(self) -> int:
        """Bytes so far."""
        return self.ends[-1][1] if self.ends else 0

    def count(self, size: int) -> None:
        """A transfer of so many bytes has ended."""
        self.ends.append((time.perf_counter(), self.copied + size))

    def rate(self, begin: float, end: float) -> float:
        """GB/s between the first and the last end of a transfer in a span of time. With less than
        two such ends, over the whole span."""
        ends = list(self.ends)
        inside = [(when, copied) for when, copied in ends if begin <= when <= end]
        if len(inside) > 1:
            (first, before), (last, after) = inside[0], inside[-1]
            return (after - before) / (last - first) / 1e9
        before = max((copied for when, copied in ends if when < begin), default=0)
        return sum(copied - before for _, copied in inside) / (end - begin) / 1e9


Copying = Callable[[Pump], None]
"""Copies until the pump's `stop`, and counts what it has copied."""


def groups_of(order: Order) -> dict[Direction, list[Order]]:
    """Orders that share no block and no slot: IN_FLIGHT for each direction, if there are blocks."""
    count = min(IN_FLIGHT, len(order) // 2)
    size = len(order) // (2 * count)
    parts = [order.part(i * size, (i + 1) * size) for i in range(2 * count)]
    return {Direction.LOAD: parts[:count], Direction.STORE: parts[count:]}


def by_mover(mover: AnyMover, direction: Direction, orders: Sequence[Order]) -> Copying:
    """Copies of FlexKV; the next one of an order begins when its last has ended."""

    def copy(pump: Pump) -> None:
        started = [start(mover, direction, order) for order in orders]
        while not pump.stop.is_set():
            for i, order in enumerate(orders):
                finish(mover, started[i])
                pump.count(order.bytes)
                started[i] = start(mover, direction, order)
        for tickets in started:
            finish(mover, tickets)

    return copy


@contextmanager
def running(copies: Mapping[Direction, Copying]) -> Iterator[list[Pump]]:
    """Copies in threads meanwhile; the error of one, if any, is raised at the end."""
    pumps = [Pump() for _ in copies]
    threads = [
        threading.Thread(target=_run, args=(copy, pump), name="copies", daemon=True)
        for copy, pump in zip(copies.values(), pumps, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield pumps
    finally:
        for pump in pumps:
            pump.stop.set()
        for thread in threads:
            thread.join(_JOIN_SECONDS)
    for pump in pumps:
        if pump.error is not None:
            raise pump.error


def _run(copy: Copying, pump: Pump) -> None:
    try:
        copy(pump)
    except Exception as error:  # noqa: BLE001 - told to the measuring thread, in `running`
        pump.error = error
