# SPDX-License-Identifier: Apache-2.0
"""What copies leave to a model: time of a large matrix product while the link is saturated."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from flexkv.types.mover import Direction
from flexkv_kernels import Calibration, CudaMode
from integration.bench.rows import Goal, Row
from integration.gpu import contenders, goals
from integration.gpu.lab import Lab
from integration.gpu.results import Log
from integration.gpu.rig import AnyMover, finish, start
from integration.gpu.shapes import KIB, Order, Shape

IN_FLIGHT = 4
"""Transfers under way in each direction, so that the link is never idle."""

SHAPES = (Shape(256, tokens=16, heads=8), Shape(4 * KIB), Shape(16 * KIB), Shape(64 * KIB))


@dataclass(slots=True)
class Pump:
    """A thread that copies both ways without end, and how many bytes it has copied."""

    copied: int = 0
    error: Exception | None = None
    stop: threading.Event = field(default_factory=threading.Event)


def matmul_rows(lab: Lab, log: Log) -> Iterator[Row]:
    """Two rows for each shape, and one of a Triton copy of 16 KiB pages."""
    product = Product(lab)
    for shape in log.units(SHAPES, lambda shape: shape.name):
        used = multiprocessors(lab.calibration(shape))
        what = f"multiprocessors that copies of {shape.name} both ways occupy"
        yield Row(what, used, "SMs", goals.MULTIPROCESSORS, "thread blocks, as calibrated")
        with lab.mover(shape) as mover:
            groups = groups_of(lab.rig.order(shape))
            what = f"matrix product with copies of {shape.name} ÷ alone"
            copy = partial(pump, mover, groups)
            yield _measure(lab, what, goals.MATMUL, product, copy)
    for _ in log.units([contenders.TRITON], str):
        try:
            yield _against_triton(lab, product)
        except Exception as error:  # noqa: BLE001 - a contender's failure must not hide our figures
            log.note(f"no {contenders.TRITON}: {type(error).__name__}: {error}")


def multiprocessors(calibration: Calibration) -> int:
    """The most that kernels of a load and a store at once can be on: one for each thread block."""
    if calibration.mode is CudaMode.DMA:
        return 0
    return sum(
        max(
            (choice.thread_blocks for choice in calibration.choices if choice.direction is d),
            default=0,
        )
        for d in Direction
    )


class Product:
    """bf16 [n, n] times the same, of random numbers, into memory that is there already."""

    def __init__(self, lab: Lab) -> None:
        self.size, self._count = lab.sizes.matrix, lab.sizes.products
        shape, kind, memory = (self.size, self.size), torch.bfloat16, lab.gpu.memory
        self._factors = [torch.randn(shape, device=memory, dtype=kind) for _ in range(2)]
        self._result = torch.empty(shape, device=memory, dtype=kind)
        self._gpu, self._stream = lab.gpu, lab.gpu.stream()
        self._gpu.synchronize()

    def seconds(self) -> float:
        """Of one product, by the device's clock, the mean of many."""
        with self._stream.current():
            self._multiply(1)
        return self._gpu.seconds(self._stream, lambda: self._multiply(self._count)) / self._count

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(*self._factors, out=self._result)


def groups_of(order: Order) -> dict[Direction, list[Order]]:
    """Orders that share no block and no slot: IN_FLIGHT for each direction."""
    size = len(order) // (2 * IN_FLIGHT)
    parts = [order.part(i * size, (i + 1) * size) for i in range(2 * IN_FLIGHT)]
    return {Direction.LOAD: parts[:IN_FLIGHT], Direction.STORE: parts[IN_FLIGHT:]}


def pump(mover: AnyMover, groups: dict[Direction, list[Order]], state: Pump) -> None:
    """Copy until `state.stop`; the next transfer of a group begins when its last has ended."""
    work = [
        (d, order)
        for pair in zip(*groups.values(), strict=True)
        for d, order in zip(groups, pair, strict=True)
    ]
    tickets = [start(mover, d, order) for d, order in work]
    while not state.stop.is_set():
        for i, (direction, order) in enumerate(work):
            finish(mover, tickets[i])
            state.copied += order.bytes
            tickets[i] = start(mover, direction, order)
    for started in tickets:
        finish(mover, started)


@contextmanager
def running(copy: Callable[[Pump], None]) -> Iterator[Pump]:
    """Copies in a thread meanwhile; its error, if any, is raised at the end."""
    state = Pump()

    def run() -> None:
        try:
            copy(state)
        except Exception as error:  # noqa: BLE001 - told to the measuring thread, below
            state.error = error

    thread = threading.Thread(target=run, name="copies", daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.stop.set()
        thread.join()
    if state.error is not None:
        raise state.error


def _measure(
    lab: Lab, what: str, goal: Goal | None, product: Product, copy: Callable[[Pump], None]
) -> Row:
    alone, beside, speeds = [], [], []
    product.seconds()
    for _ in range(lab.sizes.repeats):
        alone.append(product.seconds())
        with running(copy) as state:
            time.sleep(0.02)  # copies are under way
            copied, start = state.copied, time.perf_counter()
            beside.append(product.seconds())
            speeds.append((state.copied - copied) / (time.perf_counter() - start) / 1e9)
    ratio = statistics.median(beside) / statistics.median(alone)
    flops = 2 * product.size**3 / statistics.median(alone) / 1e12
    return Row(
        what=what,
        value=ratio,
        unit="ratio",
        goal=goal,
        detail=f"{flops:.0f} TFLOP/s alone, copies of {statistics.median(speeds):.1f} GB/s "
        f"meanwhile, medians of {len(alone)}",
        samples={"alone": alone, "with copies": beside},
    )


def _against_triton(lab: Lab, product: Product) -> Row:
    shape = Shape(16 * KIB)
    groups = groups_of(lab.rig.order(shape))
    work = {
        direction: [(contenders.by_triton(lab, shape, direction, o)[1], o) for o in orders]
        for direction, orders in groups.items()
    }
    for pairs in work.values():
        for enqueue, _ in pairs:
            contenders.finished(lab, enqueue)()  # compiles the kernel
    streams = {direction: lab.gpu.stream() for direction in work}

    def copy(state: Pump) -> None:
        while not state.stop.is_set():
            for direction, stream in streams.items():
                for enqueue, _ in work[direction]:
                    enqueue(stream)
            for direction, stream in streams.items():
                stream.synchronize()
                state.copied += sum(order.bytes for _, order in work[direction])

    what = f"matrix product with copies of {shape.name} by a {contenders.TRITON} ÷ alone"
    return _measure(lab, what, None, product, copy)
