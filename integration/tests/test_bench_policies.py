# SPDX-License-Identifier: Apache-2.0
"""The comparison of eviction policies counts what it says."""

from __future__ import annotations

import pytest

from flexkv.plan.trace import Trace, TracedRequest
from integration.bench.policies import all_blocks, belady, hit_rates
from integration.bench.policy_hints import hint_rows
from integration.bench.workloads import (
    BLOCK_TOKENS,
    agents,
    hot_system_prompt,
    loop,
    moving_set,
    random_prompts,
    returning_chats,
    scan,
    sudden_change,
)


def trace_of(prompts: list[tuple[int, ...]]) -> Trace:
    requests = [
        TracedRequest(float(i), prompt, (), BLOCK_TOKENS * len(prompt) + 1, 10)
        for i, prompt in enumerate(prompts)
    ]
    return Trace("t", "", BLOCK_TOKENS, requests, 1 + max(max(each) for each in prompts))


def test_belady_keeps_what_is_needed_next() -> None:
    loop = trace_of([(0,), (1,), (2,), (0,), (1,), (2,)])
    assert all_blocks(loop) == 12, "each prompt has an incomplete block"
    assert belady(loop, 2) == 2 / 12
    assert belady(loop, 3) == 3 / 12
    assert hit_rates(loop, 2)["lru"] == 0


def test_a_block_behind_a_gap_is_no_hit() -> None:
    gap = trace_of([(0, 1, 2), (3, 4), (0, 1, 2)])
    assert belady(gap, 2) == 2 / all_blocks(gap)
    # Block 1 is needed before block 0, which leaves: the last prompt finds its second block alone.
    behind = trace_of([(0, 1), (1,), (0, 1)])
    assert belady(behind, 1) == 1 / all_blocks(behind)


def test_ends_of_conversations_are_told_from_other_requests() -> None:
    (row, *_) = hint_rows([returning_chats(3000)], lambda text: None)
    assert row.goal is not None
    assert 0 < row.goal.bound < row.value < 1


MADE = [
    returning_chats,
    hot_system_prompt,
    scan,
    agents,
    sudden_change,
    loop,
    random_prompts,
    moving_set,
]


@pytest.mark.parametrize("make", MADE)
def test_nothing_finds_more_than_belady(make: object) -> None:
    assert callable(make)
    trace = make(600)
    assert [each.seconds for each in trace.requests] == sorted(
        each.seconds for each in trace.requests
    )
    assert trace == make(600), "it is the same each time"
    rates = hit_rates(trace, 200)
    assert 0 < rates["Belady"] < 1
    assert all(rate <= rates["Belady"] for rate in rates.values())
