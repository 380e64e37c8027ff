# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import mmap
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexkv.index.slot_index import SlotIndex, drain_changes, restore, slot_index

SLOTS = 6
KEYS = st.integers(0, 9).map(lambda number: bytes([number]))
Record = tuple[int, bytes, bytes, int, int]


def checksum_for(key: bytes, slot: int) -> bytes:
    return (key * 8)[:8] + bytes([slot]) * 8


def filled(slots: int, keys: list[bytes]) -> SlotIndex:
    index = slot_index(slots)
    for key in keys:
        slot = index.reserve(key)
        assert slot is not None
        assert index.publish(slot, checksum_for(key, slot))
    return index


def reserve_all(
    index: SlotIndex, keys: list[bytes], after: list[bytes | None] | None = None
) -> list[int]:
    """Slots for blocks of a prefix, up to the first that gets none."""
    slots: list[int] = []
    for key, before in zip(keys, after or [None] * len(keys), strict=True):
        slot = index.reserve(key, before, slots[-1] if slots else None)
        if slot is None:
            break
        slots.append(slot)
    return slots


def eviction_order(index: SlotIndex, keys: set[bytes]) -> list[bytes]:
    """`keys`, the ready ones, in the order in which new blocks push them out."""
    order = []
    for number in range(len(keys) + index.free_slots):
        assert index.reserve(b"new %d" % number) is not None
        gone = keys - set(order) - {key for key in keys if key in index}
        assert len(gone) <= 1
        order.extend(gone)
    return order


def test_a_block_is_found_once_it_is_written() -> None:
    index = slot_index(2)
    slot = index.reserve(b"a")
    assert slot is not None
    assert b"a" not in index
    assert index.has_all([b"a"]) == [True]
    assert index.lease(b"a") is None
    assert index.publish(slot, bytes(16))
    assert b"a" in index
    assert index.lease(b"a") == slot


def test_the_end_of_a_prefix_leaves_before_its_beginning() -> None:
    index = filled(3, [b"c", b"a", b"b"])
    index.touch([b"a", b"b", b"c"])
    assert eviction_order(index, {b"a", b"b", b"c"}) == [b"c", b"b", b"a"]


def test_a_block_that_is_being_written_counts_as_used() -> None:
    index = slot_index(3)
    first = index.reserve(b"a")
    index.publish(reserve_all(index, [b"b", b"c"])[0], bytes(16))
    index.touch([b"a", b"b", b"c"])
    assert first is not None
    index.publish(first, bytes(16))
    assert eviction_order(index, {b"a", b"b"}) == [b"b", b"a"]


def test_what_is_written_later_leaves_before_the_block_that_it_builds_on() -> None:
    index = filled(4, [b"a", b"x"])
    for key, after in ((b"b", b"a"), (b"c", b"b")):
        (slot,) = reserve_all(index, [key], [after])
        index.publish(slot, bytes(16))
    assert eviction_order(index, {b"a", b"b", b"c", b"x"}) == [b"c", b"b", b"a", b"x"]


def test_no_block_evicts_the_one_that_it_builds_on_or_one_used_since() -> None:
    index = filled(3, [b"old", b"a", b"x"])
    (slot,) = reserve_all(index, [b"b"], [b"a"])
    index.publish(slot, bytes(16))
    assert index.present([b"old", b"a", b"x", b"b"]) == [False, True, True, True]
    assert reserve_all(index, [b"c"], [b"b"]) == []
    assert index.lease(b"b") is not None
    assert reserve_all(index, [b"c"], [b"b"]) == []
    assert index.present([b"a", b"x", b"b"]) == [True] * 3


def test_an_index_without_slots_takes_nothing() -> None:
    index = slot_index(0)
    assert index.reserve(b"a") is None
    assert restore(index, []) == (0, 0, [])


@pytest.mark.parametrize("count", [8, 13])
def test_the_blocks_of_a_batch_get_neighbouring_slots(count: int) -> None:
    """Also where all slots are full, and prefixes of several batches were used in any order."""
    index = slot_index(5 * count)
    chance = random.Random(count)
    prefixes: list[list[bytes]] = []
    for number in range(40):
        batch = [b"%d %d" % (number, position) for position in range(count)]
        slots = [index.reserve(key) for key in reversed(batch)]
        first = slots[0]
        assert first is not None
        assert slots == list(range(first, first + count))
        for slot in slots:
            assert slot is not None
            index.publish(slot, bytes(16))
        if number % 2:
            prefixes[-1] += batch
        else:
            prefixes.append(batch)
        index.touch(chance.choice(prefixes[-2:]))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_longer_key_takes_its_own_room_alone() -> None:
    """A step waits for it, whatever the number of slots."""
    index = filled(1 << 22, [b"a" * 32])
    before = resident_bytes()
    for key in (b"b" * 49, b"c" * 32):
        slot = index.reserve(key)
        assert slot is not None
        assert index.publish(slot, bytes(16))
    assert resident_bytes() - before < 64 << 20
    assert index.ready_slots([b"a" * 32, b"b" * 49, b"c" * 32]) == [0, 1, 2]
    assert index.key_of(1) == b"b" * 49


def test_slots_that_no_block_has_used_take_no_room_after_an_error() -> None:
    index = filled(1 << 22, [b"a", b"b"])
    assert index.lease(b"b") == 1
    before = resident_bytes()
    assert index.end_uses([]) == []
    assert resident_bytes() - before < 64 << 20
    assert index.usable_slots == 1 << 22


def test_a_process_that_ends_while_an_index_is_filled_ends_well() -> None:
    """A daemon's thread fills it: a drive may hang."""
    code = """
import threading, time
from flexkv.index.slot_index import restore, slot_index

def records():
    begun.set()
    for slot in range(10_000):
        yield slot, b"%d" % slot, bytes(16), slot, 1
        time.sleep(0.001)

begun = threading.Event()
threading.Thread(target=restore, args=(slot_index(10_000), records()), daemon=True).start()
begun.wait()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@st.composite
def tables(draw: st.DrawFn) -> list[Record]:
    """Records of distinct slots and generations; keys come several times."""
    slots = draw(st.lists(st.integers(0, SLOTS - 1), unique=True))
    generations = draw(
        st.lists(st.integers(1, 99), unique=True, min_size=len(slots), max_size=len(slots))
    )
    return [
        (slot, key, checksum_for(key, slot), generation, 0)
        for slot, generation in zip(slots, generations, strict=True)
        for key in [draw(KEYS)]
    ]


@given(tables())
def test_a_restored_index_has_the_latest_of_each_key_in_order_of_writing(
    records: list[Record],
) -> None:
    index = slot_index(SLOTS)
    generation, _, outdated = restore(index, records)
    latest: dict[bytes, Record] = {}
    for record in sorted(records, key=lambda record: record[3]):
        latest.pop(record[1], None)
        latest[record[1]] = record
    assert generation == max((record[3] for record in records), default=0)
    assert sorted(outdated) == sorted({r[0] for r in records} - {r[0] for r in latest.values()})
    assert len(index) == len(latest)
    assert index.free_slots == SLOTS - len(latest)
    for slot, key, checksum, *_ in latest.values():
        assert index.lease(key) == slot
        assert index.checksums([slot]) == [checksum]
        index.release(slot)
    assert eviction_order(index, set(latest)) == list(latest)


def test_blocks_of_before_the_watch_are_changes_a_part_at_a_time() -> None:
    index = filled(8, [bytes([i]) for i in range(8)])
    index.watch()
    assert list(drain_changes(index, 2)) == [b"\0", b"\1"]
    # These three are ready in slots that no drain has come to.
    lost = index.lease(b"\6")
    assert lost is not None
    index.discard(lost)
    index.release(lost)
    for key in (b"\1", b"new"):
        assert index.has_all([key]) == [key == b"\1"]
    slot = index.reserve(b"new")
    assert slot == lost
    assert index.publish(slot, bytes(16))
    drained: dict[bytes, bool] = {}
    while index.has_changes:
        drained |= drain_changes(index, 2)
    assert drained == dict.fromkeys([b"\2", b"\3", b"\4", b"\5", b"\7", b"new"], True)


def test_blocks_of_before_the_watch_that_a_reset_removes_are_no_changes() -> None:
    index = filled(4, [b"a", b"b"])
    index.watch()
    index.clear()
    while index.has_changes:
        assert drain_changes(index, 1) == {}
    assert index.free_slots == 4


def test_resets_may_be_as_many_as_an_engine_lives_to_see() -> None:
    index = filled(2, [b"a"])
    writing = index.reserve(b"w")
    assert writing is not None
    for _ in range(1 << 15):
        index.clear()
        assert index.has_all([b"a", b"w"]) == [False, False]
        slot = index.reserve(b"a")
        assert slot is not None
        assert index.publish(slot, bytes(16))
        assert b"a" in index
    assert not index.publish(writing, bytes(16))


class SlotIndexModel(RuleBasedStateMachine):
    """Random histories beside a model: dictionaries in order of use, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.index = slot_index(SLOTS)
        self.order: dict[bytes, int] = {}  # blocks that are ready or being written
        self.ready: set[bytes] = set()
        self.writing: dict[int, bytes | None] = {}  # slots; None once the block was removed
        self.leases: Counter[int] = Counter()
        self.evictions = 0
        self.index.watch()
        self.reported: set[bytes] = set()

    def forget(self, slot: int) -> None:
        for key in [key for key, place in self.order.items() if place == slot]:
            del self.order[key]
            self.ready.discard(key)
        if slot in self.writing:
            self.writing[slot] = None

    def used(self) -> set[int]:
        return {*self.order.values(), *self.writing, *self.leases}

    @rule(key=KEYS, after=st.none() | KEYS)
    def reserve(self, key: bytes, after: bytes | None) -> None:
        if self.index.has_all([key])[0]:
            return
        busy = {*self.writing, *self.leases}
        older = itertools.takewhile(lambda each: each[0] != after, self.order.items())
        idle = [key for key, slot in older if slot not in busy]
        full = len(self.used()) == SLOTS
        slot = self.index.reserve(key, after)
        if full and not idle:
            assert slot is None
            return
        assert slot is not None
        if full:
            assert slot == self.order[idle[0]]
            self.forget(slot)
            self.evictions += 1
        assert slot not in self.used()
        newer = list(itertools.dropwhile(lambda each: each[0] != after, self.order.items()))
        for each, _ in newer:
            del self.order[each]
        self.order |= {key: slot, **dict(newer)}
        self.writing[slot] = key

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), works=st.booleans())
    def finish_writing(self, data: st.DataObject, works: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.writing)))
        key = self.writing[slot]
        if works:
            assert self.index.publish(slot, checksum_for(key or b"-", slot)) is (key is not None)
        if works and key is not None:
            self.ready.add(key)
        else:
            self.index.discard(slot)
            self.index.release(slot)
            self.forget(slot)
        del self.writing[slot]

    @rule(key=KEYS)
    def lease(self, key: bytes) -> None:
        slot = self.index.lease(key)
        assert slot == (self.order[key] if key in self.ready else None)
        if slot is not None:
            self.leases[slot] += 1
            assert self.index.checksums([slot]) == [checksum_for(key, slot)]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.leases)))
        if not keep:
            self.index.discard(slot)
            self.forget(slot)
        self.index.release(slot)
        self.leases -= Counter([slot])

    @rule(keys=st.lists(KEYS, unique=True))
    def touch(self, keys: list[bytes]) -> None:
        self.index.touch(keys)
        for key in reversed(keys):
            if key in self.order:
                self.order[key] = self.order.pop(key)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        for slot in list(self.order.values()):
            self.forget(slot)

    @rule(limit=st.integers(0, SLOTS))
    def sweep(self, limit: int) -> None:
        left = max(0, self.index.stale_blocks - limit)
        self.index.sweep(limit)
        assert self.index.stale_blocks == left

    @rule(limit=st.integers(1, SLOTS), to_the_end=st.booleans())
    def drain_changes(self, limit: int, to_the_end: bool) -> None:
        while self.index.has_changes:
            for key, ready in drain_changes(self.index, limit).items():
                assert (key in self.reported) is not ready
                self.reported ^= {key}
            if not to_the_end:
                return
        assert self.reported == self.ready

    @rule()
    def watch(self) -> None:
        self.index.watch()
        self.reported.clear()

    @invariant()
    def the_index_and_the_model_agree(self) -> None:
        assert len(self.index) == len(self.ready)
        free = SLOTS - len(self.used())
        assert self.index.free_slots <= free <= self.index.free_slots + self.index.stale_blocks
        assert self.index.evictions == self.evictions
        for number in range(10):
            key = bytes([number])
            assert (key in self.index) is (key in self.ready)
            assert self.index.is_reported(key) is (key in self.reported)
            assert self.index.has_all([key]) == [key in self.order]

    def teardown(self) -> None:
        for slot in list(self.writing):
            self.finish_one(slot)
        for slot in self.leases.elements():
            self.index.release(slot)
        self.leases.clear()
        self.index.sweep(SLOTS)
        assert self.index.free_slots == SLOTS - len(self.used())
        self.the_index_and_the_model_agree()
        assert eviction_order(self.index, set(self.ready)) == list(self.order)

    def finish_one(self, slot: int) -> None:
        self.index.discard(slot)
        self.index.release(slot)
        self.forget(slot)
        del self.writing[slot]


TestSlotIndex = SlotIndexModel.TestCase
