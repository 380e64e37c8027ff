# SPDX-License-Identifier: Apache-2.0
"""What the hazard policy keeps, by what its requests have shown."""

from __future__ import annotations

import random

import numpy as np

from flexkv.eviction import EvictionPolicy, LRUPolicy, RequestContext
from flexkv.eviction.hazard import HazardPolicy
from flexkv.eviction.rates import ReturnRates
from flexkv.index import BlockIndex

PAUSE = 30
"""Seconds before a chat goes on, in which 30 prompts come: more than the cache has room for."""
SLOTS = 60
SECONDS = 1500


class Node:
    """Requests one after the other over an index."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.index = BlockIndex(SLOTS, policy)
        self.requests = 0

    def run(self, prompt: list[bytes], now: float, output: int, session: str = "") -> int:
        """Returns how many blocks were found."""
        index, hits = self.index, self.index.lookup(prompt)
        self.requests += 1
        name = str(self.requests)
        context = RequestContext(512 * len(prompt), 512 * hits, name, session)
        index.began(prompt, context, now)
        index.hit(prompt[:hits], context)
        index.publish(index.reserve_all(prompt, range(hits, len(prompt)), (0,)))
        index.ended(name, output, now)
        return hits


def prompt_of(name: str, blocks: int) -> list[bytes]:
    return [f"{name} {i}".encode() for i in range(blocks)]


def found(policy: EvictionPolicy, *, chat_output: int, sessions: bool = False) -> list[int]:
    """Blocks found of chats that go on once, among prompts that never come back and are as long."""
    node = Node(policy)
    rng = random.Random(3)
    chats = [rng.random() < 0.3 for _ in range(SECONDS)]
    hits = []
    for now, is_chat in enumerate(chats):
        session = f"chat {now}" if is_chat and sessions else ""
        node.run(prompt_of(f"prompt {now}", 4), now, chat_output if is_chat else 2, session)
        if now >= PAUSE and chats[now - PAUSE]:
            again = prompt_of(f"prompt {now - PAUSE}", 5)
            hits.append(node.run(again, now + 0.5, chat_output))
    return hits


def test_it_learns_which_requests_go_on() -> None:
    late = found(HazardPolicy(), chat_output=300)[200:]
    assert found(LRUPolicy(), chat_output=300)[200:] == [0] * len(late)
    assert sum(late) > 3 * len(late), "three of four blocks at least"


def test_a_session_tells_requests_apart_that_look_the_same() -> None:
    with_sessions = found(HazardPolicy(), chat_output=2, sessions=True)[200:]
    without = found(HazardPolicy(), chat_output=2)[200:]
    assert sum(with_sessions) > 3 * len(with_sessions)
    assert sum(with_sessions) > sum(without)


def test_two_replays_are_the_same() -> None:
    assert found(HazardPolicy(), chat_output=20) == found(HazardPolicy(), chat_output=20)


def filled(policy: HazardPolicy, hint: bool | None) -> BlockIndex:
    """A full cache of prompts whose clients gave this hint."""
    index = BlockIndex(8, policy)
    for i in range(2):
        prompt = prompt_of(f"old {i}", 4)
        index.began(prompt, RequestContext(request_id=str(i), returns=hint), 0.0)
        index.publish(index.reserve_all(prompt, range(4), (0,)))
        index.ended(str(i), 100, 0.0)
    return index


def test_what_is_not_expected_back_is_not_admitted() -> None:
    index = filled(HazardPolicy(), hint=None)
    prompt = prompt_of("new", 4)
    index.began(prompt, RequestContext(returns=False), 1.0)
    assert index.reserve_all(prompt, range(4), (0,)) == []
    assert index.lookup(prompt_of("old 0", 4)) == 4
    assert index.lookup(prompt_of("old 1", 4)) == 4


def test_what_is_not_expected_back_makes_room() -> None:
    policy = HazardPolicy()
    index = filled(policy, hint=None)
    index.began(prompt_of("old 1", 4), RequestContext(request_id="x", returns=False), 1.0)
    index.ended("x", 100, 1.0)
    prompt = prompt_of("new", 3)
    index.began(prompt, RequestContext(returns=True), 1.0)
    assert [each.key for each in index.reserve_all(prompt, range(3), (0,))] == prompt
    assert index.lookup(prompt_of("old 0", 4)) == 4
    assert index.lookup(prompt_of("old 1", 4)) == 1


def test_blocks_that_left_show_that_a_request_goes_on() -> None:
    policy = HazardPolicy()
    index = filled(policy, hint=None)
    for i in range(4):
        prompt = prompt_of(f"new {i}", 4)
        index.began(prompt, RequestContext(returns=True), 1.0)
        index.publish(index.reserve_all(prompt, range(4), (0,)))
    longer = prompt_of("old 0", 6)
    assert index.lookup(longer) == 0
    index.began(longer, RequestContext(request_id="y"), 2.0)
    assert policy._running["y"].turn == 1


def test_a_request_that_was_preempted_is_the_same_request() -> None:
    policy = HazardPolicy()
    index = filled(policy, hint=None)
    longer = prompt_of("old 0", 6)
    for _ in range(2):
        index.began(longer, RequestContext(request_id="y"), 2.0)
    assert policy._running["y"].turn == 1


def test_a_fork_is_a_trunk() -> None:
    policy = HazardPolicy()
    index = BlockIndex(40, policy)
    for i in range(4):
        prompt = prompt_of("system", 3) + prompt_of(f"user {i}", 2)
        index.began(prompt, RequestContext(), float(i))
        index.publish(index.reserve_all(prompt, range(index.lookup(prompt), 5), (0,)))
    assert policy._forks == {b"system 2": 4}
    assert policy._known[b"system 0"] is policy._known[b"system 2"]
    assert policy._known[b"system 2"] is not policy._known[b"user 3 0"]


def test_rates_follow_what_came_back() -> None:
    rates = ReturnRates([[1.0] * 2] * 4)
    often, seldom = rates.class_of((0, 0, 0, 0)), rates.class_of((1, 0, 0, 0))
    for _ in range(500):
        rates.note(often, 20.0, 1.0, 1.0)
        rates.note(seldom, 600.0, 1.0, 0.0)
    rates.learn(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    assert rates.worth(often, 1.0) > 20 * rates.worth(seldom, 1.0)
    assert rates.worth(often, 15.0) > rates.worth(often, 100.0)
    unseen = rates.class_of((0, 1, 0, 0))
    assert rates.worth(unseen, 15.0) > 5 * rates.worth(seldom, 15.0), "it shares a factor"


def test_blocks_that_are_followed_still_count() -> None:
    rates = ReturnRates([[1.0] * 2] * 4)
    number = rates.class_of((0, 0, 0, 0))
    before = rates.worth(number, 300.0)
    rates.learn(np.zeros(900, np.int64), np.full(900, 400.0), np.ones(900))
    assert rates.worth(number, 300.0) < before / 5
