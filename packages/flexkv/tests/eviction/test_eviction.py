# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from policy_checks import CheckedPolicy

from flexkv.eviction import (
    POLICIES,
    UNKNOWN_REQUEST,
    ARCPolicy,
    EvictionPolicy,
    RequestContext,
    S3FIFOPolicy,
)
from flexkv.eviction.hazard import hazard_policy
from flexkv.types.errors import ConfigError

KEYS = st.integers(0, 11).map(lambda i: bytes([i]))


class PolicyModel(RuleBasedStateMachine):
    """Random lives of blocks. `CheckedPolicy` says that a victim is evictable, and that there is
    one whenever a block is."""

    make: ClassVar[Callable[[], EvictionPolicy]]

    def __init__(self) -> None:
        super().__init__()
        self.policy = CheckedPolicy(self.make())
        self.uses = 0

    def use(self) -> int:
        self.uses += 1
        return self.uses

    @rule(key=KEYS, released=st.booleans())
    def insert(self, key: bytes, released: bool) -> None:
        if key not in self.policy.hits:
            self.policy.inserted(key, None)
            if released:
                self.policy.released(key, self.use())

    @precondition(lambda self: self.policy.hits)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.policy.hits)))
        self.policy.hit(key, self.use(), UNKNOWN_REQUEST)

    @precondition(lambda self: self.policy.evictable)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.policy.evictable)))
        self.policy.touched(key, self.use())

    @precondition(lambda self: self.policy.evictable)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        self.policy.held(data.draw(st.sampled_from(sorted(self.policy.evictable))))

    @precondition(lambda self: self.policy.held_blocks)
    @rule(data=st.data(), age=st.integers(0, 9))
    def release(self, data: st.DataObject, age: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.policy.held_blocks)))
        self.policy.released(key, self.use() - age)

    @precondition(lambda self: self.policy.hits)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.policy.evicted(data.draw(st.sampled_from(sorted(self.policy.hits))))

    @rule()
    def evict(self) -> None:
        victim = self.policy.victim()
        if victim is not None:
            self.policy.evicted(victim)

    @rule()
    def clear(self) -> None:
        self.policy.clear()

    @rule(length=st.integers(1, 4), first=KEYS, request_id=st.sampled_from(["", "r", "s"]))
    def begin(self, length: int, first: bytes, request_id: str) -> None:
        keys = [bytes([(first[0] + i) % 12]) for i in range(length)]
        there = [key in self.policy.hits for key in keys]
        ready = length if all(there) else there.index(False)
        context = RequestContext(request_id=request_id)
        self.policy.began(keys, ready, context, self.use() * 1.5)

    @rule(request_id=st.sampled_from(["r", "s", "t"]), tokens=st.integers(0, 300))
    def end(self, request_id: str, tokens: int) -> None:
        self.policy.ended(request_id, tokens, self.use() * 1.5)

    @invariant()
    def a_victim_stays_until_it_is_evicted(self) -> None:
        victim = self.policy.victim()
        assert self.policy.victim() == victim


class S3FIFOModel(PolicyModel):
    make = S3FIFOPolicy

    @property
    def s3fifo(self) -> S3FIFOPolicy:
        policy = self.policy.policy
        assert isinstance(policy, S3FIFOPolicy)
        return policy

    @invariant()
    def every_block_is_in_one_queue(self) -> None:
        policy = self.s3fifo
        queued = [*policy._small.order, *policy._main.order]
        aside = [key for key, block in policy._blocks.items() if block.aside]
        assert sorted(queued + aside) == sorted(self.policy.hits)
        assert policy._small.blocks + policy._main.blocks == len(self.policy.hits)
        assert self.policy.held_blocks >= set(aside)
        assert policy._ghosts.keys().isdisjoint(policy._blocks)
        assert len(policy._ghosts) <= policy._capacity

    @invariant()
    def hits_are_capped(self) -> None:
        policy = self.s3fifo
        for key, block in policy._blocks.items():
            assert block.hits <= min(3, len(self.policy.hits[key]))


class ARCModel(PolicyModel):
    make = ARCPolicy

    @property
    def arc(self) -> ARCPolicy:
        policy = self.policy.policy
        assert isinstance(policy, ARCPolicy)
        return policy

    @invariant()
    def every_block_is_in_one_list(self) -> None:
        policy = self.arc
        once, again = policy._once, policy._again
        listed = [*once.order, *again.order]
        assert len(listed) == len(set(listed))
        assert self.policy.hits.keys() - self.policy.held_blocks <= set(listed)
        assert once.blocks + again.blocks == len(self.policy.hits)
        assert not (once.ghosts.keys() | again.ghosts.keys()) & self.policy.hits.keys()
        assert 0 <= policy._goal <= policy._capacity
        assert len(once.ghosts) + len(again.ghosts) <= 2 * policy._capacity

    @invariant()
    def blocks_that_were_hit_are_in_the_second_list(self) -> None:
        for key, hits in self.policy.hits.items():
            assert self.arc._list[key] is self.arc._again or not hits


class HazardModel(PolicyModel):
    make = staticmethod(lambda: hazard_policy(12))


TestARC = ARCModel.TestCase
TestHazard = HazardModel.TestCase
TestS3FIFO = S3FIFOModel.TestCase


MAKERS: dict[str, Callable[[int], EvictionPolicy]] = {
    "s3fifo": lambda slots: S3FIFOPolicy(),
    "arc": lambda slots: ARCPolicy(),
    "hazard": hazard_policy,
}


def insert(policy: EvictionPolicy, *keys: bytes, used: int = 0) -> None:
    for age, key in enumerate(keys):
        policy.inserted(key, None)
        policy.released(key, used + len(keys) - age)


def hit(policy: EvictionPolicy, *keys: bytes, times: int = 1) -> None:
    for _ in range(times):
        for key in keys:
            policy.hit(key, 0, RequestContext())


def evict(policy: EvictionPolicy, blocks: int) -> list[bytes]:
    """The next victims, in their order."""
    left = []
    for _ in range(blocks):
        key = policy.victim()
        assert key is not None
        policy.evicted(key)
        left.append(key)
    return left


def names(text: str) -> list[bytes]:
    return [each.encode() for each in text]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_victims_are_exactly_the_blocks_that_are_not_held(
    make: Callable[[int], EvictionPolicy],
) -> None:
    policy = make(50)
    keys = {bytes([i]) for i in range(50)}
    for key in sorted(keys):
        policy.inserted(key, None)
        if key[0] % 7:
            policy.released(key, key[0])
    for i in range(0, 50, 3):
        policy.hit(bytes([i]), 100 + i, UNKNOWN_REQUEST)
    seen = set()
    while (key := policy.victim()) is not None:
        policy.evicted(key)
        seen.add(key)
    assert seen == {key for key in keys if key[0] % 7}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_block_takes_a_bounded_number_of_bytes(make: Callable[[int], EvictionPolicy]) -> None:
    """Prompts of ten blocks that nobody sends twice. The key takes 65 of these bytes, keys of
    ghosts as much again."""
    blocks = 5_000
    policy = make(blocks)
    gc.collect()
    tracemalloc.start()
    try:
        for i in range(0, 20 * blocks, 10):
            prompt = [os.urandom(32) for _ in range(10)]
            policy.began(prompt, 0, RequestContext(request_id="r"), float(i))
            if i >= blocks:
                evict(policy, 10)
            insert(policy, *prompt, used=i)
            policy.ended("r", 100, float(i))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 700 * blocks


def test_blocks_that_no_other_request_finds_leave_in_the_order_in_which_they_came() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    assert evict(policy, 10) == names("abcdefghij")


def test_blocks_that_were_hit_twice_outlive_a_scan() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    hit(policy, *names("abc"), times=2)
    hit(policy, *names("d"))
    assert evict(policy, 7) == names("defghij")
    insert(policy, *names("klmnopq"))
    assert evict(policy, 7) == names("klmnopq")


def test_hits_are_counted_up_to_three() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghijklmnopqrst"))
    hit(policy, *names("ab"), times=2)
    evict(policy, 17)
    hit(policy, b"a", times=9)
    hit(policy, b"b", times=3)
    assert evict(policy, 2) == names("ab"), "each goes around three times"


def test_hits_before_the_main_queue_do_not_count_there() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghijklmnopqrst"))
    hit(policy, b"a", times=3)
    hit(policy, b"b", times=2)
    evict(policy, 17)
    assert evict(policy, 2) == names("ab")


def test_a_block_that_was_hit_in_the_main_queue_goes_around_again() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghijklmnopqrst"))
    hit(policy, *names("abc"), times=2)
    evict(policy, 16)
    hit(policy, b"a")
    hit(policy, b"b", times=2)
    assert evict(policy, 3) == names("cab")


def test_a_block_that_comes_again_soon_enters_the_main_queue() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    evict(policy, 2)
    insert(policy, *names("bk"))
    assert evict(policy, 9) == names("cdefghijk")
    assert policy.victim() == b"b"


def test_ghosts_are_as_many_as_the_main_queue_has_blocks() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    evict(policy, 10)
    insert(policy, *names("ba"))
    assert evict(policy, 2) == names("ab"), "only the first was forgotten"


def test_the_small_queue_has_a_tenth() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghijklmnopqrst"))
    hit(policy, *names("abcdefghijklmnopqr"), times=2)
    assert evict(policy, 2) == names("sa"), "one of twenty is less than a tenth"
    insert(policy, b"u")
    assert evict(policy, 2) == names("tb")


def test_a_lease_resets_nothing() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    hit(policy, b"a")
    policy.held(b"a")
    hit(policy, b"a")
    policy.released(b"a", 99)
    assert evict(policy, 9) == names("bcdefghij")


def test_a_block_that_is_held_at_its_turn_is_the_next_once_it_is_released() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    policy.held(b"a")
    policy.held(b"b")
    assert evict(policy, 1) == [b"c"]
    policy.released(b"b", 99)
    assert evict(policy, 2) == names("bd")
    policy.released(b"a", 99)
    assert evict(policy, 2) == names("ae")


def test_a_held_block_that_was_hit_is_promoted() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    policy.held(b"a")
    hit(policy, b"a", times=2)
    evict(policy, 3)
    policy.released(b"a", 99)
    assert evict(policy, 7) == [*names("efghij"), b"a"]


def test_a_cleared_policy_knows_no_ghosts() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    evict(policy, 2)
    policy.clear()
    assert policy.victim() is None
    insert(policy, *names("bcdefghijk"))
    assert evict(policy, 1) == [b"b"]


def test_a_tier_of_too_many_blocks_is_named() -> None:
    with pytest.raises(ConfigError, match="16777216; allowed: 1 to 16777215 blocks; or"):
        POLICIES["hazard"](1 << 24)
