# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexkv.eviction import POLICIES, EvictionPolicy, LRUPolicy

USES = st.integers(0, 30)
KEYS = st.binary(min_size=1, max_size=1)


class LRUModel(RuleBasedStateMachine):
    """LRU against the obvious slow implementation: when each key was used."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LRUPolicy()
        self.used: dict[bytes, int] = {}

    @rule(key=KEYS, use=USES)
    def add_or_touch(self, key: bytes, use: int) -> None:
        if key in self.used:
            self.used[key] += use
            self.policy.touch(key, self.used[key])
        else:
            self.used[key] = use
            self.policy.add(key, use)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.used)))
        del self.used[key]
        self.policy.remove(key)

    @rule()
    def clear(self) -> None:
        self.used.clear()
        self.policy.clear()

    @invariant()
    def victim_is_the_oldest(self) -> None:
        victim = self.policy.victim()
        assert (victim is None) is (not self.used)
        if victim is not None:
            assert self.used[victim] == min(self.used.values())


TestLRU = LRUModel.TestCase


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_victims_are_exactly_the_keys_that_were_added(make: Callable[[], EvictionPolicy]) -> None:
    policy = make()
    keys = {bytes([i]) for i in range(50)}
    for key in sorted(keys):
        policy.add(key, key[0])
    for i in range(0, 50, 3):
        policy.touch(bytes([i]), 100 + i)
    seen = set()
    while (key := policy.victim()) is not None:
        policy.remove(key)
        seen.add(key)
    assert seen == keys


def test_blocks_that_are_leased_over_and_over_take_no_more_memory() -> None:
    policy = LRUPolicy()
    for use in range(50_000):
        policy.add(b"a", use)
        policy.remove(b"a")
    assert len(policy._heap) < 10_000
    policy.add(b"b", 1)
    assert policy.victim() == b"b"
