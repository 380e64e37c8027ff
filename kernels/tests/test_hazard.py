# SPDX-License-Identifier: Apache-2.0
"""What the hazard policy keeps, by what its requests have shown."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flexkv.eviction import EvictionPolicy, LRUPolicy, RequestContext
from flexkv.index.block_index import BlockIndex, block_index
from flexkv_kernels.hazard import HazardPolicy

PAUSE = 30
"""Seconds before a chat goes on, in which 30 prompts come: more than the cache has room for."""
SLOTS = 60
SECONDS = 1500


class Node:
    """Requests one after the other over an index."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.index = block_index(SLOTS, policy)
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
    late = found(HazardPolicy(SLOTS), chat_output=300)[200:]
    assert found(LRUPolicy(), chat_output=300)[200:] == [0] * len(late)
    assert sum(late) > 3 * len(late), "three of four blocks at least"


def test_a_session_tells_requests_apart_that_look_the_same() -> None:
    with_sessions = found(HazardPolicy(SLOTS), chat_output=2, sessions=True)[200:]
    without = found(HazardPolicy(SLOTS), chat_output=2)[200:]
    assert sum(with_sessions) > 3 * len(with_sessions)
    assert sum(with_sessions) > sum(without)


def test_a_session_goes_on_with_prompts_that_share_nothing() -> None:
    """Each second a session sends a prompt that never comes back, and then one that does."""
    node = Node(HazardPolicy(SLOTS))
    pause, hits = 10, []
    for now in range(600):
        session = f"session {now}"
        node.run(prompt_of(f"first {now}", 4), now, 100, session)
        node.run(prompt_of(f"second {now}", 4), now + 0.3, 100, session)
        if now >= pause:
            again = prompt_of(f"second {now - pause}", 4)
            hits.append(node.run(again, now + 0.6, 100))
    assert sum(hits[300:]) > 3 * len(hits[300:]), "three of four blocks at least"


def test_two_replays_are_the_same() -> None:
    assert found(HazardPolicy(SLOTS), chat_output=20) == found(HazardPolicy(SLOTS), chat_output=20)


def filled(policy: EvictionPolicy, hint: bool | None) -> BlockIndex:
    """A full cache of prompts whose clients gave this hint."""
    index = block_index(8, policy)
    for i in range(2):
        prompt = prompt_of(f"old {i}", 4)
        index.began(prompt, RequestContext(request_id=str(i), returns=hint), 0.0)
        index.publish(index.reserve_all(prompt, range(4), (0,)))
        index.ended(str(i), 100, 0.0)
    return index


def test_what_is_not_expected_back_leaves_first() -> None:
    index = filled(HazardPolicy(SLOTS), hint=None)
    for name in ("new", "next"):
        prompt = prompt_of(name, 4)
        index.began(prompt, RequestContext(returns=False), 1.0)
        index.publish(index.reserve_all(prompt, range(4), (0,)))
        assert index.lookup(prompt) == 4
    old = [index.lookup(prompt_of(f"old {i}", 4)) for i in range(2)]
    assert sorted(old) == [0, 4], "the second of the new prompts took the place of the first"


def began_and_stored(index: BlockIndex, prompt: list[bytes], priority: int = 0) -> None:
    index.began(prompt, RequestContext(priority=priority), 0.0)
    absent = index.missing(prompt)
    index.publish(index.reserve_all(prompt, absent, (0,)))


@pytest.mark.parametrize("others", [0, 5])
@pytest.mark.parametrize("lowest", [0, 1, 2])
@pytest.mark.parametrize("priority", [-(10**30), -1])
def test_of_blocks_worth_the_same_those_of_the_lowest_priority_leave_first(
    others: int, lowest: int, priority: int
) -> None:
    index = block_index(12, HazardPolicy(SLOTS))
    prompts = [prompt_of(f"old {i}", 4) for i in range(3)]
    for i, prompt in enumerate(prompts):
        began_and_stored(index, prompt, priority if i == lowest else others)
    began_and_stored(index, prompt_of("new", 4))
    assert [index.lookup(prompt) for prompt in prompts] == [4 * (i != lowest) for i in range(3)]


def test_without_priorities_the_oldest_block_leaves_first() -> None:
    index = block_index(12, HazardPolicy(SLOTS))
    prompts = [prompt_of(f"old {i}", 4) for i in range(3)]
    for prompt in prompts:
        began_and_stored(index, prompt)
    began_and_stored(index, prompt_of("new", 4))
    assert [index.lookup(prompt) for prompt in prompts] == [0, 4, 4]


def test_a_low_priority_does_not_lower_what_other_prompts_begin_with() -> None:
    index = block_index(8, HazardPolicy(SLOTS))
    trunk, other = prompt_of("trunk", 2), prompt_of("other", 3)
    began_and_stored(index, [*trunk, b"a"], priority=-1)
    began_and_stored(index, other)
    began_and_stored(index, [*trunk, b"b"], priority=-1)
    for i in range(4):
        began_and_stored(index, [b"new %d" % i])
    assert index.present([b"a", b"b"]) == [False, False]
    assert index.lookup(trunk) == 2
    assert index.lookup(other) == 2


def test_what_is_not_expected_back_makes_room() -> None:
    policy = HazardPolicy(SLOTS)
    index = filled(policy, hint=None)
    index.began(prompt_of("old 1", 4), RequestContext(request_id="x", returns=False), 1.0)
    index.ended("x", 100, 1.0)
    prompt = prompt_of("new", 3)
    index.began(prompt, RequestContext(returns=True), 1.0)
    assert [each.key for each in index.reserve_all(prompt, range(3), (0,))] == prompt
    assert index.lookup(prompt_of("old 0", 4)) == 4
    assert index.lookup(prompt_of("old 1", 4)) == 1


def leaving(index: BlockIndex, count: int) -> list[bytes]:
    """The next blocks to leave."""
    left = []
    for i in range(count):
        before = {each.key for each in index.blocks}
        key = f"new {i}".encode()
        index.began([key], RequestContext(returns=True), 60.0)
        index.publish(index.reserve_all([key], (0,), (0,)))
        left += before - {each.key for each in index.blocks}
    return left


def fill(index: BlockIndex, prompts: Sequence[tuple[list[bytes], bool | None]]) -> None:
    """Store prompts whose clients gave these hints, one a second."""
    for now, (prompt, returns) in enumerate(prompts):
        index.began(prompt, RequestContext(returns=returns), float(now))
        index.publish(index.reserve_all(prompt, range(len(prompt)), (0,)))
        index.touch(prompt)


def test_a_conversation_that_has_ended_leaves_first_though_it_was_used_last() -> None:
    """Its four blocks are the four that are immune from the policy's order otherwise."""
    chats = [prompt_of(f"chat {i}", 8) for i in range(59)]
    ended = prompt_of("ended", 4)
    slots = 8 * len(chats) + 4
    policy = HazardPolicy(slots)
    index = block_index(slots, policy)
    fill(index, [(prompt, None) for prompt in chats])
    fill(index, [(ended, False)])
    state = policy.guard_state()
    assert state is not None
    assert state.immune_blocks == 4
    assert leaving(index, 4) == ended[::-1]


def test_what_other_conversations_begin_with_outlives_those_that_have_ended() -> None:
    index = block_index(60, HazardPolicy(60))
    system = prompt_of("system", 8)
    old = [(prompt_of(f"old {i}", 8), None) for i in range(4)]
    fill(index, old + [(system + prompt_of(f"chat {i}", 4), False) for i in range(5)])
    left = leaving(index, 28)
    assert [key[:4] for key in left] == [b"chat"] * 20 + [b"old "] * 8


def test_a_request_that_was_preempted_is_the_same_request() -> None:
    once, again = HazardPolicy(SLOTS), PreemptingPolicy(SLOTS)
    assert found(once, chat_output=300) == found(again, chat_output=300)


class PreemptingPolicy:
    """Has each request begin twice."""

    def __init__(self, slots: int) -> None:
        self._policy = HazardPolicy(slots)

    def began(self, *args: Any) -> None:
        self._policy.began(*args)
        self._policy.began(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def test_a_trunk_outlives_what_prompts_add_to_it() -> None:
    node = Node(HazardPolicy(SLOTS))
    system = prompt_of("system", 20)
    for now in range(400):
        node.run(system + prompt_of(f"user {now}", 6), now, 100)
        node.run(prompt_of(f"scan {now}", 6), now + 0.5, 100)
    assert node.index.lookup(system) == len(system)


def test_blocks_are_told_apart_by_all_bytes_of_their_keys() -> None:
    policy = HazardPolicy(4)
    keys = [b"", b"a", b"a\0", b"a" * 100]
    for key in keys:
        policy.inserted(key, None)
        policy.released(key, 0)
    left = set()
    while (key := policy.victim()) is not None:
        policy.evicted(key)
        left.add(key)
    assert left == set(keys)


def test_keys_are_kept_alive_as_long_as_their_blocks() -> None:
    policy = HazardPolicy(4)
    key = b"of a block " + bytes(20)
    before = sys.getrefcount(key)
    policy.inserted(key, None)
    assert sys.getrefcount(key) == before + 1
    policy.evicted(bytes(bytearray(key)))
    assert sys.getrefcount(key) == before
    policy.inserted(key, None)
    policy.clear()
    assert sys.getrefcount(key) == before
    policy.inserted(key, None)
    del policy
    assert sys.getrefcount(key) == before


@pytest.mark.parametrize("blocks", [1, 3, 40])
def test_it_takes_104_bytes_a_block(blocks: int) -> None:
    """Prompts of so many blocks, which nobody sends twice."""
    slots = 4000
    policy = HazardPolicy(slots)
    index = block_index(slots, policy)
    empty = policy.size_in_bytes()
    for i in range(4 * slots // blocks):
        prompt = prompt_of(str(i), blocks)
        index.began(prompt, RequestContext(request_id=str(i)), float(i))
        index.publish(index.reserve_all(prompt, range(blocks), (0,)))
        index.ended(str(i), 100, float(i))
    assert len(index) == slots
    taken, learned = policy.size_in_bytes()
    assert empty[0] == taken <= 104 * slots
    assert empty[1] < learned < 1 << 20


def test_more_short_prompts_than_it_follows_leave_nonetheless() -> None:
    """Of a tier of 400 blocks it follows the segments of 100."""
    policy = HazardPolicy(400)
    index = block_index(400, policy)
    prompts = [prompt_of(str(i), 1) for i in range(1000)]
    for i, prompt in enumerate(prompts):
        index.began(prompt, RequestContext(returns=True), float(i))
        index.publish(index.reserve_all(prompt, (0,), (0,)))
        assert index.lookup(prompt)
    assert len(index) == 400
    kept = [prompt for prompt in prompts if index.lookup(prompt)]
    for prompt in kept:
        index.began(prompt, RequestContext(), 1000.0)
        index.hit(prompt, RequestContext())
    while index.lease_victim() is not None:
        kept.pop()
    assert kept == []


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda policy: HazardPolicy(0), ValueError, "capacity is 0; allowed: 1 to 16777215"),
        (lambda policy: HazardPolicy(1 << 24), ValueError, "capacity is 16777216"),
        (lambda policy: policy.held(b"unknown"), KeyError, "unknown"),
        (lambda policy: policy.released(b"unknown", 1), KeyError, "unknown"),
        (lambda policy: policy.evicted(b"unknown"), KeyError, "unknown"),
        (lambda policy: policy.evicted("text"), TypeError, "bytes"),
        (lambda policy: policy.inserted(b"a", None), ValueError, "there already"),
        (lambda policy: policy.inserted(b"c", None), ValueError, "the tier is full"),
        (lambda policy: policy.inserted(b"c"), TypeError, "1 arguments; allowed: 2 to 3"),
        (lambda policy: policy.began([1], RequestContext(), 0.0), TypeError, "bytes"),
        (lambda policy: policy.began([], None, 0.0), AttributeError, "request_id"),
        (lambda policy: policy.began([], RequestContext(), ""), TypeError, "real number"),
        (lambda policy: policy.ended(b"", 0, 0.0), TypeError, "bad argument type"),
    ],
)
def test_a_wrong_call_says_so(
    call: Callable[[Any], object], error: type[Exception], said: str
) -> None:
    policy = HazardPolicy(2)
    policy.inserted(b"a", None)
    policy.inserted(b"b", b"a")
    with pytest.raises(error, match=said):
        call(policy)


def test_the_same_trace_has_the_same_victims_in_every_process() -> None:
    """Hashes of Python's bytes differ between these."""
    said = {
        subprocess.run(
            [sys.executable, "-c", _PRINT_FOUND],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert said == {f"{found(HazardPolicy(SLOTS), chat_output=20)}\n"}


_PRINT_FOUND = """
from kernels.tests.test_hazard import SLOTS, HazardPolicy, found
print(found(HazardPolicy(SLOTS), chat_output=20))
"""
