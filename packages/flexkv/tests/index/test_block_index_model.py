# SPDX-License-Identifier: Apache-2.0
"""Random histories of an index, with each policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from policy_checks import CheckedPolicy, UseOrderPolicy

from flexkv.eviction import (
    UNKNOWN_REQUEST,
    AnyPolicy,
    LRUPolicy,
    RequestContext,
)
from flexkv.eviction.policy import hazard_policy
from flexkv.index.block_index import Block, BlockRow, BlockState, block_index
from packages.tier_blocks import ready_blocks, writing_blocks

SLOTS = 6
KEYS = st.integers(0, 9).map(lambda i: bytes([i]))


def dict_without(entries: dict[bytes, int], keys: set[bytes]) -> dict[bytes, int]:
    return {key: value for key, value in entries.items() if key not in keys}


class IndexModel(RuleBasedStateMachine):
    """Random histories of one index; what must hold at every moment is checked after each step."""

    make: ClassVar[Callable[[], AnyPolicy]]

    def __init__(self) -> None:
        super().__init__()
        made = self.make()
        self.policy = None if isinstance(made, LRUPolicy) else CheckedPolicy(made)
        self.index = block_index(SLOTS, LRUPolicy() if self.policy is None else self.policy)
        self.index.watch()
        self.reported: set[bytes] = set()
        self.pinned: set[bytes] = set()
        self.pins: list[Block] = []
        self.writing: list[Block] = []
        self.leases: list[BlockRow] = []
        self.leaving: list[Block] = []
        self.used_before: dict[Block, int] = {}
        self.abandoned: list[Block] = []

    def evictable(self) -> dict[bytes, int]:
        """The last uses of the ends that nobody uses."""
        blocks = list(self.index.blocks)
        built_on = {block.parent for block in blocks if self.holds(block)}
        return {
            block.key: block.used
            for block in blocks
            if block.state is BlockState.READY
            and not (block.leases or block in self.pins or block in built_on)
        }

    def children(self, block: Block) -> list[Block]:
        return [each for each in self.index.blocks if each.parent is block]

    def holds(self, block: Block) -> bool:
        """Whether a block keeps the one that it builds on from eviction."""
        leaves = any(block is each for each in self.leaving)
        stays = any(map(self.holds, self.children(block)))
        return not leaves or stays or any(block is each for each in self.pins)

    def with_blocks_behind(self, blocks: list[Block]) -> list[Block]:
        found = []
        for block in blocks:
            found += [block, *self.with_blocks_behind(self.children(block))]
        return found

    @rule(key=KEYS, after=st.none() | KEYS)
    def reserve(self, key: bytes, after: bytes | None) -> None:
        if key in self.index or key == after:
            return
        before, kept = self.built_on(after), ready_blocks(self.index).keys()
        oldest = self.evictable()
        oldest.pop(after or b"", None)
        is_full = self.index.free_slots == 0 and (after is None or after in self.index)
        block = self.index.reserve(key, after)
        if self.policy is None:
            left = {min(oldest, key=oldest.__getitem__)} if oldest and is_full else set()
            gone = kept - ready_blocks(self.index).keys()
            assert left <= gone <= left | {each.key for each in self.leaving}
        if block is not None:
            assert after is None or after in self.index
            self.writing.append(block)
        assert before == self.built_on(after), "nothing makes room for what builds on it"

    def built_on(self, after: bytes | None) -> list[tuple[bytes, int]]:
        """Slots of a block and of all that it builds on, as far as they are in the index."""
        index = self.index
        block = ready_blocks(index).get(after or b"") or writing_blocks(index).get(after or b"")
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
        if not works and not dropped:
            self.abandoned.append(block)
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
            lost = self.with_blocks_behind([block for block in leased if self.is_current(block)])
            self.pinned -= {block.key for block in lost}
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

    @rule()
    def lease_victim(self) -> None:
        oldest = self.evictable()
        has_room = self.index.has_room
        assert has_room is (self.index.free_slots > 0 or bool(oldest)) or self.policy is not None
        stale = self.index.stale_blocks
        victim = self.index.lease_victim()
        assert self.policy is not None or not oldest or (victim is None) is (stale > 0)
        if victim is not None:
            assert self.policy is not None or victim.used == min(oldest.values())
            self.leaving.append(victim)
            self.used_before[victim] = victim.used

    @rule(key=KEYS)
    def lease_to_leave(self, key: bytes) -> None:
        may = key in self.evictable() and not self.index.stale_blocks
        victim = self.index.lease_to_leave(key)
        assert (victim is not None) is may
        if victim is not None:
            assert victim.key == key
            self.leaving.append(victim)
            self.used_before[victim] = victim.used

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.leaving))
        del self.used_before[victim]
        was_there = self.is_current(victim)
        self.leaving.remove(victim)
        self.index.keep(victim)
        assert self.is_current(victim) is was_there

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.leaving))
        is_built_on = any(map(self.holds, self.children(victim)))
        is_used = victim.leases > 1 or victim.used > self.used_before.pop(victim)
        is_pinned = any(victim is each for each in self.pins)
        stays = self.is_current(victim) and (is_built_on or is_used or is_pinned)
        self.leaving.remove(victim)
        self.index.retire(victim)
        assert self.is_current(victim) is stays

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
        assert len(self.index.blocks) == 0
        if self.policy is not None:
            self.policy.stale.update(self.policy.hits)

    @rule(slots=st.integers(0, 2 * SLOTS))
    def sweep(self, slots: int) -> None:
        left = self.index.sweep(slots)
        assert left == self.index.stale_blocks
        assert left == 0 or slots < SLOTS

    @invariant()
    def pinned_blocks_stay(self) -> None:
        assert all(key in self.index for key in self.pinned)
        assert self.index.pinned_blocks == len(self.pinned)

    @rule()
    def changes_are_exact(self) -> None:
        assert self.index.changes is not None
        self.index.sweep(SLOTS)
        for key, ready in self.index.changes.items():
            assert (key in self.reported) is not ready
            self.reported ^= {key}
        self.index.changes.clear()
        assert self.reported == set(ready_blocks(self.index))

    @invariant()
    def exactly_the_ends_that_nobody_uses_may_be_evicted(self) -> None:
        if self.policy is not None:
            stale = self.policy.stale
            assert dict_without(self.policy.evictable, stale) == self.evictable()
            assert self.policy.hits.keys() - stale == ready_blocks(self.index).keys()

    @invariant()
    def no_slot_has_two_uses(self) -> None:
        in_use = {b: b.slot for b in self.writing}
        in_use |= {b: b.slot for leased in [*self.leases, self.leaving] for b in leased}
        in_use |= {b: b.slot for b in ready_blocks(self.index).values()}
        slots = set(in_use.values())
        assert slots <= set(range(SLOTS))
        taken = SLOTS - self.index.free_slots
        # The slots of stale blocks are free, in use or neither.
        assert len(slots) == len(in_use) <= taken <= len(in_use) + self.index.stale_blocks

    @invariant()
    def leased_blocks_stay(self) -> None:
        assert all(block.leases > 0 for leased in self.leases for block in leased)
        assert all(block.leases > 0 for block in self.leaving)

    @invariant()
    def a_prefix_leads_to_every_block(self) -> None:
        """But to those behind a block that could not be written: it may be written again."""
        for block in self.index.blocks:
            parent = block.parent
            assert (
                parent is None
                or self.is_current(parent)
                or any(parent is each for each in self.abandoned)
            )


class LRUIndexModel(IndexModel):
    make = LRUPolicy


class UseOrderIndexModel(IndexModel):
    make = UseOrderPolicy


class HazardIndexModel(IndexModel):
    make = staticmethod(lambda: hazard_policy(SLOTS))


TestIndexOfHazard = HazardIndexModel.TestCase
TestIndexOfLRU = LRUIndexModel.TestCase
TestIndexOfUseOrder = UseOrderIndexModel.TestCase
