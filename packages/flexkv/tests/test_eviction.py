# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexkv.eviction import POLICIES, EvictionPolicy, LRUPolicy


class LRUModel(RuleBasedStateMachine):
    """LRU against the obvious slow implementation: a list, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LRUPolicy()
        self.order: list[bytes] = []

    @rule(key=st.binary(min_size=1, max_size=1))
    def add_or_touch(self, key: bytes) -> None:
        if key in self.order:
            self.order.remove(key)
            self.policy.touch(key)
        else:
            self.policy.add(key)
        self.order.append(key)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.order))
        self.order.remove(key)
        self.policy.remove(key)

    @rule()
    def clear(self) -> None:
        self.order.clear()
        self.policy.clear()

    @invariant()
    def victim_is_the_oldest(self) -> None:
        assert self.policy.victim() == (self.order[0] if self.order else None)


TestLRU = LRUModel.TestCase


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_victims_are_exactly_the_keys_that_were_added(make: Callable[[], EvictionPolicy]) -> None:
    policy = make()
    keys = {bytes([i]) for i in range(50)}
    for key in sorted(keys):
        policy.add(key)
    for i in range(0, 50, 3):
        policy.touch(bytes([i]))
    seen = set()
    while (key := policy.victim()) is not None:
        policy.remove(key)
        seen.add(key)
    assert seen == keys
