# SPDX-License-Identifier: Apache-2.0
"""A disk's index whose victims a policy chooses."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from policy_checks import CheckedPolicy

from flexkv.eviction import POLICIES, EvictionPolicy, LRUPolicy, RequestContext
from flexkv.index.slot_index import SlotIndex, restore, slot_index

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
    slot = index.reserve(key_of(number), before(number))
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
    index = slot_index(3, policy)
    for number in (1, 2, 4):
        write(index, number)
    for number in (3, 5, 6, 7):
        index.reserve(key_of(number))
        assert key_of(1) in index or key_of(2) not in index
        assert key_of(2) in index or key_of(4) not in index


def test_no_block_makes_room_for_one_that_builds_on_it() -> None:
    index = slot_index(2, CheckedPolicy(RandomPolicy()))
    write(index, 1)
    write(index, 2)
    slot = index.reserve(key_of(5), key_of(2))
    assert slot is None, "both blocks are needed by the third"
    assert index.present([key_of(1), key_of(2)]) == [True, True]
    write(index, 3)  # instead of 2


def test_the_slot_of_a_lost_block_is_free_though_others_build_on_it() -> None:
    policy = CheckedPolicy(RandomPolicy())
    index = slot_index(3, policy)
    write(index, 1)
    write(index, 2)
    lose(index, 1)
    assert (index.free_slots, index.usable_slots) == (2, 3)
    assert policy.evictable.keys() == {key_of(2)}
    write(index, 1)
    lose(index, 2)
    assert (index.free_slots, index.usable_slots) == (2, 3)
    assert policy.evictable.keys() == {key_of(1)}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_guard_counts_blocks_whose_writes_ended_in_any_order(order: tuple[int, ...]) -> None:
    """LRU would have found them, the beginning of a prefix longest."""
    policy = POLICIES["hazard"](4)
    assert not isinstance(policy, LRUPolicy)
    index = slot_index(4, policy)
    keys = [b"%d" % number for number in range(4)]
    slots: list[int] = []
    for key, after in zip(keys, [None, *keys[:-1]], strict=True):
        slot = index.reserve(key, after, slots[-1] if slots else None)
        assert slot is not None
        slots.append(slot)
    for number in order:
        assert index.publish(slots[number], bytes(16))
    found = []
    for number in range(4):
        state = policy.guard_state()
        before = state.lru_hits
        policy.began(keys, RequestContext(), float(number))
        state = policy.guard_state()
        found.append(state.lru_hits - before)
        new = index.reserve(b"new %d" % number)
        assert new is not None
        assert index.publish(new, bytes(16))
    assert found == [4, 3, 3, 3], "each new block takes the place of the end"


@pytest.mark.parametrize("policy", ["hazard", "lru"])
def test_blocks_of_before_a_restart_leave_the_oldest_first(policy: str) -> None:
    index = slot_index(4, POLICIES[policy](4))
    generations = {"a": 7, "b": 3, "c": 9, "d": 5}
    restore(
        index,
        [
            (slot, name.encode(), bytes(16), generation, 0)
            for slot, (name, generation) in enumerate(generations.items())
        ],
    )
    gone = []
    for number in range(4):
        there = {name for name in generations if name.encode() in index}
        assert index.reserve(b"new %d" % number) is not None
        (lost,) = there - {name for name in generations if name.encode() in index}
        gone.append(lost)
    assert gone == ["b", "d", "a", "c"]


Place = tuple[int, bytes]
"""The number of an index, and the key of a block there."""


class SlotPolicyModel(RuleBasedStateMachine):
    """Random histories of a tree of blocks in indexes with one policy, some of them of before a
    restart; beside a model that knows their slots and uses."""

    indexes = 1

    def __init__(self) -> None:
        super().__init__()
        self.policy = CheckedPolicy(RandomPolicy())
        self.all = [slot_index(SLOTS) for _ in range(self.indexes)]
        self.slots: dict[Place, int] = {}  # of blocks that are ready or being written
        self.writing: dict[tuple[int, int], Place | None] = {}  # None once the block was removed
        self.leases: Counter[tuple[int, int]] = Counter()
        self.parents: dict[Place, Place | None] = {}  # as of the reservation
        self.unreported: list[list[bytes | None]] = [[] for _ in self.all]  # oldest first

    @initialize(
        restored=st.lists(st.lists(NUMBERS, unique=True, max_size=SLOTS), min_size=2, max_size=2)
    )
    def restore(self, restored: list[list[int]]) -> None:
        for at, (index, numbers) in enumerate(zip(self.all, restored, strict=False)):
            records = [(slot, key_of(n), bytes(16), slot, 0) for slot, n in enumerate(numbers)]
            restore(index, records)
            index.follow(self.policy, *self.all[: min(at, 1)])
            self.slots |= {(at, key): slot for slot, key, *_ in records}
            self.parents |= {(at, key): None for _, key, *_ in records}
            self.unreported[at] = [key for _, key, *_ in records]

    @rule(at=st.integers(0, 1), limit=st.integers(0, SLOTS))
    def report(self, at: int, limit: int) -> None:
        at %= self.indexes
        self.all[at].report_restored(limit)
        reported, self.unreported[at] = self.unreported[at][:limit], self.unreported[at][limit:]
        for key in reported:
            if key is not None and any(self.has(other, key) for other in self.others(at)):
                self.forget((at, key))

    @rule(at=st.integers(0, 1), number=NUMBERS)
    def reserve(self, at: int, number: int) -> None:
        at %= self.indexes
        key, after = key_of(number), before(number)
        if any(index.has_all([key])[0] for index in self.all):
            return
        index = self.all[at]
        parent = self.place_of(after)
        needed = {self.parents[each] for each in self.slots}
        idle = {
            each
            for each, slot in self.slots.items()
            if each[0] == at
            and each not in needed | {parent}
            and (at, slot) not in self.writing
            and not self.leases[at, slot]
        }
        had_room = index.free_slots or index.stale_blocks
        slot = index.reserve(key, after)
        lost = {each for each in self.slots if not self.has(*each)}
        assert len(lost) <= 1
        if not had_room:
            assert lost <= idle
            assert bool(lost) is (slot is not None) is bool(idle)
        for each in lost:
            self.forget(each)
        if slot is None:
            return
        busy = {*self.writing, *self.leases}
        assert (at, slot) not in busy | {(each[0], slot) for each, slot in self.slots.items()}
        self.slots[at, key] = slot
        self.writing[at, slot] = (at, key)
        self.parents[at, key] = parent

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), works=st.booleans())
    def finish_writing(self, data: st.DataObject, works: bool) -> None:
        at, slot = data.draw(st.sampled_from(sorted(self.writing)))
        place = self.writing.pop((at, slot))
        if works and self.all[at].publish(slot, bytes(16)):
            assert place is not None
            return
        self.all[at].discard(slot)
        self.all[at].release(slot)
        if place is not None:
            self.forget(place)

    @rule(at=st.integers(0, 1), number=NUMBERS)
    def lease(self, at: int, number: int) -> None:
        at %= self.indexes
        (slot,) = self.all[at].lease_all([key_of(number)])
        if slot is not None:
            assert slot == self.slots[at, key_of(number)]
            self.leases[at, slot] += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), intact=st.booleans())
    def release(self, data: st.DataObject, intact: bool) -> None:
        at, slot = data.draw(st.sampled_from(sorted(self.leases)))
        if not intact:
            self.all[at].discard(slot)
            for place in [each for each, its in self.slots.items() if (each[0], its) == (at, slot)]:
                self.forget(place)
        self.all[at].release(slot)
        self.leases -= Counter([(at, slot)])

    @rule()
    def lose_all_uses(self) -> None:
        """An error, after which nobody reads or writes."""
        for index in self.all:
            for slot in index.end_uses(()):
                index.release(slot)
        for place in [place for place in self.writing.values() if place is not None]:
            self.forget(place)
        self.writing.clear()
        self.leases.clear()

    @rule()
    def clear(self) -> None:
        for index in self.all:
            index.clear()
        for place in list(self.slots):
            self.forget(place)

    @rule(at=st.integers(0, 1), limit=st.integers(0, SLOTS))
    def sweep(self, at: int, limit: int) -> None:
        self.all[at % self.indexes].sweep(limit)

    @rule(numbers=st.lists(NUMBERS, unique=True))
    def touch(self, numbers: list[int]) -> None:
        for index in self.all:
            index.touch([key_of(number) for number in numbers])

    def others(self, at: int) -> list[int]:
        return [other for other in range(self.indexes) if other != at]

    def has(self, at: int, key: bytes) -> bool:
        return self.all[at].has_all([key])[0]

    def place_of(self, key: bytes | None) -> Place | None:
        places = [(at, key) for at in range(self.indexes) if key is not None]
        return next((each for each in places if each in self.slots), None)

    def forget(self, place: Place) -> None:
        at, slot = place[0], self.slots.pop(place)
        if (at, slot) in self.writing:
            self.writing[at, slot] = None
        self.unreported[at] = [None if key == place[1] else key for key in self.unreported[at]]
        for each, parent in self.parents.items():
            if parent == place:
                self.parents[each] = None

    @invariant()
    def the_policy_knows_what_may_leave(self) -> None:
        if any(index.stale_blocks for index in self.all):
            return
        ready = {
            (at, key)
            for (at, key), slot in self.slots.items()
            if self.writing.get((at, slot)) != (at, key) and key not in self.unreported[at]
        }
        needed = {self.parents[each] for each in self.slots}
        used = {each for each in ready if self.leases[each[0], self.slots[each]]}
        assert self.policy.held_blocks == {key for _, key in ready & (needed | used)}
        assert self.policy.evictable.keys() == {key for _, key in ready - needed - used}

    @invariant()
    def no_slot_is_lost(self) -> None:
        for at, index in enumerate(self.all):
            busy = {slot for of, slot in {*self.writing, *+self.leases} if of == at}
            assert index.usable_slots == SLOTS - len(busy)
            taken = busy | {slot for (of, _), slot in self.slots.items() if of == at}
            assert index.free_slots <= SLOTS - len(taken)
            assert index.free_slots + index.stale_blocks >= SLOTS - len(taken)

    def teardown(self) -> None:
        self.lose_all_uses()
        for index in self.all:
            index.clear()
            index.sweep(SLOTS)
        for index in self.all:
            assert index.free_slots == index.usable_slots == SLOTS
        assert not self.policy.hits


class SharedPolicyModel(SlotPolicyModel):
    indexes = 2


TestSlotPolicy = SlotPolicyModel.TestCase
TestSharedPolicy = SharedPolicyModel.TestCase
