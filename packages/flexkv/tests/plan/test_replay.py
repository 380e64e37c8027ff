# SPDX-License-Identifier: Apache-2.0
"""Replays over the product's own index, policies and admissions."""

from __future__ import annotations

import pytest

from flexkv.eviction import POLICIES
from flexkv.plan.replay import Setup, replay
from flexkv.plan.trace import Prefixes, Trace, TracedRequest

SIZE = 16


def make_trace(prompts: list[str]) -> Trace:
    """A request for each text, whose characters are the names of its blocks."""
    prefixes = Prefixes()
    requests = [
        TracedRequest(float(i), prefixes.follow(each), (), len(each) * SIZE + 1, 1)
        for i, each in enumerate(prompts)
    ]
    return Trace("test", "test", SIZE, requests, len(prefixes), block_bytes=1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_hits_what_fits(policy: str) -> None:
    trace = make_trace(["abc", "abcd", "xyz", "abcd"])
    assert replay(trace, Setup(7, policy)).hit_tokens == (3 + 0 + 4) * SIZE


def test_what_memory_has_evicted_comes_from_disk() -> None:
    trace = make_trace(["abcd", "wxyz", "abcd"])
    outcome = replay(trace, Setup(4, disk_blocks=20))
    assert (outcome.hit_tokens, outcome.disk_tokens) == (4 * SIZE, 4 * SIZE)
    assert outcome.written_blocks == 8
    assert replay(trace, Setup(4)).hit_tokens == 0


def test_admissions_write_what_they_say() -> None:
    trace = make_trace(["ab", "ab", "cd", "ef"])
    written = {
        name: replay(trace, Setup(100, disk_blocks=100, admission=name)).written_blocks
        for name in ("write_through", "second_hit", "on_evict")
    }
    assert written == {"write_through": 6, "second_hit": 2, "on_evict": 0}
    assert replay(trace, Setup(4, disk_blocks=100, admission="on_evict")).written_blocks > 0


def test_a_full_disk_evicts_what_was_used_longest_ago() -> None:
    trace = make_trace(["ab", "cd", "ef", "ab", "ef"])
    assert replay(trace, Setup(2, disk_blocks=4)).hit_tokens == 2 * SIZE
