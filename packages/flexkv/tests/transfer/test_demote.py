# SPDX-License-Identifier: Apache-2.0
"""What is written to a lower tier: never a block without the one before it."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from memory_tier import MemoryTier

from flexkv.admission import ADMISSIONS
from flexkv.eviction import LRUPolicy
from flexkv.index import Block, block_index
from flexkv.tiers.job import Outcome
from flexkv.transfer.demote import _BACKLOG_SHARE, _BLOCKS, Demoter
from flexkv.transfer.leaving import Leaving
from flexkv.transfer.sources import IndexedSource
from packages.conftest import Clock
from packages.tier_blocks import ready_blocks


def keys(names: str) -> list[bytes]:
    return [name.encode() for name in names]


class Arena:
    """An index and its demoter over a tier in memory. Blocks have one byte."""

    def __init__(self, slots: int) -> None:
        self.index = block_index(slots, LRUPolicy())
        self.tier = MemoryTier()
        memory = memoryview(bytearray(slots))
        source = IndexedSource(self.tier, 0, 1.0)
        self.counters = source.counters
        on_evict = ADMISSIONS["on_evict"]
        self.demoter = Demoter(self.index, lambda slot: memory[slot : slot + 1], source, on_evict)
        self.leaving = Leaving(self.index, [self.demoter])

    def add(self, names: str, parent: str = "") -> list[Block]:
        """Blocks of a prefix become ready, behind the block `parent`."""
        blocks = []
        before = parent.encode() or None
        for key in keys(names):
            block = self.index.reserve(key, before)
            assert block is not None
            blocks.append(block)
            before = key
        self.index.publish(blocks)
        return blocks

    def poll(self) -> None:
        for result in self.tier.poll():
            self.leaving.wrote(self.demoter, self.demoter.take(result))

    def offer(self, names: str) -> str:
        """What is being written once these were offered."""
        self.demoter.offer(keys(names))
        return self.writing()

    def make_room(self) -> str:
        self.leaving.make_room()
        return self.writing()

    def writing(self) -> str:
        return b"".join(task.key for task in self.tier.tasks).decode()

    def finish(self, outcome: Outcome = Outcome.DONE) -> None:
        self.tier.end_all(outcome)
        self.poll()

    def order(self) -> str:
        """What leaves, in that order: all, as if no slot were free."""
        blocks = dict(ready_blocks(self.index))
        children = Count(block.parent for block in blocks.values())
        left = []
        while blocks:
            ends = [b for b in blocks.values() if not (children[b] or b.leases)]
            if not ends:
                break
            end = min(ends, key=lambda block: block.used)
            del blocks[end.key]
            children[end.parent] -= 1
            left.append(end.key)
        return b"".join(left).decode()

    def assert_at_rest(self) -> None:
        assert not (self.demoter.busy)
        assert not (self.demoter._writing)
        assert not (self.leaving._leaving)
        assert not any(block.leases for block in ready_blocks(self.index).values())
        assert self.index.free_slots + len(self.index) == self.index.num_slots


@contextmanager
def arena(slots: int = 16) -> Iterator[Arena]:
    made = Arena(slots)
    yield made
    made.poll()
    made.assert_at_rest()


def test_what_is_there_or_on_its_way_is_not_written_again() -> None:
    with arena() as node:
        node.add("abcd")
        node.tier.blocks[b"a"] = b""
        assert node.offer("abc") == "bc"
        assert node.offer("abcdd") == "bcd"
        node.finish()
        assert sorted(node.tier.blocks) == keys("abcd")
        assert node.counters.demoted_blocks == 3


def test_a_block_is_not_written_without_the_one_before_it() -> None:
    with arena() as node:
        node.add("ab")
        node.add("cd", parent="b")
        assert node.offer("cd") == ""
        assert node.counters.dropped_demotions == 2
        assert node.offer("ab") == "ab"
        assert node.offer("cd") == "abcd"  # those before are on their way
        node.finish()


@pytest.mark.parametrize("stored", [True, False])
def test_a_block_waits_for_a_parent_whose_store_ends_later(stored: bool) -> None:
    with arena() as node:
        parent = node.index.reserve(b"a", None)
        assert parent is not None
        node.add("bc", parent="a")
        assert node.offer("bc") == ""
        node.demoter.write_waiting()
        assert node.writing() == ""
        if stored:
            node.index.publish([parent])
            node.demoter.offer(keys("a"))
        else:
            node.index.abandon([parent])
        for _ in range(2):  # the parent was offered last
            node.demoter.write_waiting()
        assert node.writing() == ("abc" if stored else "")
        assert node.counters.dropped_demotions == (0 if stored else 2)
        node.finish()


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DROPPED])
def test_nothing_is_written_behind_what_did_not_arrive(outcome: Outcome) -> None:
    with arena() as node:
        node.add("ab")
        node.add("cd", parent="b")
        node.offer("ab")
        node.tier.end(node.tier.of(b"b"), outcome)
        node.finish()
        assert node.offer("cd") == ""
        assert node.offer("abcd") == "bcd"
        node.finish()
        assert node.counters.failed_demotions == (outcome is Outcome.FAILED)


def long_prefix(parts: int) -> str:
    """A prefix of so many times the blocks that one poll begins to write."""
    return "".join(map(chr, range(ord("0"), ord("0") + parts * _BLOCKS)))


def test_each_poll_begins_to_write_some_of_a_long_prefix() -> None:
    names = long_prefix(3)
    with arena(3 * _BLOCKS) as node:
        node.add(names)
        assert node.offer(names) == names[:_BLOCKS]
        assert node.offer(names[-1]) == names[:_BLOCKS]  # it waits already
        assert all(block.leases for block in ready_blocks(node.index).values())
        assert all(map(node.demoter.is_writing, keys(names)))
        node.demoter.write_waiting()
        assert node.writing() == names[: 2 * _BLOCKS]
        node.finish()
        assert node.demoter.busy
        node.demoter.write_waiting()
        assert node.writing() == names[2 * _BLOCKS :]
        node.finish()
        assert node.counters.demoted_blocks == len(names)


def test_more_of_a_long_backlog_begins_in_each_poll() -> None:
    names = long_prefix(32)
    with arena(len(names)) as node:
        node.add(names)
        node.offer(names)
        before = len(node.writing())
        node.demoter.write_waiting()
        assert len(node.writing()) - before == (len(names) - before) // _BACKLOG_SHARE > _BLOCKS
        node.demoter.write_waiting(all_blocks=True)
        assert node.writing() == names
        node.finish()


def test_blocks_that_wait_are_not_written_behind_one_that_was_dropped() -> None:
    names = long_prefix(2)
    with arena(2 * _BLOCKS) as node:
        node.add(names)
        node.offer(names)
        node.tier.end(node.tier.tasks[-1], Outcome.DROPPED)
        node.poll()
        node.demoter.write_waiting()
        assert node.writing() == names[: _BLOCKS - 1]
        assert node.counters.dropped_demotions == 1 + _BLOCKS
        node.finish()


def test_blocks_that_wait_when_the_arena_is_cleared_are_not_written() -> None:
    names = long_prefix(2)
    with arena(2 * _BLOCKS) as node:
        node.add(names)
        node.offer(names)
        node.index.clear()
        node.demoter.clear()
        node.demoter.write_waiting()
        assert node.writing() == names[:_BLOCKS]
        node.tier.clear()
        node.finish()


def test_a_gap_in_the_arena_ends_what_is_written() -> None:
    with arena() as node:
        blocks = node.add("abcd")
        node.index.drop(node.index.lease([b"b"]) or [])
        node.index.release([blocks[1]])
        assert node.offer("abcd") == "a"
        node.finish()


def test_blocks_that_were_written_stay_and_have_not_been_used() -> None:
    with arena() as node:
        node.add("abc")
        node.add("xyz")
        node.offer("abc")
        for name in (b"b", b"c", b"a"):
            node.tier.end(node.tier.of(name))
            node.poll()
        assert node.order() == "cbazyx"


def test_before_a_block_leaves_its_whole_prefix_is_written() -> None:
    with arena(16) as node:
        node.add("abcdef")
        node.add("stuvwxyz")
        assert node.order()[:2] == "fe"
        # Two more slots are to be free than are.
        node.add("m")
        assert node.make_room() == "abcdef"
        node.finish()
        assert sorted(node.tier.blocks) == keys("abcdef")
        assert [node.index.lookup([key]) for key in keys("abcdef")] == [1, 1, 1, 1, 1, 0]
        assert node.order() == "edcbazyxwvutsm"  # those that stay have not been used
        node.add("n")
        assert node.make_room() == ""
        node.poll()
        assert node.order() == "dcbazyxwvutsmn"
        assert node.counters.dropped_demotions == 0


def test_two_ends_that_leave_share_the_beginning_that_is_written() -> None:
    with arena(32) as node:
        node.add("ab")
        node.add("cd", parent="b")
        node.add("pq", parent="b")
        node.index.touch(keys("ab"))
        node.add("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        assert node.order()[:6] == "dcqpba"
        assert node.make_room() == "abcdpq"
        node.finish()
        assert node.order()[:2] == "ba"
        assert node.index.evictions == 4


def test_a_block_that_is_used_while_it_is_written_does_not_leave() -> None:
    with arena(8) as node:
        node.add("abcdefgh")
        assert node.make_room() == ""  # its prefix is more than half of the arena
        node.poll()
        assert node.order() == "gfedcba"
        node.add("i")
        node.tier.blocks.update(dict.fromkeys(keys("abcde"), b""))
        assert node.make_room() == "fg"
        loaded = node.index.lease(keys("fg"))
        assert loaded is not None
        node.index.release(loaded)
        node.finish()
        assert node.order() == "igfedcba"


def test_after_a_drop_nothing_is_looked_for_for_a_while(still_clock: Clock) -> None:
    with arena(8) as node:
        node.add("abc")
        node.add("vwxyz")
        node.tier.full = True
        node.make_room()
        node.poll()
        assert [node.index.lookup([key]) for key in keys("abc")] == [1, 1, 0]
        assert node.counters.dropped_demotions == 3
        node.tier.full = False
        node.add("m")
        assert node.make_room() == ""
        node.demoter.complete(keys("ab"))
        assert node.writing() == ""
        still_clock.skip(1.1)
        node.demoter.complete(keys("ab"))
        assert node.writing() == "ab"
        node.finish()
        assert node.offer("vwxyz") == "vwxyz"
        node.finish()


def test_a_prefix_whose_beginning_is_lost_leaves_unwritten() -> None:
    with arena(8) as node:
        blocks: Sequence[Block] = node.add("abcd")
        node.index.drop(node.index.lease([b"a"]) or [])
        node.index.release([blocks[0]])
        node.add("vwxyz")
        assert node.make_room() == ""
        node.poll()
        assert [node.index.lookup([key]) for key in keys("bcd")] == [1, 1, 0]
        assert node.order() == "cbzyxwv"
        assert node.index.evictions == 1


def test_what_is_written_when_the_arena_is_cleared_frees_its_slot() -> None:
    with arena(8) as node:
        node.add("abcdefgh"[:4])
        node.add("wxyz")
        node.make_room()
        node.offer("w")
        node.index.clear()
        node.tier.clear()
        node.finish()
        assert len(node.index) == 0
        assert node.tier.blocks == {}
