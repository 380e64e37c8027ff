# SPDX-License-Identifier: Apache-2.0
"""Chooses ways of copying, and the size of the ring, from measured speeds."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from flexkv.types.mover import LAYER_PARTS, Direction
from flexkv_kernels.cuda_measure import Sample, TransferClass
from flexkv_kernels.cuda_options import CudaChoice, CudaMode
from flexkv_kernels.native_mover import PlaneTuple

SMALLER_RING = 0.995
"""A ring is chosen if each class reaches this share of its speed with the best ring: device memory
belongs to the engine. Not tuned."""

BY_COPY_ENGINES = 0.985
"""With the chosen ring, a way whose link is driven by copy engines is chosen if it reaches this
share of the fastest one's speed. Speeds are measured on an idle device; beside an engine that
computes, copy engines keep theirs, and kernels wait for multiprocessors. Not tuned."""

FEWER_BLOCKS = 0.99
"""Of such ways, or of all where there is none, one that reaches this share of the fastest one's
speed is chosen if it needs fewer multiprocessors: those belong to the engine, too. Not tuned. The
product of the three shares is 0.97: the goal for copies, if the fastest way has the speed of the
link."""

STAGED_SHARE = 1 / 16
"""The part of a multiprocessor that a thread block of the staged way counts as. It has one warp and
fits beside an engine's blocks; a block of another way takes the place of one. Not tuned."""

LONG_RUN = 64 << 10
"""Runs of this many bytes and more count as equal: see `CudaOptions.choices`."""

_LONGEST = 1 << 20
"""The longest class of runs, as in cuda_tuning.cpp."""

_COPY_ENGINES = frozenset({CudaMode.DMA, CudaMode.STAGED})

_Key = tuple[Direction, int, int]


def classes_of(planes: Sequence[PlaneTuple], stored: range) -> list[TransferClass]:
    """The classes of an engine's transfers, each once: loads of all planes, loads of as many as a
    layer-wise load has in a part, and stores of ``stored``. Classes without planes are left out."""
    step = -(-len(planes) // LAYER_PARTS)
    wanted = [
        TransferClass(Direction.LOAD, 0, len(planes)),
        TransferClass(Direction.LOAD, 0, step),
        TransferClass(Direction.STORE, stored.start, stored.stop),
    ]
    return [part for part in dict.fromkeys(wanted) if part.first < part.last]


def choose(samples: Sequence[Sample]) -> tuple[list[CudaChoice], int]:
    """Choose the ring for all classes, and for each class the way.

    The ring is the smallest with which every class is about as fast as with its best ring. Then
    each class takes the way that is about as fast as the fastest with that ring, by copy engines if
    one is, and needs the fewest multiprocessors. See `SMALLER_RING`, `BY_COPY_ENGINES` and
    `FEWER_BLOCKS`. Returns the choices, and bytes of the ring of a direction; 0 if no way with a
    ring was measured. `samples`: of all ways. Those without a ring count for every ring.
    """
    by_class: dict[_Key, list[Sample]] = {}
    for sample in samples:
        key = (sample.direction, sample.run_bytes, sample.slot_run_bytes)
        by_class.setdefault(key, []).append(sample)
    rings = sorted({sample.ring_bytes for sample in samples} - {0}) or [0]
    worst = {ring: _worst_share(by_class.values(), ring) for ring in rings}
    least = min(SMALLER_RING, max(worst.values(), default=0.0))
    ring_bytes = min(ring for ring in rings if worst[ring] >= least)
    choices = []
    for key, found in by_class.items():
        usable = _usable(found, ring_bytes) or found
        engines = [sample for sample in usable if sample.mode in _COPY_ENGINES]
        if _speed(engines) >= BY_COPY_ENGINES * _speed(usable):
            usable = engines
        best = _speed(usable)
        fast = [sample for sample in usable if sample.speed >= FEWER_BLOCKS * best]
        way = min(fast, key=lambda sample: (_multiprocessors(sample), -sample.speed))
        choices.append(CudaChoice(*key, way.mode, way.thread_blocks))
    return choices, ring_bytes


def _multiprocessors(sample: Sample) -> float:
    """The multiprocessors that a way keeps from the engine, about."""
    share = STAGED_SHARE if sample.mode is CudaMode.STAGED else 1.0
    return share * sample.thread_blocks


def _worst_share(classes: Iterable[Sequence[Sample]], ring_bytes: int) -> float:
    """The least share of its best speed that a class reaches with a ring."""
    return min(
        (_speed(_usable(found, ring_bytes)) / _speed(found) for found in classes), default=1.0
    )


def _usable(samples: Iterable[Sample], ring_bytes: int) -> list[Sample]:
    return [sample for sample in samples if sample.ring_bytes in {0, ring_bytes}]


def _speed(samples: Iterable[Sample]) -> float:
    return max((sample.speed for sample in samples), default=0.0)


def for_all_classes(
    choices: Sequence[CudaChoice], correct: Collection[CudaMode]
) -> tuple[CudaChoice, ...]:
    """Choices for every class that a transfer may have, so that a mover never chooses itself: by
    default it may take a way that copies wrong bytes. A class takes the choice that a mover would
    take for it, or DMA for long runs and else a kernel.

    Args:
        choices: those that were measured.
        correct: the correct ways, `CudaMode.DMA` and `CudaMode.KERNEL` among them.
    """
    powers = range(1, _LONGEST.bit_length() + 1)
    made = []
    for direction, run, slot_run in itertools.product(Direction, powers, powers):
        known = choice_for(choices, direction, 1 << (run - 1), 1 << (slot_run - 1))
        if known is not None and known.mode in correct:
            mode, blocks = known.mode, known.thread_blocks
        else:
            long = run >= LONG_RUN.bit_length()
            mode, blocks = (CudaMode.DMA if long else CudaMode.KERNEL), 0
        made.append(CudaChoice(direction, 1 << (run - 1), 1 << (slot_run - 1), mode, blocks))
    return tuple(made)


def choice_for(
    choices: Iterable[CudaChoice], direction: Direction, run_bytes: int, slot_run_bytes: int
) -> CudaChoice | None:
    """The choice that a mover takes for transfers with runs of these mean bytes, as
    ``CudaTuning::measured`` of cuda_tuning.cpp; None if it takes a default."""
    run, slot_run = _power(run_bytes), _power(slot_run_bytes)
    found = []
    for choice in choices:
        run_apart = _power(choice.run_bytes), run
        slot_run_apart = _power(choice.slot_run_bytes), slot_run
        if choice.direction is direction and _alike(*run_apart) and _alike(*slot_run_apart):
            distance = abs(run_apart[0] - run) + abs(slot_run_apart[0] - slot_run)
            found.append((distance, run_apart[0], slot_run_apart[0], choice))
    return min(found, key=lambda each: each[:3])[3] if found else None


def _power(size: int) -> int:
    return min(max(size, 1), _LONGEST).bit_length()


def _alike(power: int, other: int) -> bool:
    most = LONG_RUN.bit_length()
    return abs(min(power, most) - min(other, most)) <= 1
