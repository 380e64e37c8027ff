# SPDX-License-Identifier: Apache-2.0
"""The curve of one pass is what the product's own index hits, size by size."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexkv.plan.curve import LRUCurve
from flexkv.plan.replay import Setup, replay
from flexkv.plan.saving import LoadCost, PrefillCost, Savings
from flexkv.plan.trace import Prefixes, Trace, TracedRequest

SIZE = 4
SAVINGS = Savings(PrefillCost(0.5, 0.25, "test"), LoadCost(3.0, 5.0), SIZE, 50)
"""The first block takes 4 s to compute, the second 8 s: the first one is not worth a disk."""

PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=8), st.integers(0, 3)), min_size=1, max_size=40
)
"""Names of blocks, of which few differ, so that prompts share prefixes; and blocks of an answer."""


def make_trace(prompts: list[tuple[list[int], int]]) -> Trace:
    """Prompts that end in the middle of a block."""
    prefixes, requests = Prefixes(), []
    for number, (names, answer) in enumerate(prompts):
        chain = prefixes.follow([*names, *(-1 for _ in range(answer))])
        blocks, rest = chain[: len(names)], chain[len(names) :]
        requests.append(
            TracedRequest(float(number), blocks, rest, len(names) * SIZE + 1, answer * SIZE)
        )
    return Trace("test", "test", SIZE, requests, len(prefixes), block_bytes=1)


@settings(max_examples=200, deadline=None)
@given(PROMPTS, st.integers(1, 30))
def test_one_pass_hits_what_an_index_of_each_size_hits(
    prompts: list[tuple[list[int], int]], blocks: int
) -> None:
    trace = make_trace(prompts)
    point = LRUCurve(trace, SAVINGS).at(blocks)
    outcome = replay(trace, Setup(blocks), SAVINGS)
    assert point.hit_tokens == outcome.hit_tokens
    assert point.hit_rate == outcome.hit_rate
    assert point.saved_seconds == pytest.approx(outcome.saved_seconds)


@settings(max_examples=100, deadline=None)
@given(PROMPTS, st.integers(1, 20), st.integers(1, 20))
def test_hits_of_the_engines_own_cache_are_not_counted(
    prompts: list[tuple[list[int], int]], blocks: int, own: int
) -> None:
    trace = make_trace(prompts)
    curve = LRUCurve(trace, None, own)
    whole = LRUCurve(trace, None)
    assert curve.engine_tokens == whole.at(own).hit_tokens
    assert curve.at(blocks).hit_tokens == max(
        0, whole.at(blocks).hit_tokens - whole.at(own).hit_tokens
    )
    outcome = replay(trace, Setup(blocks, engine_blocks=own))
    assert outcome.hit_tokens == curve.at(blocks).hit_tokens


@settings(max_examples=100, deadline=None)
@example([([0], 0), ([0] * 6, 0), ([1, 0, 0, 0, 0], 0), ([0], 0)], 6, 10)
# The disk is full, and a request computes again what only the disk has.
@example([([2, 0, 1, 2], 1), ([2, 1], 0), ([0] * 3, 1), ([2, 0, 1, 2], 2), ([2, 1], 0)], 6, 10)
@given(PROMPTS, st.integers(2, 8), st.integers(10, 40))
def test_a_disk_that_takes_all_is_read_off_the_same_curve(
    prompts: list[tuple[list[int], int]], memory: int, disk: int
) -> None:
    trace = make_trace(prompts)
    if max(len(each.blocks) + len(each.answer) for each in trace.requests) > memory:
        return  # what memory has no room for does not get to the disk
    point = LRUCurve(trace, None).at(disk)
    outcome = replay(trace, Setup(memory, disk_blocks=disk))
    assert outcome.hit_tokens == point.hit_tokens
    assert outcome.written_blocks == point.written_blocks


def test_only_a_prefix_without_a_gap_counts() -> None:
    prefixes = Prefixes()
    first = prefixes.follow("abcd")
    other = prefixes.follow("xbcd")
    assert set(first).isdisjoint(other)
    requests = [
        TracedRequest(0.0, first, (), 17, 0),
        TracedRequest(1.0, other, (), 17, 0),
        TracedRequest(2.0, first, (), 17, 0),
    ]
    curve = LRUCurve(Trace("test", "test", SIZE, requests, len(prefixes)), None)
    assert [curve.at(n).hit_tokens for n in (4, 5, 6, 8)] == [0, 4, 8, 16]


def test_the_last_token_of_a_prompt_is_computed_in_any_case() -> None:
    chain = Prefixes().follow("ab")
    requests = [TracedRequest(float(i), chain, (), 2 * SIZE, 0) for i in range(2)]
    trace = Trace("test", "test", SIZE, requests, 2)
    assert LRUCurve(trace, None).at(9).hit_tokens == SIZE
    assert replay(trace, Setup(9)).hit_tokens == SIZE


def test_the_knee_is_where_the_curve_bends() -> None:
    # 30 requests for one hot prompt of 4 blocks, then a scan, and the scan once more.
    prefixes = Prefixes()
    hot = [TracedRequest(float(i), prefixes.follow("abcd"), (), 17, 0) for i in range(30)]
    scan = [TracedRequest(100.0 + i, prefixes.follow([f"{i % 20}"]), (), 5, 0) for i in range(40)]
    curve = LRUCurve(Trace("test", "test", SIZE, hot + scan, len(prefixes)), None)
    assert curve.knee == 4
    assert curve.useful_blocks == 20
    assert curve.smallest_with(0.8) == 4
    assert curve.smallest_with(1.0) == 20


def test_hits_in_proportion_to_the_size_have_no_knee() -> None:
    prefixes = Prefixes()
    chain = prefixes.follow(range(200))
    again = [TracedRequest(float(i), chain, (), 200 * SIZE + 1, 0) for i in range(20)]
    curve = LRUCurve(Trace("test", "test", SIZE, again, len(prefixes)), None)
    assert (curve.knee, curve.useful_blocks, curve.smallest_with(0.99)) == (0, 200, 198)


def test_a_trace_without_a_second_use_has_no_knee() -> None:
    trace = make_trace([([0, 1], 0), ([1, 1], 0)])
    curve = LRUCurve(trace, SAVINGS)
    assert (curve.knee, curve.useful_blocks, curve.at(99).hit_tokens) == (0, 0, 0)
