# SPDX-License-Identifier: Apache-2.0
"""An index in shared memory: what readers hold stays, whatever its owner does."""

from __future__ import annotations

import mmap
import os
import random
import struct
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from flexkv.eviction import POLICIES, LRUPolicy
from flexkv.index.block_index import (
    BlockIndex,
    IndexReader,
    block_index,
    index_bytes,
    index_reader,
    publish,
)

SLOTS = 8
KEYS = [bytes([number]) * 32 for number in range(24)]


class Shared:
    """An index in shared memory with one reader, in one process."""

    def __init__(self, slots: int = SLOTS, policy: str = "lru") -> None:
        self.memory = mmap.mmap(-1, index_bytes(slots))
        self.holds = mmap.mmap(-1, 2 * slots)
        made: Any = POLICIES[policy]
        self.index = block_index(
            slots, LRUPolicy() if policy == "lru" else made(slots), self.memory
        )
        self.number = self.index.add_reader(self.holds)
        self.reader = index_reader(self.memory, self.holds)


@pytest.fixture
def shared() -> Shared:
    return Shared()


def put(index: BlockIndex, *keys: bytes) -> None:
    """Each a prefix of its own."""
    publish(index, index.reserve_all(keys, range(len(keys)), range(len(keys))))


def test_a_reader_finds_what_the_owner_publishes(shared: Shared) -> None:
    index, reader = shared.index, shared.reader
    assert reader.lookup(KEYS) == 0
    assert reader.lease(KEYS[:1]) is None
    blocks = index.reserve_all(KEYS[:3], range(3), (0,))
    assert reader.lookup(KEYS) == 0
    assert reader.missing(KEYS[:4]) == [3]
    assert reader.lease(KEYS[:3]) is None, "a block that is being written was leased"
    publish(index, blocks)
    assert reader.lookup(KEYS) == 3
    assert reader.present(KEYS[:4]) == [True, True, True, False]
    assert reader.lease(KEYS[:3]) == list(blocks.slots)
    assert reader.lease(KEYS[:4]) is None
    assert reader.held == 3, "a lease that failed holds something"
    assert reader.held_slots == 3
    reader.release(blocks.slots)
    assert reader.held == reader.held_slots == 0


def test_what_is_held_is_not_evicted(shared: Shared) -> None:
    index, reader = shared.index, shared.reader
    put(index, *KEYS[:SLOTS])
    oldest = KEYS[SLOTS - 1 : SLOTS]
    (slot,) = reader.lease(oldest) or []
    put(index, *KEYS[SLOTS : 2 * SLOTS - 1])
    assert reader.lookup(oldest) == 1
    assert index.lookup(oldest) == 1
    assert index.look_at_holds() == 1
    reader.release([slot])
    assert index.look_at_holds() == 0
    put(index, KEYS[20])
    assert index.lookup(oldest) == 0, "it may leave again"


def test_an_entry_that_is_half_changed_is_a_miss(shared: Shared) -> None:
    index, reader = shared.index, shared.reader
    put(index, *KEYS[:2])
    first, second = index.lease(KEYS[:2]) or []
    start, entries = 4096, {}
    for place in range(start, start + 32 * 16, 16):
        hashed, word = struct.unpack_from("QQ", shared.memory, place)
        entries[word & 0xFFFFFFFF] = place, hashed, word
    place, hashed, _ = entries[second.slot + 1]
    index.drop([second])
    assert struct.unpack_from("QQ", shared.memory, place) == (0, 0)
    struct.pack_into("QQ", shared.memory, place, hashed, entries[first.slot + 1][2])
    assert reader.lookup(KEYS[1:2]) == 0
    assert reader.missing(KEYS[:2]) == [1]
    assert reader.lease(KEYS[1:2]) is None
    assert reader.lookup(KEYS[:1]) == 1


def test_the_slot_of_a_block_that_left_waits_for_its_readers(shared: Shared) -> None:
    index, reader = shared.index, shared.reader
    put(index, *KEYS[:SLOTS])
    held = reader.lease(KEYS[:2]) or []
    index.clear()
    assert reader.lookup(KEYS) == 0
    assert reader.lease(KEYS[:1]) is None
    taken = index.take_slots(SLOTS, 1)
    assert len(taken) == SLOTS - 2
    assert not set(taken) & set(held)
    reader.release(held[:1])
    assert index.look_at_holds() == 1
    assert index.take_slots(SLOTS, 1) == held[:1]


def test_a_block_that_was_replaced_is_not_leased_by_its_old_entry(shared: Shared) -> None:
    index, reader = shared.index, shared.reader
    put(index, *KEYS[:SLOTS])
    (slot,) = reader.lease(KEYS[:1]) or []
    reader.release([slot])
    put(index, KEYS[SLOTS])
    gone = [key for key in KEYS[:SLOTS] if index.lookup([key]) == 0]
    assert len(gone) == 1
    assert reader.lease(gone) is None
    assert reader.lease([KEYS[SLOTS]]) is not None


def test_a_reader_that_ended_holds_nothing(shared: Shared) -> None:
    index = shared.index
    put(index, *KEYS[:SLOTS])
    assert shared.reader.lease(KEYS[:SLOTS])
    assert index.take_slots(1, 1) == []
    index.remove_reader(shared.number)
    index.look_at_holds()
    assert len(index.take_slots(SLOTS, 1)) == SLOTS
    with pytest.raises(ValueError, match="no reader"):
        index.remove_reader(shared.number)


def test_a_hold_has_room_for_many_and_no_more(shared: Shared) -> None:
    put(shared.index, KEYS[0])
    (slot,) = shared.reader.lease(KEYS[:1]) or []
    struct.pack_into("H", shared.holds, 2 * slot, 0xFFFF)
    assert shared.reader.lease(KEYS[:1]) is None
    struct.pack_into("H", shared.holds, 2 * slot, 0)
    with pytest.raises(ValueError, match="is not held"):
        shared.reader.release([slot])
    for wrong in (-1, SLOTS):
        with pytest.raises(ValueError, match="is not held"):
            shared.reader.release([wrong])


def test_a_recovery_holds_what_is_known(shared: Shared) -> None:
    index, reader = shared.index, shared.reader
    put(index, *KEYS[:3])
    kept, lost, twice = reader.lease(KEYS[:3]) or []
    reader.settle([kept, twice, twice])
    assert (reader.held, reader.held_slots) == (3, 2)
    index.clear()
    assert set(index.take_slots(SLOTS, 1)) == set(range(SLOTS)) - {kept, twice}
    assert lost not in {kept, twice}
    for wrong in (-1, SLOTS):
        with pytest.raises(ValueError, match="is none of 8"):
            reader.settle([wrong])
    assert reader.held == 3


def test_a_slot_is_known_to_be_taken_before_a_clear(shared: Shared) -> None:
    index = shared.index
    (before,) = index.take_slots(1, 1)
    assert index.is_taken_since_clear(before)
    for _ in range(8):
        index.clear()
        assert index.is_taken(before)
        assert not index.is_taken_since_clear(before)
    (after,) = index.take_slots(1, 1)
    assert index.is_taken_since_clear(after)
    index.give_back([before, after])
    assert not index.is_taken_since_clear(after)
    with pytest.raises(ValueError, match="none of 8"):
        index.is_taken_since_clear(SLOTS)


def test_writers_of_other_processes_fill_slots(shared: Shared) -> None:
    index, reader = shared.index, shared.reader
    put(index, KEYS[0])
    slots = index.take_slots(4, 1)
    assert len(slots) == 4
    assert index.free_slots == SLOTS - 5
    placed = index.place(KEYS[:4], [1, 2, 3], (), slots[:3])
    assert list(placed.slots) == slots[:3]
    assert reader.lookup(KEYS[:4]) == 1
    publish(index, placed)
    assert reader.lease(KEYS[1:4]) == slots[:3]
    assert [block.parent_key for block in placed] == KEYS[:3]
    # What is there already, or builds on nothing, keeps its slot.
    assert len(index.place(KEYS[:2], [1], (), slots[3:])) == 0
    assert len(index.place(KEYS[10:12], [1], (), slots[3:])) == 0
    assert [index.is_taken(slot) for slot in slots] == [False, False, False, True]
    index.give_back(slots[3:])
    assert index.free_slots == SLOTS - 4
    assert not index.is_taken(slots[3])
    with pytest.raises(ValueError, match="slot 8 is none of 8"):
        index.is_taken(SLOTS)
    for call in (index.give_back, lambda each: index.place(KEYS[5:6], [0], (0,), each)):
        for wrong in (slots[:1], slots[3:], [-1], [SLOTS]):
            with pytest.raises(ValueError, match="was not taken"):
                call(wrong)
    with pytest.raises(ValueError, match="2 slots for 1 blocks"):
        index.place(KEYS[5:6], [0], (0,), index.take_slots(2, 1))


def test_a_writer_has_a_number(shared: Shared) -> None:
    for wrong in (0, 256, -1):
        with pytest.raises(ValueError, match="allowed: 1 to 255"):
            shared.index.take_slots(1, wrong)
        with pytest.raises(ValueError, match="allowed: 1 to 255"):
            shared.index.taken_by(wrong)
    taken = shared.index.take_slots(2, 255), shared.index.take_slots(2, 1)
    assert (shared.index.taken_by(255), shared.index.taken_by(1)) == taken


def test_slots_of_writers_outlive_a_recovery(shared: Shared) -> None:
    index = shared.index
    put(index, *KEYS[:3])
    slots = index.take_slots(2, 1)
    index.settle([], [], [])
    assert index.free_slots == SLOTS - 5
    publish(index, index.place(KEYS[5:7], [0, 1], (0,), slots))
    assert index.lookup(KEYS[5:7]) == 2


def test_memory_that_is_no_index_is_refused() -> None:
    size = index_bytes(SLOTS)
    with pytest.raises(ValueError, match=f"{size - 1} bytes for an index; allowed: {size}"):
        block_index(SLOTS, LRUPolicy(), bytearray(size - 1))
    memory, holds = bytearray(size), bytearray(2 * SLOTS)
    for wrong in (memory, bytearray(64)):
        with pytest.raises(ValueError, match="no index of layout 3"):
            index_reader(wrong, holds)
    with pytest.raises(ValueError, match="no index of layout 3"):
        block_index(SLOTS, LRUPolicy(), memory, begun=True)
    index = block_index(SLOTS, LRUPolicy(), memory)
    assert index_reader(memory, holds).lookup(KEYS) == 0
    for shorter in (holds[2:], bytearray(2 * SLOTS + 2)):
        with pytest.raises(ValueError, match="bytes for holds; allowed: 16"):
            index_reader(memory, shorter)
        with pytest.raises(ValueError, match="bytes for holds; allowed: 16"):
            index.add_reader(shorter)
    with pytest.raises(ValueError, match="no index of layout 3"):
        index_reader(memory[:-1], holds)
    memory[8] = 1
    with pytest.raises(ValueError, match="no index of layout 3"):
        index_reader(memory, holds)
    with pytest.raises(ValueError, match="no index of layout 3"):
        block_index(SLOTS, LRUPolicy(), memory, begun=True)


def test_an_index_goes_on_in_the_memory_of_one_that_ended(shared: Shared) -> None:
    index, reader = shared.index, shared.reader
    publish(index, index.reserve_all(KEYS[:3], range(3), (0,)))
    index.reserve(KEYS[3], KEYS[2])
    granted = index.take_slots(1, 7)
    put(index, KEYS[5])
    index.drop(index.lease(KEYS[5:6]) or [])
    held = reader.lease(KEYS[:1]) or []
    slots = {block.key: block.slot for block in index.blocks if block.key != KEYS[3]}
    other = block_index(SLOTS, LRUPolicy(), shared.memory, begun=True)
    other.add_reader(shared.holds)
    assert {block.key: block.slot for block in other.blocks} == slots
    assert [block.parent_key for block in other.blocks] == [None, *KEYS[:2]]
    assert reader.lookup(KEYS) == other.lookup(KEYS) == 3
    assert reader.lease(KEYS[3:4]) is reader.lease(KEYS[5:6]) is None
    assert other.taken_by(7) == granted
    assert other.taken_by(1) == []
    assert other.free_slots == SLOTS - 4
    other.give_back(granted)
    put(other, *KEYS[10 : 10 + SLOTS])
    assert other.lookup(KEYS[:1]) == 1, "what is held was evicted"
    assert other.lookup(KEYS[1:2]) == 0
    reader.release(held)


def test_a_block_without_the_one_before_it_is_not_kept(shared: Shared) -> None:
    index = shared.index
    publish(index, index.reserve_all(KEYS[:3], range(3), (0,)))
    first, second, _ = index.lease(KEYS[:3]) or []
    start = index_bytes(SLOTS) - 128 * SLOTS
    version = struct.unpack_from("I", shared.memory, start + 128 * second.slot)[0]
    struct.pack_into("I", shared.memory, start + 128 * second.slot, version + 1)
    other = block_index(SLOTS, LRUPolicy(), shared.memory, begun=True)
    assert [block.slot for block in other.blocks] == [first.slot]
    assert other.free_slots == SLOTS - 1
    assert shared.reader.lease(KEYS[2:3]) is None
    # Of a ring of blocks none is kept, and the search for their beginning ends.
    struct.pack_into("i", shared.memory, start + 128 * first.slot + 4, first.slot)
    assert len(block_index(SLOTS, LRUPolicy(), shared.memory, begun=True)) == 0


class Histories(RuleBasedStateMachine):
    """One owner, a reader and a writer, one call after the other. `bytes_of` is the memory of the
    slots: who leased a slot finds the bytes of its key there until the hold ends."""

    @initialize(policy=st.sampled_from(["lru", "hazard"]))
    def start(self, policy: str) -> None:
        self.shared = Shared(policy=policy)
        self.index: BlockIndex = self.shared.index
        self.reader: IndexReader = self.shared.reader
        self.bytes_of: dict[int, bytes] = {}
        self.held: list[tuple[int, bytes]] = []
        self.taken: list[int] = []

    def _fill(self, slots: list[int], keys: list[bytes]) -> None:
        for slot, key in zip(slots, keys, strict=True):
            assert slot not in {each for each, _ in self.held}, "a slot that is held is written to"
            self.bytes_of[slot] = key

    @rule(first=st.integers(0, len(KEYS) - 3), count=st.integers(1, 3))
    def reserve(self, first: int, count: int) -> None:
        keys = KEYS[first : first + count]
        blocks = self.index.reserve_all(keys, range(count), (0,))
        self._fill(list(blocks.slots), list(blocks.keys))
        publish(self.index, blocks)

    @rule(count=st.integers(1, 4))
    def grant(self, count: int) -> None:
        slots = self.index.take_slots(count, 1)
        assert not set(slots) & set(self.taken)
        self.taken += slots

    @precondition(lambda self: self.taken)
    @rule(key=st.sampled_from(KEYS))
    def place(self, key: bytes) -> None:
        slot = self.taken[0]
        self._fill([slot], [key])
        placed = self.index.place([key], [0], (0,), [slot])
        if len(placed):
            del self.taken[0]
            publish(self.index, placed)

    @precondition(lambda self: self.taken)
    @rule()
    def give_back(self) -> None:
        self.index.give_back([self.taken.pop()])

    @rule(first=st.integers(0, len(KEYS) - 3), count=st.integers(1, 3))
    def lease(self, first: int, count: int) -> None:
        keys = KEYS[first : first + count]
        slots = self.reader.lease(keys)
        assert (slots is not None) == (self.index.lookup(keys) == count)
        self.held += zip(slots or [], keys if slots else [], strict=True)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.held) - 1))
        self.reader.release([self.held.pop(place)[0]])

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: bytes) -> None:
        blocks = self.index.lease([key])
        if blocks is not None:
            self.index.drop(blocks)
            self.index.release(blocks)

    @rule()
    def clear(self) -> None:
        self.index.clear()

    @rule()
    def look(self) -> None:
        self.index.look_at_holds()

    @rule()
    def settle(self) -> None:
        self.index.settle([], [], [])

    @rule(policy=st.sampled_from(["lru", "hazard"]))
    def succeed(self, policy: str) -> None:
        """Another owner goes on in the memory."""
        there = {block.key: block.slot for block in self.index.blocks}
        made: Any = POLICIES[policy]
        self.index = block_index(
            SLOTS,
            LRUPolicy() if policy == "lru" else made(SLOTS),
            self.shared.memory,
            begun=True,
        )
        self.index.add_reader(self.shared.holds)
        assert {block.key: block.slot for block in self.index.blocks} == there
        assert self.index.taken_by(1) == sorted(self.taken)
        assert self.index.free_slots == SLOTS - len(self.taken) - len(there)

    @rule()
    def save_a_victim(self) -> None:
        block = self.index.lease_victim()
        if block is not None:
            self.index.retire(block)

    @invariant()
    def holds_are_right(self) -> None:
        assert self.reader.held == len(self.held)
        assert all(self.bytes_of[slot] == key for slot, key in self.held)

    def teardown(self) -> None:
        self.reader.release([slot for slot, _ in self.held])
        self.index.give_back(self.taken)
        self.index.clear()
        self.index.sweep(SLOTS)
        assert self.index.look_at_holds() == 0
        assert len(set(self.index.take_slots(SLOTS, 1))) == SLOTS, "a slot is lost"


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

RACE_SLOTS, RACE_KEYS, WORDS = 32, 96, 16
RACE_SECONDS = 2.0


def _race_keys() -> list[bytes]:
    return [struct.pack("<Q", number) * 4 for number in range(RACE_KEYS)]


def _read(fds: tuple[int, int, int], pipe: Connection, seed: int) -> None:
    """Lease blocks at random, and compare every byte with what its key says."""
    memory, arena, holds = (mmap.mmap(fd, os.fstat(fd).st_size) for fd in fds)
    reader, keys = index_reader(memory, holds), _race_keys()
    pipe.send("ready")
    leases = wrong = 0
    state = seed
    while not pipe.poll():
        for _ in range(200):
            state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            key = keys[(state >> 33) % RACE_KEYS]
            slots = reader.lease([key])
            if slots is None:
                continue
            leases += 1
            start = slots[0] * 8 * WORDS
            wrong += arena[start : start + 8 * WORDS] != key[:8] * WORDS
            wrong += arena[start : start + 8 * WORDS] != key[:8] * WORDS
            reader.release(slots)
    pipe.recv()
    pipe.send((leases, wrong, reader.held))


def _start_readers(index: int, arena: int, holds: list[int]) -> list[Connection]:
    """A process for each of `holds`. Returns pipes to them."""
    context, pipes = get_context("fork"), []
    for number, fd in enumerate(holds):
        mine, other = context.Pipe()
        context.Process(
            target=_read, args=((index, arena, fd), other, number + 7), daemon=True
        ).start()
        pipes.append(mine)
    assert [pipe.recv() for pipe in pipes] == ["ready"] * len(holds)
    return pipes


def _assert_right(pipes: list[Connection]) -> None:
    """End the readers. They have read the bytes of their keys alone, and hold nothing."""
    for pipe in pipes:
        pipe.send("stop")
        leases, wrong, held = pipe.recv()
        assert leases > 0
        assert wrong == held == 0


@pytest.fixture
def files() -> Iterator[tuple[int, int, list[int]]]:
    sizes = [index_bytes(RACE_SLOTS), RACE_SLOTS * 8 * WORDS, 2 * RACE_SLOTS, 2 * RACE_SLOTS]
    fds = []
    for size in sizes:
        fds.append(os.memfd_create("race"))
        os.ftruncate(fds[-1], size)
    yield fds[0], fds[1], fds[2:]
    for fd in fds:
        os.close(fd)


def test_readers_of_other_processes_see_right_bytes(
    files: tuple[int, int, list[int]],
) -> None:
    """The owner evicts as fast as it can while two processes lease and read."""
    index_fd, arena_fd, hold_fds = files
    memory, arena = (mmap.mmap(fd, os.fstat(fd).st_size) for fd in (index_fd, arena_fd))
    index, keys = block_index(RACE_SLOTS, LRUPolicy(), memory), _race_keys()
    for fd in hold_fds:
        index.add_reader(mmap.mmap(fd, 2 * RACE_SLOTS))
    pipes = _start_readers(*files)
    state, end = 1, time.monotonic() + RACE_SECONDS
    while time.monotonic() < end:
        for _ in range(200):
            state = (state * 2862933555777941757 + 3037000493) % (1 << 64)
            key = keys[(state >> 33) % RACE_KEYS]
            block = index.reserve(key, None)
            if block is not None:
                start = block.slot * 8 * WORDS
                arena[start : start + 8 * WORDS] = key[:8] * WORDS
                index.publish([block])
        index.look_at_holds()
    _assert_right(pipes)
    assert index.evictions > 0


def _own(fds: tuple[int, int], holds: list[int], seed: int, begun: bool) -> BlockIndex:
    """Write and evict blocks until this process is killed."""
    memory, arena = (mmap.mmap(fd, os.fstat(fd).st_size) for fd in fds)
    index = block_index(RACE_SLOTS, LRUPolicy(), memory, begun=begun)
    for fd in holds:
        index.add_reader(mmap.mmap(fd, 2 * RACE_SLOTS))
    keys, state = _race_keys(), seed
    while True:
        state = (state * 2862933555777941757 + 3037000493) % (1 << 64)
        key, after = keys[(state >> 33) % RACE_KEYS], keys[(state >> 43) % RACE_KEYS]
        block = index.reserve(key, None if state % 2 else after)
        if block is not None:
            start = block.slot * 8 * WORDS
            arena[start : start + 8 * WORDS] = key[:8] * WORDS
            index.publish([block])
        index.look_at_holds()


def test_readers_see_right_bytes_while_owners_are_killed(
    files: tuple[int, int, list[int]],
) -> None:
    """One owner after the other is killed at a random moment, and the next goes on."""
    index_fd, arena_fd, hold_fds = files
    block_index(RACE_SLOTS, LRUPolicy(), mmap.mmap(index_fd, os.fstat(index_fd).st_size))
    pipes, context = _start_readers(*files), get_context("fork")
    rng = random.Random(5)
    for number in range(40):
        owner = context.Process(
            target=_own, args=((index_fd, arena_fd), hold_fds, number, number > 0), daemon=True
        )
        owner.start()
        time.sleep(rng.uniform(0.02, 0.05))
        owner.kill()
        owner.join()
    _assert_right(pipes)
    memory, arena = (mmap.mmap(fd, os.fstat(fd).st_size) for fd in (index_fd, arena_fd))
    index = block_index(RACE_SLOTS, LRUPolicy(), memory, begun=True)
    for block in index.blocks:
        start = block.slot * 8 * WORDS
        assert arena[start : start + 8 * WORDS] == block.key[:8] * WORDS
    assert len(index) + index.free_slots == RACE_SLOTS
