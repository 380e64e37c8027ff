# SPDX-License-Identifier: Apache-2.0
"""Copies beside a computing engine: what is left of their speed, and what they leave to the engine.

Both count: copies that crawl, for instance because their kernels wait for room on a multiprocessor,
cost the engine nothing. So the time of a computation beside copies does not count where the copies
miss their own goal.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from flexkv.types.mover import Direction
from flexkv_kernels import Calibration, CudaMode
from integration.bench.rows import Row
from integration.gpu import contenders, goals
from integration.gpu.both_ways import LARGE, at_once
from integration.gpu.lab import Lab
from integration.gpu.pump import Copying, Pump, by_mover, groups_of, running
from integration.gpu.results import Log
from integration.gpu.shapes import KIB, LAYOUTS, SHAPES, Order, Shape
from integration.gpu.timing import interleaved, rates
from integration.gpu.works import WORKS, Work

BESIDE = (SHAPES[0], Shape(16 * KIB), LAYOUTS[0], LAYOUTS[2], LAYOUTS[6])
"""Short and long runs, blocks of a model, the same by eighths of the layers, latent attention."""

WAYS: dict[str, tuple[Direction, ...]] = {
    "loads": (Direction.LOAD,),
    "stores": (Direction.STORE,),
    "both ways": (Direction.LOAD, Direction.STORE),
}

_STAGED_SHARE = 16 / 228
"""Of the KiB of shared memory that a multiprocessor of an H100 or H200 has."""
_UNDER_WAY_SECONDS = 0.02
"""From when copies begin until they are measured."""
_IDLE_SECONDS = 0.05
"""So long they are measured on the idle device."""


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What was measured of a computation and of copies beside it.

    Attributes:
        large: GB/s of large copies the same way, alone.
        idle: GB/s of the copies, alone.
        beside: GB/s of the copies beside the computation.
        alone: seconds of the computation alone.
        slowed: the same beside the copies.
    """

    large: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    slowed: list[float] = field(default_factory=list)


def beside_rows(lab: Lab, log: Log) -> Iterator[Row]:
    """How many multiprocessors copies occupy; then for each computation and shape, two rows for
    each way of copying; the same for a Triton copy of 16 KiB pages."""
    for shape in log.units(BESIDE, lambda shape: f"multiprocessors, {shape.name}"):
        used = multiprocessors(lab.calibration(shape))
        what = f"multiprocessors that copies of {shape.name} both ways occupy"
        yield Row(what, used, "SMs", goals.MULTIPROCESSORS, "as calibrated")
    works: dict[str, Work] = {}
    pairs = [(name, shape) for name in WORKS for shape in BESIDE]
    for name, shape in log.units(pairs, lambda pair: f"{pair[0]}, {pair[1].name}"):
        if name not in works:
            works[name] = WORKS[name](lab, log)
        orders = groups_of(lab.rig.order(shape))
        with lab.mover(shape) as mover:
            copies = {d: by_mover(mover, d, orders[d]) for d in Direction}
            for way, directions in WAYS.items():
                found = measure(lab, works[name], {d: copies[d] for d in directions})
                yield from rows_of(found, works[name], f"copies of {shape.name}", way)
    for _ in log.units([contenders.TRITON], str):
        try:
            yield from _by_triton(lab, log)
        except Exception as error:  # noqa: BLE001 - a contender's failure must not hide our figures
            log.note(f"no {contenders.TRITON}: {type(error).__name__}: {error}")


def multiprocessors(calibration: Calibration) -> float:
    """The most that kernels of a load and a store at once occupy. A block of the staged way has one
    warp and so much of a multiprocessor's shared memory; a block of the others has one for itself.
    """
    if calibration.mode is CudaMode.DMA:
        return 0.0
    return sum(
        max(
            (
                choice.thread_blocks * (_STAGED_SHARE if choice.mode is CudaMode.STAGED else 1)
                for choice in calibration.choices
                if choice.direction is d
            ),
            default=0.0,
        )
        for d in Direction
    )


def measure(lab: Lab, work: Work, copies: Mapping[Direction, Copying]) -> Meanwhile:
    """Let the computation, copies and large copies take turns, and the first two run at once."""
    found = Meanwhile()
    size = lab.rig.pages.numel() // 2
    large = at_once(lab, [contenders.large(lab, d, i * size, size) for i, d in enumerate(copies)])
    work.seconds()
    found.large.extend(
        rates(interleaved({LARGE: large}, lab.sizes.repeats)[LARGE], len(copies) * size)
    )
    for _ in range(lab.sizes.repeats):
        found.alone.append(work.seconds())
        with running(copies) as pumps:
            time.sleep(_UNDER_WAY_SECONDS)
            begin = time.perf_counter()
            time.sleep(_IDLE_SECONDS)
            found.idle.append(_rate(pumps, begin))
            begin = time.perf_counter()
            found.slowed.append(work.seconds())
            found.beside.append(_rate(pumps, begin))
    return found


def rows_of(
    found: Meanwhile, work: Work, copies: str, way: str, *, ours: bool = True
) -> Iterator[Row]:
    """The speed of the copies, and the time of the computation, which does not count where the
    copies miss their goal. Copies that are not ours have no goal."""
    large = LARGE if way == "both ways" else contenders.LARGE
    median = {name: statistics.median(taken) for name, taken in asdict(found).items()}
    times = f"medians of {len(found.alone)}"
    speed = Row(
        what=f"{copies}, {way}, beside a {work.name} ÷ {large} alone",
        value=median["beside"] / median["large"],
        unit="ratio",
        goal=goals.COPIES_BESIDE if ours else None,
        detail=f"{median['beside']:.2f} GB/s ÷ {median['large']:.2f} GB/s; "
        f"{median['idle']:.2f} GB/s without it; {times}",
        samples={"beside": found.beside, large: found.large, "without it": found.idle},
        unit_of_samples="GB/s",
    )
    yield speed
    void = "" if speed.passed else f"the copies miss {speed.goal} of {large}"
    yield Row(
        what=f"{work.name} beside {copies}, {way} ÷ alone",
        value=median["slowed"] / median["alone"],
        unit="ratio",
        goal=goals.COMPUTE_BESIDE if ours else None,
        detail=f"{work.kernel}; {work.flops / median['alone'] / 1e12:.0f} TFLOP/s alone; "
        f"copies of {median['beside']:.1f} GB/s meanwhile; {times}",
        samples={"alone": found.alone, "beside copies": found.slowed},
        void=void,
    )


def _rate(pumps: Sequence[Pump], begin: float) -> float:
    """GB/s of all since then."""
    now = time.perf_counter()
    return sum(pump.rate(begin, now) for pump in pumps)


def _by_triton(lab: Lab, log: Log) -> Iterator[Row]:
    shape = Shape(16 * KIB)
    copies = {
        direction: _triton_copying(lab, shape, direction, orders)
        for direction, orders in groups_of(lab.rig.order(shape)).items()
    }
    found = measure(lab, (work := WORKS["matrix product"](lab, log)), copies)
    what = f"copies of {shape.name} by a {contenders.TRITON}"
    yield from rows_of(found, work, what, "both ways", ours=False)


def _triton_copying(
    lab: Lab, shape: Shape, direction: Direction, orders: Sequence[Order]
) -> Copying:
    enqueues = [contenders.by_triton(lab, shape, direction, order)[1] for order in orders]
    for enqueue in enqueues:
        contenders.finished(lab, enqueue)()  # compiles the kernel
    stream = lab.gpu.stream()

    def copy(pump: Pump) -> None:
        while not pump.stop.is_set():
            for enqueue in enqueues:
                enqueue(stream)
            stream.synchronize()
            pump.count(sum(order.bytes for order in orders))

    return copy
