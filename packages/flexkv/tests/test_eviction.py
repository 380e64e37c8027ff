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
    EvictionPolicy,
    LRUPolicy,
)

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
            self.policy.inserted(key)
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

    @invariant()
    def a_victim_stays_until_it_is_evicted(self) -> None:
        victim = self.policy.victim()
        assert self.policy.victim() == victim


class LRUModel(PolicyModel):
    make = LRUPolicy

    @invariant()
    def victim_is_the_oldest(self) -> None:
        victim = self.policy.victim()
        if victim is not None:
            used = self.policy.evictable
            assert used[victim] == min(used.values())


TestLRU = LRUModel.TestCase


def insert(policy: EvictionPolicy, *keys: bytes, used: int = 0) -> None:
    for age, key in enumerate(keys):
        policy.inserted(key)
        policy.released(key, used + len(keys) - age)


def evict(policy: EvictionPolicy, blocks: int) -> list[bytes]:
    """The next victims, in their order."""
    left = []
    for _ in range(blocks):
        key = policy.victim()
        assert key is not None
        policy.evicted(key)
        left.append(key)
    return left


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_victims_are_exactly_the_blocks_that_are_not_held(
    make: Callable[[], EvictionPolicy],
) -> None:
    policy = make()
    keys = {bytes([i]) for i in range(50)}
    for key in sorted(keys):
        policy.inserted(key)
        if key[0] % 7:
            policy.released(key, key[0])
    for i in range(0, 50, 3):
        policy.hit(bytes([i]), 100 + i, UNKNOWN_REQUEST)
    seen = set()
    while (key := policy.victim()) is not None:
        policy.evicted(key)
        seen.add(key)
    assert seen == {key for key in keys if key[0] % 7}


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_block_takes_a_bounded_number_of_bytes(make: Callable[[], EvictionPolicy]) -> None:
    """At most 266 bytes of 200,000 blocks, of which the key takes 65."""
    blocks = 5_000
    policy = make()
    gc.collect()
    tracemalloc.start()
    try:
        for i in range(8 * blocks):
            if i >= blocks:
                evict(policy, 1)
            insert(policy, os.urandom(32), used=i)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 700 * blocks


def test_blocks_that_are_leased_over_and_over_take_no_more_memory() -> None:
    policy = LRUPolicy()
    policy.inserted(b"a")
    for use in range(50_000):
        policy.released(b"a", use)
        policy.held(b"a")
    assert len(policy._heap) < 10_000
    insert(policy, b"b")
    assert policy.victim() == b"b"
