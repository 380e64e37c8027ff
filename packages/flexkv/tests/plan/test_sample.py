# SPDX-License-Identifier: Apache-2.0
"""A sample of conversations stands for the whole trace."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from flexkv.eviction import POLICIES
from flexkv.plan import replayer
from flexkv.plan.curve import LRUCurve
from flexkv.plan.replay import Setup, replay
from flexkv.plan.replayer import Replayer, conversations
from flexkv.plan.trace import Prefixes, Trace, TracedRequest

SIZE = 16
GENERATE = (Phase.explicit, Phase.generate)
"""Without shrinking: one example takes a second."""
SYSTEM = 6
"""Blocks that all conversations begin with."""


def chats(seed: int, count: int = 600) -> Trace:
    """Conversations of 1 to 6 turns behind one system prompt, of which each turn adds blocks."""
    draw = random.Random(seed)
    turns = []
    for chat in range(count):
        begun, length = draw.uniform(0, 10_000), SYSTEM
        for _ in range(draw.choice((1, 1, 1, 2, 4, 6))):
            length += draw.randint(1, 8)
            turns.append((begun, chat, length))
            begun += draw.expovariate(1 / 2000)
    prefixes, requests = Prefixes(), []
    for when, chat, length in sorted(turns):
        names = [i if i < SYSTEM else (chat, i) for i in range(length)]
        chain = prefixes.follow(names)
        requests.append(TracedRequest(when, chain, (), length * SIZE + 1, 50, f"s{chat}"))
    return Trace("test", "test", SIZE, requests, len(prefixes))


def test_requests_of_a_conversation_are_together() -> None:
    trace = chats(1)
    groups = conversations(trace)
    of_session: dict[str, set[int]] = {}
    for group, request in zip(groups, trace.requests, strict=True):
        of_session.setdefault(request.session, set()).add(group)
    assert {len(each) for each in of_session.values()} == {1}
    assert len(set(groups)) == len(of_session)


@pytest.fixture(autouse=True)
def _small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayer, "LEAST_REQUESTS", 0)


def sampled_and_whole(seed: int, blocks: int) -> dict[str, tuple[float, float]]:
    """The hit rates of each policy on half of the conversations and on all of them."""
    trace = chats(seed, 1500)
    sampled = Replayer(trace, LRUCurve(trace, None), None, 0, trace.uses // 2)
    assert sampled.sample is not None
    rates = {}
    for policy in POLICIES:
        found = sampled.outcome(Setup(blocks, policy))
        assert 0.3 < found.share < 0.7
        rates[policy] = found.hit_rate, replay(trace, Setup(blocks, policy)).hit_rate
    return rates


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_sample_agrees_with_the_whole_within_three_points(seed: int) -> None:
    for found, truth in sampled_and_whole(seed, 3000).values():
        assert found == pytest.approx(truth, abs=0.03)


@settings(max_examples=4, deadline=None, phases=GENERATE)
@given(st.integers(0, 10_000), st.sampled_from([3000, 5000]))
@example(520, 3000)
def test_a_sample_is_off_by_a_guard_that_prefers_lru_at_most(seed: int, blocks: int) -> None:
    """In a sample the guard may lose its trust in a policy that it would keep on the whole."""
    rates = sampled_and_whole(seed, blocks)
    for found, truth in rates.values():
        assert min(truth, rates["lru"][1]) - 0.03 <= found <= truth + 0.03


@settings(max_examples=3, deadline=None, phases=GENERATE)
@given(st.integers(0, 10_000))
def test_writes_to_disk_are_those_of_the_whole_within_a_tenth(seed: int) -> None:
    trace = chats(seed)
    sampled = Replayer(trace, LRUCurve(trace, None), None, 0, trace.uses // 2)
    setup = Setup(1000, disk_blocks=3000)
    found, truth = sampled.outcome(setup), replay(trace, setup)
    assert found.share < 0.8
    assert found.written_blocks == pytest.approx(truth.written_blocks, rel=0.1)
    assert found.hit_rate == pytest.approx(truth.hit_rate, abs=0.02)


def test_lru_of_a_sample_needs_no_estimate() -> None:
    trace = chats(3)
    curve = LRUCurve(trace, None)
    sampled = Replayer(trace, curve, None, 0, trace.uses // 3)
    for blocks in (1200, 2500, 4000):
        found = sampled.outcome(Setup(blocks))
        assert found.share < 0.6
        assert found.hit_rate == pytest.approx(curve.at(blocks).hit_rate, abs=1e-4)


def test_the_size_of_a_sample_leaves_shared_prefixes_whole() -> None:
    trace = chats(4)
    sampled = Replayer(trace, LRUCurve(trace, None), None, 0, trace.uses // 4).sample
    assert sampled is not None
    assert sampled.scaled(SYSTEM) == SYSTEM
    assert sampled.scaled(0) == 0
    assert 0.15 < sampled.scaled(1000) / 1000 < 0.4


def test_a_short_trace_is_replayed_as_a_whole() -> None:
    trace = chats(5)
    assert Replayer(trace, LRUCurve(trace, None), None, 0, trace.uses).sample is None


def test_memory_of_few_requests_is_replayed_on_the_whole_trace() -> None:
    trace = chats(6)
    sampled = Replayer(trace, LRUCurve(trace, None), None, 0, trace.uses // 3)
    few = int(replayer.LEAST_PROMPTS * trace.uses / len(trace.requests) * 2)
    assert sampled.outcome(Setup(few)).share == 1
    assert sampled.outcome(Setup(4 * few)).share < 1
    trace.requests.append(TracedRequest(1e6, list(range(2000)), (), 2000 * SIZE + 1, 1))
    long = Replayer(trace, LRUCurve(trace, None), None, 0, trace.uses // 3)
    assert long.outcome(Setup(4 * few, disk_blocks=3000)).share == 1


def test_one_conversation_is_no_sample() -> None:
    chain = Prefixes().follow(range(50))
    requests = [TracedRequest(float(i), chain, (), 50 * SIZE + 1, 1) for i in range(20)]
    trace = Trace("test", "test", SIZE, requests, 50)
    assert Replayer(trace, LRUCurve(trace, None), None, 0, 100).sample is None
