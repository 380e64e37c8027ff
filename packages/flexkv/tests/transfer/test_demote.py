# SPDX-License-Identifier: Apache-2.0
"""What is written to a lower tier: never a block without the one before it."""

from __future__ import annotations

import pytest
from demote_arena import arena, keys, long_prefix

from flexkv.tiers.job import Outcome
from flexkv.transfer.demote import _BLOCKS, _LEAVING_SHARE
from flexkv.types.backlog import BACKLOG_SHARE
from packages.conftest import Clock
from packages.inside_tiers import demoting, leaving_blocks
from packages.tier_blocks import ready_blocks


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


def test_each_poll_begins_to_write_some_of_a_long_prefix() -> None:
    names = long_prefix(3)
    with arena(2 * len(names)) as node:
        node.add(names)
        assert node.offer(names) == names[:_BLOCKS]
        node.demoter.offer(keys(names[-1]))  # it waits already
        assert all(block.leases for block in ready_blocks(node.index).values())
        assert set(demoting(node.demoter)) >= set(keys(names))
        node.demoter.write_waiting()
        assert node.writing() == names[: 2 * _BLOCKS]
        node.finish()
        assert node.demoter.busy
        node.demoter.write_waiting()
        assert node.writing() == names[2 * _BLOCKS :]
        node.finish()
        assert node.counters.demoted_blocks == len(names)


def test_more_of_a_long_backlog_begins_in_each_poll() -> None:
    names = long_prefix(128)
    with arena(2 * len(names)) as node:
        node.add(names)
        node.offer(names)
        before = len(node.writing())
        node.demoter.write_waiting()
        assert len(node.writing()) - before == (len(names) - before) // BACKLOG_SHARE > _BLOCKS
        node.demoter.write_waiting(all_blocks=True)
        assert node.writing() == names
        node.finish()


def test_at_most_half_of_the_arena_waits() -> None:
    names = long_prefix(6)
    with arena(8 * _BLOCKS) as node:
        node.add(names)
        assert node.offer(names) == names[: 2 * _BLOCKS]
        assert node.write() == names[: 3 * _BLOCKS]
        node.demoter.write_waiting(all_blocks=True)
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
        node.clear()
        node.demoter.write_waiting()
        assert node.writing() == names[:_BLOCKS]
        node.finish()


def test_a_gap_in_the_arena_ends_what_is_written() -> None:
    with arena() as node:
        node.add("abcd")
        node.lose("b")
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


def test_each_poll_chooses_some_of_many_blocks_that_leave() -> None:
    names = long_prefix(3 * _LEAVING_SHARE)
    with arena(len(names)) as node:
        for name in names:
            node.add(name)
        for parts in (1, 2, 3, 3):
            assert sorted(node.make_room()) == sorted(names[: parts * _BLOCKS])
        node.finish()
        assert node.index.evictions == 3 * _BLOCKS


def test_more_of_many_blocks_leave_in_each_poll() -> None:
    names = long_prefix(2 * BACKLOG_SHARE * _LEAVING_SHARE)
    with arena(len(names)) as node:
        for name in names:
            node.add(name)
        goal = len(names) // _LEAVING_SHARE
        node.make_room()
        assert len(leaving_blocks(node.leaving)) == goal // BACKLOG_SHARE > _BLOCKS
        node.demoter.write_waiting(all_blocks=True)
        node.finish()


def test_each_poll_looks_for_some_of_the_blocks_before_one_that_leaves() -> None:
    names = long_prefix(3)
    with arena(len(names) * _LEAVING_SHARE) as node:
        node.add(names)
        node.fill()
        assert node.make_room() == ""
        assert node.demoter.busy
        leased = {block.key.decode() for block in ready_blocks(node.index).values() if block.leases}
        assert leased == set(names[-_BLOCKS:])
        assert node.write() == ""
        for parts in (1, 2, 3):
            assert node.write() == names[: parts * _BLOCKS]
        node.finish()
        assert node.index.evictions == 1


@pytest.mark.parametrize("polls", [0, 1, 3])
def test_blocks_that_leave_when_the_arena_is_cleared_are_not_written(polls: int) -> None:
    names = long_prefix(2)
    with arena(len(names) * _LEAVING_SHARE) as node:
        node.add(names)
        node.fill()
        node.leaving.make_room([node.demoter])
        for _ in range(polls):
            node.write()
        begun = len(node.writing())
        node.clear()
        assert len(node.write()) == begun
        node.finish()


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
        assert node.write() == ""
        still_clock.skip(1.1)
        node.demoter.complete(keys("ab"))
        assert node.write() == "ab"
        node.finish()
        assert node.offer("vwxyz") == "vwxyz"
        node.finish()


def test_a_prefix_whose_beginning_is_lost_leaves_unwritten() -> None:
    with arena(8) as node:
        first = node.index.reserve(b"a", None)
        assert first is not None
        node.add("bcd", parent="a")
        node.index.abandon([first])
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
        node.clear()
        node.finish()
        assert len(node.index) == 0
        assert node.tier.blocks == {}


def test_a_block_whose_predecessors_are_looked_for_gives_way() -> None:
    names = long_prefix(2)
    with arena(len(names) * _LEAVING_SHARE) as node:
        node.add(names)
        node.fill()
        node.make_room()
        assert node.drop_newest() == names[-1]
        assert node.counters.dropped_demotions == 1
        assert node.index.evictions == 1


def test_the_newest_blocks_that_wait_give_way_and_leave() -> None:
    names = long_prefix(3)
    with arena(len(names) * _LEAVING_SHARE) as node:
        node.add(names)
        node.fill()
        for _ in range(3):
            node.make_room()
        assert node.writing() == names[:_BLOCKS]
        assert node.drop_newest() == names[: -_BLOCKS - 1 : -1]
        assert node.index.evictions == 1
        assert node.drop_newest() == names[-_BLOCKS - 1 : _BLOCKS - 1 : -1]
        assert node.drop_newest() == ""
        node.finish()


def test_a_block_that_gives_way_makes_room() -> None:
    names = long_prefix(2)
    with arena(len(names) * _LEAVING_SHARE, asked=True) as node:
        node.add(names)
        node.fill()
        node.make_room()
        while node.index.free_slots:
            node.add(chr(0x3400 + node.index.free_slots))
        others = node.index.lease(
            [key for key in ready_blocks(node.index) if ord(key.decode()) > 256]
        )
        assert not node.index.has_room
        assert node.demoter.reclaim()
        assert node.index.free_slots == node.index.evictions == 1
        assert node.index.has_room
        node.index.release(others or [])
