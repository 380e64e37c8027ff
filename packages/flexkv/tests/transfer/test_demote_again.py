# SPDX-License-Identifier: Apache-2.0
"""Keys that get another block while the first one is on its way to a lower tier: after a reset, or
after a load of the first block has failed."""

from __future__ import annotations

import pytest
from demote_arena import arena, keys, long_prefix
from memory_tier import MemoryTier, QueriedMemoryTier

from flexkv.eviction import LRUPolicy
from flexkv.index.block_index import block_index
from flexkv.tiers.job import Outcome
from flexkv.transfer.demote import _BLOCKS, _LEAVING_SHARE, Demoter, EvictionWriteback
from flexkv.transfer.sources import Source
from packages.inside_tiers import demoting, leaving_blocks, waiting_writes
from packages.tier_blocks import ready_blocks


@pytest.mark.parametrize("old_first", [True, False])
def test_a_block_stored_again_after_a_reset_is_written_again_before_it_leaves(
    old_first: bool,
) -> None:
    with arena(8) as node:
        node.add("ab")
        assert node.offer("ab") == "ab"
        node.clear()
        node.add("ab")
        node.fill()
        assert node.make_room() == "abab"
        for task in node.tier.tasks[:: 1 if old_first else -1]:
            node.tier.end(task)
            node.poll()
        assert node.index.evictions == 1
        assert sorted(node.tier.blocks) == keys("ab")


def test_an_old_write_ends_no_write_since_a_reset() -> None:
    with arena() as node:
        node.add("a")
        node.offer("a")
        node.clear()
        node.add("ab")
        assert node.offer("a") == "aa"
        node.tier.end(node.tier.tasks[0])
        node.poll()
        assert b"a" in demoting(node.demoter)
        assert node.offer("a") == "a"  # no second time
        assert node.offer("b") == "ab"  # its parent is being written
        node.finish()


def test_a_block_is_not_written_behind_a_write_from_before_a_reset() -> None:
    with arena() as node:
        node.add("a")
        node.offer("a")
        node.clear()
        node.add("ab")
        assert node.offer("b") == "a"
        assert node.counters.dropped_demotions == 1
        node.finish()
        assert node.tier.blocks == {}


def test_the_old_write_of_a_lost_block_does_not_keep_its_successor() -> None:
    with arena(8) as node:
        node.add("a")
        assert node.offer("a") == "a"
        node.lose("a")
        node.add("a")
        node.fill()
        assert node.make_room() == "a"
        assert (node.index.evictions, node.index.lookup(keys("a"))) == (1, 0)
        node.finish()
        assert sorted(node.tier.blocks) == keys("a")


def test_a_block_that_leaves_stays_if_another_builds_on_it_meanwhile() -> None:
    with arena(16) as node:
        node.add("ab")
        node.fill()
        assert node.make_room() == "ab"
        node.add("c", parent="b")
        node.finish()
        assert node.index.lookup(keys("abc")) == 3


@pytest.mark.parametrize("again", [True, False])
def test_a_block_that_is_lost_while_it_waits_to_leave_frees_its_slot(again: bool) -> None:
    names = long_prefix(3)
    with arena(len(names) * _LEAVING_SHARE) as node:
        node.add(names)
        node.fill()
        node.make_room()
        node.add("!")
        node.make_room()
        # Behind the end of the long prefix, whose beginning is looked for.
        leaving = [block.key.decode() for block in leaving_blocks(node.leaving)]
        assert leaving == [names[-1], "\u4e00"]
        node.lose(leaving[-1])
        if again:
            node.add(leaving[-1])
        for _ in range(4):
            node.write()
        assert node.writing() == names
        node.finish()
        assert node.index.lookup(keys(leaving[-1])) == again


def test_blocks_before_one_that_leaves_are_not_offered_again() -> None:
    names = long_prefix(2)
    with arena(len(names) * _LEAVING_SHARE) as node:
        node.add(names)
        node.fill()
        node.make_room()
        assert set(demoting(node.demoter)) >= set(keys(names[-_BLOCKS:]))
        node.demoter.offer(keys(names))
        node.demoter.write_waiting(all_blocks=True)
        assert sorted(node.writing()) == sorted(names)
        node.finish()


def test_blocks_wait_behind_those_that_are_looked_for() -> None:
    """The block before them is found, but not yet written."""
    names = long_prefix(2)
    with arena(len(names) * _LEAVING_SHARE) as node:
        node.add(names)
        node.fill()
        node.make_room()
        child = "!"
        node.add(child, parent=names[-1])
        assert child not in node.offer(child)
        while waiting_writes(node.demoter):
            node.write()
        assert node.writing() == names + child
        node.finish()


def test_blocks_whose_beginning_is_too_long_to_be_written_may_be_offered() -> None:
    names = long_prefix(2)
    with arena(3 * _BLOCKS) as node:
        node.add(names)
        node.fill()
        for _ in range(3):
            node.make_room()
        assert node.writing() == ""
        assert not any(block.leases for block in ready_blocks(node.index).values())
        assert set(demoting(node.demoter)).isdisjoint(keys(names))


@pytest.mark.parametrize("is_reset", [True, False])
def test_what_a_reset_tier_gets_from_before_is_not_remembered(is_reset: bool) -> None:
    memory = MemoryTier()
    source = Source(QueriedMemoryTier(memory, 1.0), 0, 1.0)
    index = block_index(8, LRUPolicy())
    views = memoryview(bytearray(8))
    writeback = EvictionWriteback(index)
    demoter = Demoter(index, lambda slot: views[slot : slot + 1], source, writeback)
    block = index.reserve(b"a", None)
    assert block is not None
    index.publish([block])
    demoter.offer(keys("a"))
    demoter.write_waiting()
    if is_reset:
        index.clear()
        demoter.clear()
        memory.clear()
        source.clear()
    memory.end_all(Outcome.DONE)
    for result in memory.poll():
        demoter.take(result)
    assert list(source.contains(keys("a"))) == [None if is_reset else True]
    assert block.leases == 0


def test_no_block_waits_for_one_that_a_tier_raised_at() -> None:
    """Otherwise, all blocks behind it would be leased for ever, and the engine would never rest."""
    with arena(16) as node:
        first, write = node.add("ab"), node.tier.write

        def fail(*_: object) -> int:
            raise MemoryError

        node.tier.write = fail  # type: ignore[assignment]
        with pytest.raises(MemoryError):
            node.offer("ab")
        node.tier.write = write  # type: ignore[method-assign]
        later = node.add("cde", parent="b")
        node.offer("cde")
        assert not node.demoter.busy
        assert [block.leases for block in later] == [0, 0, 0]
        node.index.release_unused(first)  # the tier may read them, so they were still leased
