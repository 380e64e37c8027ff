# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv.tiers.disk.runs import SPREAD_BYTES, blocks_per_run, find_runs

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("slots", "most", "expected"),
    [
        ([], 4, []),
        ([7], 4, [[0]]),
        ([3, 4, 5, 6], 4, [[0, 1, 2, 3]]),
        ([6, 5, 4, 3], 4, [[3, 2, 1, 0]]),
        ([3, 4, 5, 6], 3, [[0, 1, 2], [3]]),
        ([3, 4, 5, 6], 1, [[0], [1], [2], [3]]),
        ([3, 4, 3], 4, [[0, 1], [2]]),
        ([4, 3, 4, 5], 4, [[1, 0], [2, 3]]),
        ([8, 9, 10, 11], 4, [[0, 1], [2, 3]]),  # over the end of a slab
        ([1, 3, 5, 4, 9], 4, [[0], [1], [3, 2], [4]]),
        ([2, 2], 4, [[0], [1]]),
    ],
)
def test_neighbours_become_runs(slots: list[int], most: int, expected: list[list[int]]) -> None:
    assert find_runs(slots, most, slots_per_slab=10) == expected


@st.composite
def batches(draw: st.DrawFn) -> list[int]:
    """Slots of a batch, as stretches that go up or down."""
    slots: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        start, step = draw(st.integers(20, 60)), draw(st.sampled_from([1, -1, 2, 0]))
        slots += [start + step * i for i in range(draw(st.integers(1, 10)))]
    return slots


@given(batches(), st.integers(1, 8), st.integers(1, 30))
def test_runs_are_neighbours_in_the_order_of_the_batch_and_no_shorter_than_they_must_be(
    slots: list[int], most: int, slots_per_slab: int
) -> None:
    runs = find_runs(slots, most, slots_per_slab)
    in_order = [sorted(run) for run in runs]
    assert list(itertools.chain(*in_order)) == list(range(len(slots)))
    for run in runs:
        places = [slots[i] for i in run]
        assert places == list(range(places[0], places[0] + len(run)))
        assert places[0] // slots_per_slab == places[-1] // slots_per_slab
        assert run in (sorted(run), sorted(run, reverse=True))
        assert len(run) <= most
    for before, after in itertools.pairwise(in_order):
        last, first = slots[before[-1]], slots[after[0]]
        step = last - slots[before[-2]] if len(before) > 1 else first - last
        assert (
            abs(first - last) != 1
            or first - last != step
            or len(before) == most
            or first // slots_per_slab != last // slots_per_slab
        )


@pytest.mark.parametrize(
    ("blocks", "size", "expected"),
    [
        (1000, 256 * KIB, 4),
        (16, 256 * KIB, 2),  # of which each of 8 threads has one
        (17, 256 * KIB, 3),
        (8, 256 * KIB, 1),
        (2, 4 * KIB, 64),
        (1000, 4 * KIB, 125),
        (100_000, 4 * KIB, 256),
        (1000, MIB, 1),
        (1000, 16 * MIB, 1),
        (1, MIB, 1),
    ],
)
def test_runs_leave_work_for_every_thread(blocks: int, size: int, expected: int) -> None:
    assert blocks_per_run(blocks, size, run_bytes=MIB, threads=8) == expected


@given(st.integers(1, 10_000), st.integers(1, 4096), st.integers(0, 8 * MIB), st.integers(1, 32))
def test_no_run_is_larger_than_it_may_be_or_spares_a_thread(
    blocks: int, pages: int, run_bytes: int, threads: int
) -> None:
    size = 4096 * pages
    most = blocks_per_run(blocks, size, run_bytes, threads)
    assert most == 1 or most * size <= run_bytes
    assert most * size <= SPREAD_BYTES or (most - 1) * threads < blocks
