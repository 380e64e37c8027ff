# SPDX-License-Identifier: Apache-2.0
"""Choosing ways and a ring from measured speeds, without a device."""

from __future__ import annotations

import itertools
import random

import pytest

from flexkv_kernels import CudaChoice, CudaMode, Direction
from flexkv_kernels.cuda_choice import (
    BY_COPY_ENGINES,
    FEWER_BLOCKS,
    LONG_RUN,
    SMALLER_RING,
    choice_for,
    choose,
    for_all_classes,
)
from flexkv_kernels.cuda_measure import Sample

DMA, KERNEL, TMA, STAGED = list(CudaMode)[1:]
LOAD, STORE = Direction
SMALL, MIDDLE, LARGE = 16, 32, 64


def sample(
    mode: CudaMode, blocks: int, speed: float, ring: int = 0, run_bytes: int = 256
) -> Sample:
    ring = ring or (LARGE if mode is STAGED else 0)
    return Sample(LOAD, run_bytes, 4096, mode, blocks, ring, speed)


@pytest.mark.parametrize(
    ("samples", "mode", "blocks"),
    [
        ([sample(DMA, 0, 7), sample(STAGED, 16, 40), sample(KERNEL, 8, 35)], STAGED, 16),
        ([sample(STAGED, 8, 40), sample(STAGED, 16, 50), sample(STAGED, 32, 50.4)], STAGED, 16),
        ([sample(STAGED, 8, 40), sample(STAGED, 16, 50), sample(STAGED, 32, 50.6)], STAGED, 32),
        ([sample(DMA, 0, 49.6), sample(STAGED, 8, 50)], DMA, 0),
        ([sample(DMA, 0, 49.4), sample(STAGED, 8, 50)], STAGED, 8),
        ([sample(TMA, 4, 50), sample(KERNEL, 4, 49.9)], TMA, 4),
        # Beside a computing engine, copy engines keep their speed.
        ([sample(STAGED, 16, 49.3), sample(STAGED, 32, 49.5), sample(TMA, 4, 50)], STAGED, 16),
        ([sample(STAGED, 16, 49.2), sample(TMA, 4, 50)], TMA, 4),
        # 32 blocks of one warp leave more multiprocessors to the engine than 4 of a copy kernel.
        ([sample(STAGED, 32, 49.9), sample(KERNEL, 4, 50)], STAGED, 32),
    ],
)
def test_the_fastest_is_chosen_and_of_about_equal_ones_the_smallest(
    samples: list[Sample], mode: CudaMode, blocks: int
) -> None:
    for found in (samples, samples[::-1]):
        assert choose(found)[0] == [CudaChoice(LOAD, 256, 4096, mode, blocks)]


def test_each_class_has_a_choice_of_its_own() -> None:
    samples = [sample(DMA, 0, 7), sample(STAGED, 8, 40), sample(DMA, 0, 50, run_bytes=65536)]
    choices, ring = choose(samples)
    assert [choice.mode for choice in choices] == [STAGED, DMA]
    assert ring == LARGE


def test_nothing_is_chosen_of_nothing() -> None:
    assert choose([]) == ([], 0)


def of_rings(speeds: dict[int, float], run_bytes: int = 256) -> list[Sample]:
    return [sample(STAGED, 8, speed, ring, run_bytes) for ring, speed in speeds.items()]


def test_the_smallest_ring_that_is_fast_enough_is_chosen() -> None:
    assert choose(of_rings({SMALL: 40, MIDDLE: 49.8, LARGE: 50}))[1] == MIDDLE
    assert choose(of_rings({SMALL: 40, MIDDLE: 49.7, LARGE: 50}))[1] == LARGE
    assert choose([sample(KERNEL, 4, 50)])[1] == 0


def test_all_classes_count_for_the_ring() -> None:
    whole = of_rings({SMALL: 50, MIDDLE: 50, LARGE: 50})
    part = of_rings({SMALL: 40, MIDDLE: 45, LARGE: 50}, run_bytes=512)
    assert choose(whole)[1] == SMALL
    assert choose(whole + part)[1] == LARGE
    # A class that a kernel copies as fast needs no ring.
    assert choose([*whole, *part, sample(KERNEL, 4, 50, run_bytes=512)])[1] == SMALL


def test_without_a_ring_that_suits_all_the_one_that_costs_least_is_chosen() -> None:
    one = of_rings({SMALL: 50, MIDDLE: 49, LARGE: 40})
    other = of_rings({SMALL: 40, MIDDLE: 49, LARGE: 50}, run_bytes=512)
    assert choose(one + other)[1] == MIDDLE


def test_tolerances_do_not_add_up_to_more_than_they_are() -> None:
    """Over random speeds of two classes and three rings."""
    rng = random.Random(1)
    for _ in range(500):
        samples = [
            sample(STAGED, blocks, rng.uniform(49, 50.5), ring, run_bytes)
            for run_bytes, blocks, ring in itertools.product(
                (256, 512), (8, 16, 32), (SMALL, MIDDLE, LARGE)
            )
        ]
        samples += [sample(KERNEL, 4, 50.2), sample(KERNEL, 4, 50.2, run_bytes=512)]
        choices, ring = choose(samples)
        for choice in choices:
            mine = [each for each in samples if each.run_bytes == choice.run_bytes]
            best = max(each.speed for each in mine)
            speed = max(
                each.speed
                for each in mine
                if (each.mode, each.thread_blocks) == (choice.mode, choice.thread_blocks)
                and each.ring_bytes in {0, ring}
            )
            assert speed >= 0.97 * best
    assert SMALLER_RING * BY_COPY_ENGINES * FEWER_BLOCKS >= 0.97


def test_choices_for_all_classes_name_correct_ways_only() -> None:
    measured = [
        CudaChoice(LOAD, 256, 2 << 20, STAGED, 8),
        CudaChoice(LOAD, 4096, 4096, KERNEL, 4),
        CudaChoice(STORE, 4096, 4096, TMA, 4),
    ]
    made = for_all_classes(measured, {DMA, KERNEL, TMA})
    assert {choice.mode for choice in made} == {DMA, KERNEL, TMA}
    assert len({(c.direction, c.run_bytes, c.slot_run_bytes) for c in made}) == len(made)
    for direction in Direction:
        for run in range(21):
            for slot_run in range(21):
                key = direction, 1 << run, 1 << slot_run
                found = choice_for(made, *key)
                assert found is not None
                assert (found.direction, found.run_bytes, found.slot_run_bytes) == key
                known = choice_for(measured, *key)
                if known is None or known.mode is STAGED:
                    assert found.mode is (DMA if found.run_bytes >= LONG_RUN else KERNEL)
                else:
                    assert (found.mode, found.thread_blocks) == (known.mode, known.thread_blocks)


def test_a_mover_takes_the_nearest_choice() -> None:
    near, far = CudaChoice(LOAD, 256, 4096, KERNEL), CudaChoice(LOAD, 1024, 4096, TMA)
    assert choice_for([far, near], LOAD, 256, 4096) is near
    assert choice_for([far, near], LOAD, 300, 4096) is near
    assert choice_for([far, near], LOAD, 1024, 8192) is far
    assert choice_for([near], LOAD, 4096, 4096) is None
    assert choice_for([near], STORE, 256, 4096) is None
    long = CudaChoice(LOAD, LONG_RUN, LONG_RUN, DMA)
    assert choice_for([long], LOAD, 1 << 30, 1 << 30) is long
