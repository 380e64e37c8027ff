# SPDX-License-Identifier: Apache-2.0
"""A disk's index whose victims a policy chooses."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from policy_checks import CheckedPolicy

from flexkv.eviction import POLICIES, EvictionPolicy
from flexkv.tiers.disk.slot_index import SlotIndex

SLOTS = 7
NUMBERS = st.integers(1, 12)


def key_of(number: int) -> bytes:
    return b"%d" % number


def before(number: int) -> bytes | None:
    """A binary tree: the block that a block builds on."""
    return key_of(number // 2) if number > 1 else None


class RandomPolicy(EvictionPolicy):
    """Evicts any block that is not held."""

    def __init__(self) -> None:
        self._free: list[bytes] = []
        self._chance = random.Random(1)

    def held(self, key: bytes) -> None:
        self._free.remove(key)

    def released(self, key: bytes, used: int) -> None:
        self._free.append(key)

    def evicted(self, key: bytes) -> None:
        if key in self._free:
            self._free.remove(key)

    def victim(self) -> bytes | None:
        return self._chance.choice(self._free) if self._free else None


def write(index: SlotIndex, number: int) -> int:
    """The slot of a block that is ready now."""
    slot = index.reserve(key_of(number), after=before(number))
    assert slot is not None
    assert index.publish(slot, bytes(16))
    return slot


def lose(index: SlotIndex, number: int) -> None:
    """A read has found a block damaged."""
    slot = index.lease(key_of(number))
    assert slot is not None
    index.discard(slot)
    index.release(slot)


def test_a_block_stays_as_long_as_one_that_builds_on_it() -> None:
    policy = CheckedPolicy(RandomPolicy())
    index = SlotIndex(3, policy)
    for number in (1, 2, 4):
        write(index, number)
    for number in (3, 5, 6, 7):
        index.reserve(key_of(number))
        assert key_of(1) in index or key_of(2) not in index
        assert key_of(2) in index or key_of(4) not in index


def test_no_block_makes_room_for_one_that_builds_on_it() -> None:
    index = SlotIndex(2, CheckedPolicy(RandomPolicy()))
    write(index, 1)
    write(index, 2)
    slot = index.reserve(key_of(5), after=key_of(2))
    assert slot is None, "both blocks are needed by the third"
    assert index.present([key_of(1), key_of(2)]) == [True, True]
    write(index, 3)  # instead of 2


def test_the_slot_of_a_lost_block_waits_for_those_that_build_on_it() -> None:
    policy = CheckedPolicy(RandomPolicy())
    index = SlotIndex(3, policy)
    write(index, 1)
    write(index, 2)
    lose(index, 1)
    assert (index.free_slots, index.usable_slots) == (1, 2)
    write(index, 1)
    lose(index, 2)
    assert (index.free_slots, index.usable_slots) == (2, 3)
    assert policy.evictable.keys() == {key_of(1)}


@pytest.mark.parametrize("policy", ["hazard", "lru"])
def test_blocks_of_before_a_restart_leave_the_oldest_first(policy: str) -> None:
    index = SlotIndex(4, POLICIES[policy](4))
    generations = {"a": 7, "b": 3, "c": 9, "d": 5}
    index.restore(
        (slot, name.encode(), bytes(16), generation)
        for slot, (name, generation) in enumerate(generations.items())
    )
    gone = []
    for number in range(4):
        there = {name for name in generations if name.encode() in index}
        assert index.reserve(b"new %d" % number) is not None
        (lost,) = there - {name for name in generations if name.encode() in index}
        gone.append(lost)
    assert gone == ["b", "d", "a", "c"]


class SlotPolicyModel(RuleBasedStateMachine):
    """Random histories of a tree of blocks, beside a model that knows their slots and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = CheckedPolicy(RandomPolicy())
        self.index = SlotIndex(SLOTS, self.policy)
        self.slots: dict[bytes, int] = {}  # of blocks that are ready or being written
        self.writing: dict[int, bytes | None] = {}  # None once the block was removed
        self.leases: Counter[int] = Counter()
        self.parents: dict[bytes, bytes | None] = {}  # as of the reservation

    @rule(number=NUMBERS)
    def reserve(self, number: int) -> None:
        key, after = key_of(number), before(number)
        if self.index.has_all([key])[0]:
            return
        needed = {self.parents[each] for each in self.slots}
        idle = {
            each
            for each, slot in self.slots.items()
            if each not in needed | {after} and slot not in self.writing and not self.leases[slot]
        }
        had_room = self.index.free_slots or self.index.stale_blocks
        slot = self.index.reserve(key, after=after)
        lost = {each for each in self.slots if not self.index.has_all([each])[0]}
        assert len(lost) <= 1
        if not had_room:
            assert lost <= idle
            assert bool(lost) is (slot is not None) is bool(idle)
        for each in lost:
            del self.slots[each]
        if slot is None:
            return
        assert slot not in {*self.slots.values(), *self.writing, *self.leases}
        self.slots[key] = slot
        self.writing[slot] = key
        self.parents[key] = after if after in self.slots else None

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), works=st.booleans())
    def finish_writing(self, data: st.DataObject, works: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.writing)))
        key = self.writing.pop(slot)
        if works and self.index.publish(slot, bytes(16)):
            assert key is not None
            return
        self.index.discard(slot)
        self.index.release(slot)
        if key is not None:
            self.forget(key)

    @rule(number=NUMBERS)
    def lease(self, number: int) -> None:
        (slot,) = self.index.lease_all([key_of(number)])
        if slot is not None:
            assert slot == self.slots[key_of(number)]
            self.leases[slot] += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), intact=st.booleans())
    def release(self, data: st.DataObject, intact: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.leases)))
        if not intact:
            self.index.discard(slot)
            for key in [key for key, place in self.slots.items() if place == slot]:
                self.forget(key)
        self.index.release(slot)
        self.leases -= Counter([slot])

    @rule()
    def lose_all_uses(self) -> None:
        """An error, after which nobody reads or writes."""
        for slot in self.index.end_uses(()):
            self.index.release(slot)
        for key in [key for key in self.writing.values() if key is not None]:
            self.forget(key)
        self.writing.clear()
        self.leases.clear()

    @rule()
    def clear(self) -> None:
        self.index.clear()
        for key in list(self.slots):
            self.forget(key)

    @rule(limit=st.integers(0, SLOTS))
    def sweep(self, limit: int) -> None:
        self.index.sweep(limit)

    @rule(numbers=st.lists(NUMBERS, unique=True))
    def touch(self, numbers: list[int]) -> None:
        self.index.touch([key_of(number) for number in numbers])

    def forget(self, key: bytes) -> None:
        slot = self.slots.pop(key)
        if slot in self.writing:
            self.writing[slot] = None
        for each, parent in self.parents.items():
            if parent == key:
                self.parents[each] = None

    @invariant()
    def the_policy_knows_what_may_leave(self) -> None:
        if self.index.stale_blocks:
            return
        ready = {key for key, slot in self.slots.items() if self.writing.get(slot) != key}
        needed = {self.parents[key] for key in self.slots}
        used = {key for key in ready if self.leases[self.slots[key]]}
        assert self.policy.held_blocks == ready & (needed | used)
        assert self.policy.evictable.keys() == ready - needed - used

    @invariant()
    def no_slot_is_lost(self) -> None:
        index, busy = self.index, {*self.writing, *+self.leases}
        waiting = SLOTS - len(busy) - index.usable_slots
        taken = {*self.slots.values(), *busy}
        assert index.free_slots <= SLOTS - len(taken) - waiting
        assert index.free_slots + index.stale_blocks >= SLOTS - len(taken) - waiting

    def teardown(self) -> None:
        self.lose_all_uses()
        self.index.clear()
        self.index.sweep(SLOTS)
        assert self.index.free_slots == self.index.usable_slots == SLOTS
        assert not self.policy.hits


TestSlotPolicy = SlotPolicyModel.TestCase
