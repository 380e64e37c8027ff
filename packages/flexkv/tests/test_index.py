# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from policy_checks import CheckedPolicy

from flexkv.eviction import (
    UNKNOWN_REQUEST,
    ARCPolicy,
    EvictionPolicy,
    LRUPolicy,
    RequestContext,
    S3FIFOPolicy,
)
from flexkv.eviction.hazard import hazard_policy
from flexkv.index import Block, BlockIndex, BlockState

SLOTS = 6
NUMBERS = count()
KEYS = st.integers(0, 9).map(lambda i: bytes([i]))


def ready_index(slots: int, keys: list[bytes]) -> BlockIndex:
    """An index that has the blocks of a prefix."""
    index = BlockIndex(slots, LRUPolicy())
    add(index, *keys)
    return index


def add(index: BlockIndex, *keys: bytes, after: bytes | None = None) -> None:
    """Blocks of a prefix that goes on after a block, or begins."""
    blocks = []
    for key in keys:
        block = index.reserve(key, after)
        assert block is not None
        blocks.append(block)
        after = key
    index.publish(blocks)


def ready(index: BlockIndex) -> set[bytes]:
    return {key for key in map(bytes, ([i] for i in range(256))) if index.lookup([key])}


def evict(index: BlockIndex, blocks: int) -> list[bytes]:
    """The blocks that leave, in their order, to make room for others that do not come."""
    left = []
    for _ in range(blocks):
        before = ready(index)
        block = index.reserve(b"new %d" % next(NUMBERS), None)
        assert block is not None
        left += sorted(before - ready(index))
    return left


def test_only_complete_blocks_are_found() -> None:
    index = BlockIndex(4, LRUPolicy())
    block = index.reserve(b"a", None)
    assert block is not None
    assert index.lookup([b"a"]) == 0
    assert b"a" in index
    assert index.lease([b"a"]) is None
    index.publish([block])
    assert index.lookup([b"a", b"b"]) == 1


def test_a_hit_ends_at_the_first_gap() -> None:
    index = ready_index(4, [b"a", b"c"])
    assert index.lookup([b"a", b"b", b"c"]) == 1


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    index = ready_index(3, [b"a", b"b", b"c"])
    assert index.reserve(b"x", None) is not None
    assert index.lookup([b"a", b"b", b"c"]) == 2


def test_leased_blocks_are_not_evicted() -> None:
    index = ready_index(2, [b"a", b"b"])
    leased = index.lease([b"a", b"b"])
    assert leased is not None
    assert index.reserve(b"x", None) is None
    index.release(leased)
    assert index.reserve(b"x", None) is not None


def test_a_use_is_a_hit_if_a_request_was_scheduled() -> None:
    policy = CheckedPolicy(LRUPolicy())
    index = BlockIndex(3, policy)
    add(index, b"a", b"b")
    first, second = RequestContext(90, 60), RequestContext(70, 30)
    index.hit([b"a", b"b", b"absent"], first)
    leased = index.lease([b"a", b"b"])
    index.hit([b"a"], second)
    assert leased is not None
    index.release(leased)
    index.touch([b"a", b"b"])
    assert policy.hits == {b"a": [first, second], b"b": [first]}


def test_a_prefix_does_not_evict_itself() -> None:
    index = ready_index(2, [b"a", b"b"])
    assert index.reserve(b"c", b"b") is None
    assert index.lookup([b"a", b"b"]) == 2
    assert index.reserve(b"x", None) is not None, "another one may have its slot"


def test_a_block_stays_while_one_that_builds_on_it_is_being_written() -> None:
    index = ready_index(3, [b"a", b"b"])
    block = index.reserve(b"c", b"b")
    assert block is not None
    assert index.reserve(b"x", None) is None
    index.abandon([block])
    assert evict(index, 3) == [b"b", b"a"]


def test_nothing_is_stored_behind_a_gap() -> None:
    index = ready_index(4, [b"a"])
    assert index.reserve(b"c", b"b") is None
    assert index.free_slots == 3


def test_prefixes_leave_whole_the_one_used_longest_ago_first() -> None:
    index = ready_index(6, [b"a", b"b", b"c"])
    add(index, b"p", b"q", b"r")
    index.touch([b"a", b"b", b"c"])
    assert evict(index, 6) == [b"r", b"q", b"p", b"c", b"b", b"a"]


def test_the_use_of_an_end_counts_for_all_that_it_builds_on() -> None:
    index = ready_index(5, [b"a", b"b"])
    add(index, b"p", b"q")
    add(index, b"c", after=b"b")
    assert evict(index, 5) == [b"q", b"p", b"c", b"b", b"a"]


def test_a_beginning_outlives_what_was_used_before_an_end_that_has_left() -> None:
    index = ready_index(4, [b"a", b"b"])
    add(index, b"p")
    add(index, b"c", after=b"b")
    leased = index.lease([b"p"])
    assert leased is not None
    assert evict(index, 1) == [b"c"]
    index.release_unused(leased)
    assert evict(index, 3) == [b"p", b"b", b"a"]


def test_a_beginning_outlives_the_end_that_was_used_before_it() -> None:
    index = ready_index(5, [b"a", b"b", b"c"])
    add(index, b"p", b"q")
    index.touch([b"a"])
    assert evict(index, 5) == [b"c", b"b", b"q", b"p", b"a"]


def test_a_beginning_that_two_prefixes_share_stays_until_both_have_left() -> None:
    index = ready_index(4, [b"a", b"b"])
    add(index, b"c", after=b"a")
    add(index, b"x")
    assert evict(index, 4) == [b"b", b"c", b"a", b"x"]


def test_what_leaves_makes_its_predecessor_the_next_to_leave() -> None:
    index = ready_index(3, [b"a", b"b", b"c"])
    leaving = [index.lease_victim() for _ in range(3)]
    assert [block.key for block in leaving if block] == [b"c", b"b", b"a"]
    assert index.lease_victim() is None
    used = index.lease([b"a", b"b", b"c"])
    assert used is not None
    for block in leaving:
        assert block is not None
        index.retire(block)
    index.release(used)
    assert index.lookup([b"a", b"b", b"c"]) == 3, "all were used again"
    assert evict(index, 3) == [b"c", b"b", b"a"]


def test_a_block_that_stays_after_all_protects_what_it_builds_on() -> None:
    index = ready_index(2, [b"a", b"b"])
    leaving = index.lease_victim()
    leased = index.lease([b"b"])
    assert leaving is not None
    assert leased is not None
    index.retire(leaving)
    assert index.reserve(b"x", None) is None
    index.release(leased)
    assert evict(index, 2) == [b"b", b"a"]


def test_an_unreadable_block_is_found_no_more_and_its_slot_returns() -> None:
    index = ready_index(1, [b"a"])
    leased = index.lease([b"a"])
    assert leased is not None
    index.drop(leased)
    assert index.lookup([b"a"]) == 0
    assert index.free_slots == 0
    index.release(leased)
    assert index.free_slots == 1


def test_a_pinned_block_is_not_evicted_until_its_last_pin_ends() -> None:
    index = ready_index(3, [b"a", b"b", b"c"])
    leased = index.lease([b"b"])
    assert leased is not None
    pins = [index.pin(b"b"), index.pin(b"b")]
    assert index.pin(b"absent") is None
    index.release(leased)
    assert index.pinned_blocks == 1
    assert evict(index, 1) == [b"c"]
    for pin in pins:
        assert index.reserve(b"x", None) is None, "what it builds on stays, too"
        assert pin is not None
        index.unpin(pin)
    assert index.pinned_blocks == 0
    assert evict(index, 2) == [b"b", b"a"]


def test_a_pin_protects_a_block_that_nobody_leases() -> None:
    index = ready_index(2, [b"a"])
    add(index, b"b")
    assert index.pin(b"a") is not None
    assert evict(index, 1) == [b"b"]
    assert index.reserve(b"x", None) is None


def test_a_block_may_be_pinned_before_it_is_ready() -> None:
    index = BlockIndex(1, LRUPolicy())
    block = index.reserve(b"a", None)
    assert block is not None
    assert index.pin(b"a") is block
    index.publish([block])
    assert index.reserve(b"x", None) is None


def test_a_pinned_block_that_proves_unreadable_gives_its_pins_back() -> None:
    index = ready_index(1, [b"a"])
    pinned = index.pin(b"a")
    leased = index.lease([b"a"])
    assert leased is not None
    assert pinned is not None
    index.drop(leased)
    index.release(leased)
    assert index.pinned_blocks == 0
    assert index.free_slots == 1
    add(index, b"a")
    index.pin(b"a")
    index.unpin(pinned)
    assert index.pinned_blocks == 1, "that was another block"


def test_clear_waits_for_writers_and_readers() -> None:
    index = ready_index(3, [b"a", b"b"])
    leased = index.lease([b"a"])
    writing = index.reserve(b"c", None)
    assert leased is not None
    assert writing is not None
    index.clear()
    assert index.lookup([b"a"]) == index.lookup([b"b"]) == 0
    assert index.free_slots == 1
    index.publish([writing])
    assert index.lookup([b"c"]) == 0
    index.release(leased)
    assert index.free_slots == 3


class IndexModel(RuleBasedStateMachine):
    """Random histories of one index; what must hold at every moment is checked after each step."""

    make: ClassVar[Callable[[], EvictionPolicy]] = LRUPolicy

    def __init__(self) -> None:
        super().__init__()
        self.policy = CheckedPolicy(self.make())
        self.index: Any = BlockIndex(SLOTS, self.policy)
        self.index.watch()
        self.told: set[bytes] = set()
        self.pinned: set[bytes] = set()
        self.pins: list[Block] = []
        self.writing: list[Block] = []
        self.leases: list[list[Block]] = []

    @rule(key=KEYS, after=st.none() | KEYS)
    def reserve(self, key: bytes, after: bytes | None) -> None:
        if key in self.index or key == after:
            return
        before = self.built_on(after)
        block = self.index.reserve(key, after)
        if block is not None:
            assert after is None or after in self.index
            self.writing.append(block)
        assert before == self.built_on(after), "nothing makes room for what builds on it"

    def built_on(self, after: bytes | None) -> list[tuple[bytes, int]]:
        """Slots of a block and of all that it builds on, as far as they are in the index."""
        index = self.index
        block = index._ready.get(after or b"") or index._writing.get(after or b"")
        found = []
        while block is not None and block.state is not BlockState.DROPPED:
            found.append((block.key, block.slot))
            block = block.parent
        return found

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), works=st.booleans())
    def finish_writing(self, data: st.DataObject, works: bool) -> None:
        block = data.draw(st.sampled_from(self.writing))
        self.writing.remove(block)
        dropped = block.state is BlockState.DROPPED
        if not works and not dropped:
            self.pinned.discard(block.key)
        (self.index.publish if works else self.index.abandon)([block])
        if dropped or not works:
            assert block.state is BlockState.DROPPED
        else:
            assert self.index.lookup([block.key]) == 1

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3, unique=True))
    def lease(self, keys: list[bytes]) -> None:
        found = self.index.lookup(keys) == len(keys)
        leased = self.index.lease(keys)
        assert (leased is not None) is found
        if leased is not None:
            self.leases.append(leased)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), readable=st.booleans())
    def release(self, data: st.DataObject, readable: bool) -> None:
        position = data.draw(st.integers(0, len(self.leases) - 1))
        leased = self.leases.pop(position)
        if not readable:
            self.pinned -= {block.key for block in leased if self.is_current(block)}
            self.index.drop(leased)
        self.index.release(leased)

    def is_current(self, block: Block) -> bool:
        return block.state is not BlockState.DROPPED

    @rule(key=KEYS)
    def pin(self, key: bytes) -> None:
        block = self.index.pin(key)
        assert (block is None) is (key not in self.index)
        if block is not None:
            self.pins.append(block)
            self.pinned.add(key)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        block = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.index.unpin(block)
        if self.is_current(block) and all(each is not block for each in self.pins):
            self.pinned.discard(block.key)

    @rule(used=st.booleans())
    def make_room(self, used: bool) -> None:
        victim = self.index.lease_victim()
        if victim is None:
            return
        lease = self.index.lease([victim.key]) if used else None
        self.index.retire(victim)
        if lease is not None:
            self.leases.append(lease)

    @rule(keys=st.lists(KEYS, unique=True))
    def touch(self, keys: list[bytes]) -> None:
        self.index.touch(keys)

    @rule(keys=st.lists(KEYS, unique=True))
    def hit(self, keys: list[bytes]) -> None:
        self.index.hit(keys, UNKNOWN_REQUEST)

    @rule(keys=st.lists(KEYS, unique=True), name=st.sampled_from("ab"), ends=st.booleans())
    def begin(self, keys: list[bytes], name: str, ends: bool) -> None:
        self.seconds = getattr(self, "seconds", 0.0) + 1
        self.index.began(keys, RequestContext(request_id=name), self.seconds)
        if ends:
            self.index.ended(name, 100, self.seconds)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.pinned.clear()
        assert len(self.index) == 0

    @invariant()
    def pinned_blocks_stay(self) -> None:
        assert all(key in self.index for key in self.pinned)
        assert self.index.pinned_blocks == len(self.pinned)

    @rule()
    def every_change_is_noted(self) -> None:
        assert self.index.changed is not None
        for key in self.index.changed:
            (self.told.add if self.index.lookup([key]) else self.told.discard)(key)
        self.index.changed.clear()
        assert self.told == set(self.index._ready)

    @invariant()
    def exactly_the_ends_that_nobody_uses_may_be_evicted(self) -> None:
        index = self.index
        blocks = [*index._ready.values(), *index._writing.values()]
        built_on = {id(block.parent) for block in blocks}
        evictable = {
            key: block.used
            for key, block in index._ready.items()
            if not (block.leases or block.pins or id(block) in built_on)
        }
        assert self.policy.evictable == evictable
        assert self.policy.hits.keys() == index._ready.keys()

    @invariant()
    def no_slot_has_two_uses(self) -> None:
        free = self.index._free
        in_use = {id(b): b.slot for b in self.writing}
        in_use |= {id(b): b.slot for leased in self.leases for b in leased}
        in_use |= {id(b): b.slot for b in self.index._ready.values()}
        slots = [*free, *in_use.values()]
        assert sorted(slots) == list(range(SLOTS))

    @invariant()
    def leased_blocks_stay_where_they_are(self) -> None:
        for leased in self.leases:
            for block in leased:
                assert block.leases > 0
                assert block.slot not in self.index._free


class S3FIFOIndexModel(IndexModel):
    make = S3FIFOPolicy


class ARCIndexModel(IndexModel):
    make = ARCPolicy


class HazardIndexModel(IndexModel):
    make = staticmethod(lambda: hazard_policy(SLOTS))


TestIndexOfARC = ARCIndexModel.TestCase
TestIndexOfHazard = HazardIndexModel.TestCase
TestIndex = IndexModel.TestCase
TestIndexOfS3FIFO = S3FIFOIndexModel.TestCase
