# SPDX-License-Identifier: Apache-2.0
"""What stands for blocks in Python, also once they have left and their slots have other blocks."""

from __future__ import annotations

import gc

import pytest

from flexkv.eviction import POLICIES, LRUPolicy
from flexkv.index.block_index import BlockIndex, BlockState, block_index
from flexkv.tiers.base import MAX_KEY_BYTES


def full(*keys: bytes) -> BlockIndex:
    """An index that has just room for the blocks of a prefix, and has them."""
    index = block_index(len(keys), LRUPolicy())
    index.publish(index.reserve_all(keys, range(len(keys)), (0,)))
    return index


def test_the_same_object_stands_for_a_block_as_long_as_it_is_kept() -> None:
    index = full(b"a", b"b")
    blocks = list(index.blocks)
    assert index.pin(b"b") is blocks[1]
    assert blocks[1].parent is blocks[0]
    leased = index.lease([b"a", b"b"])
    assert leased is not None
    assert [one is other for one, other in zip(leased, blocks, strict=True)] == [True, True]
    assert [block.leases for block in blocks] == [1, 1]


def test_a_block_that_has_left_keeps_its_key_and_is_dropped() -> None:
    index = full(b"a", b"b")
    first, last = index.blocks
    index.publish(index.reserve_all([b"x", b"y"], [0, 1], (0,)))
    assert index.present([b"a", b"b", b"x", b"y"]) == [False, False, True, True]
    assert [first.key, last.key] == [b"a", b"b"]
    assert {first.slot, last.slot} == {0, 1}
    assert {first.state, last.state} == {BlockState.DROPPED}
    assert (last.parent, last.parent_key, last.leases) == (None, None, 0)
    assert [index.holds(each) for each in (first, last, *index.blocks)] == [
        False,
        False,
        True,
        True,
    ]


def test_calls_skip_blocks_whose_slots_have_others() -> None:
    index = full(b"a", b"b")
    kept = [*index.blocks]
    row = index.collect(kept)
    index.publish(index.reserve_all([b"x", b"y"], [0, 1], (0,)))
    assert index.lease([b"x", b"y"]) is not None
    pinned = index.pin(b"x")
    assert pinned is not None
    for blocks in (kept, row):
        index.release(blocks)
        index.release_unused(blocks)
        index.abandon(blocks)
        index.discard(blocks)
        index.drop(blocks)
        index.publish(blocks)
        assert len(index.collect(blocks)) == 0
    for block in (*kept, row[0]):
        index.unpin(block)
        index.retire(block)
    assert [block.leases for block in index.blocks] == [1, 1]
    assert (len(index), index.free_slots, index.pinned_blocks) == (2, 0, 1)
    assert (len(row), row.keys, sorted(row.slots)) == (2, [b"", b""], [0, 1])
    assert [block.state for block in row] == [BlockState.DROPPED] * 2


def test_a_row_of_blocks_is_a_sequence() -> None:
    keys = [b"%d" % i for i in range(5)]
    index = block_index(5, LRUPolicy())
    row = index.reserve_all(keys, range(5), (0,))
    assert row.keys == [block.key for block in row] == keys
    assert row.slots == [block.slot for block in row]
    assert row[1:4:2].keys == [keys[1], keys[3]]
    assert row[-1].key == keys[4]
    with pytest.raises(IndexError):
        row[5]
    with pytest.raises(TypeError):
        row["a"]  # type: ignore[call-overload]
    index.publish(row[:2])
    index.abandon(row[2:])
    assert (index.lookup(keys), index.free_slots) == (2, 3)
    assert index.collect([row[1], row[0]]).keys == [keys[1], keys[0]]


def test_a_block_behind_one_that_failed_has_no_other_in_its_place() -> None:
    index = block_index(2, LRUPolicy())
    first, last = index.reserve_all([b"a", b"b"], [0, 1], (0,))
    index.publish([last])
    index.abandon([first])
    assert last.parent is first
    assert (first.state, last.parent_key) == (BlockState.DROPPED, b"a")
    other = index.reserve(b"x", None)
    assert other is not None
    assert other.slot == first.slot
    assert (last.parent, last.parent_key) == (None, b"a")
    assert (other.parent, other.parent_key) == (None, None)
    index.publish([other])
    leased = index.lease([b"x"])
    assert leased is not None
    assert index.reserve(b"y", None) is not None, (
        "the end of the lost prefix left, and freed nobody"
    )
    assert index.present([b"x", b"b"]) == [True, False]
    index.release(leased)
    assert index.has_room


def test_a_block_of_another_index_is_refused() -> None:
    one, other = full(b"a"), full(b"a")
    for blocks in (list(other.blocks), other.blocks):
        with pytest.raises(TypeError, match="no block of this index"):
            one.release(blocks)
    with pytest.raises(TypeError, match="no block of this index"):
        one.holds(next(iter(other.blocks)))


def test_blocks_outlive_their_index() -> None:
    index = full(b"a", b"b")
    block, row = next(iter(index.blocks)), index.blocks
    del index
    gc.collect()
    assert row.keys == [b"a", b"b"], "a row keeps the index"
    del row
    gc.collect()
    assert (block.key, block.state, block.parent) == (b"a", BlockState.DROPPED, None)


def test_a_key_is_as_long_as_a_record_allows() -> None:
    index = block_index(1, LRUPolicy())
    with pytest.raises(
        ValueError, match=f"{MAX_KEY_BYTES + 1} bytes; allowed: up to {MAX_KEY_BYTES}"
    ):
        index.reserve(bytes(MAX_KEY_BYTES + 1), None)
    longest = b"k" * MAX_KEY_BYTES
    block = index.reserve(longest, None)
    assert block is not None
    index.publish([block])
    assert block.key == longest
    assert (index.lookup([longest]), index.lookup([longest[1:]])) == (1, 0)


def test_a_policy_of_an_index_is_told_of_blocks_by_it_alone() -> None:
    policy = POLICIES["hazard"](2)
    index = block_index(2, policy)
    index.publish(index.reserve_all([b"a", b"b"], [0, 1], (0,)))
    calls = (
        lambda: policy.inserted(b"c", None),
        lambda: policy.held(b"a"),
        lambda: policy.released(b"a", 1),
        lambda: policy.evicted(b"a"),
        policy.victim,
        policy.clear,
        lambda: block_index(2, policy),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="the policy is an index's"):
            call()
    index.publish(index.reserve_all([b"x", b"y"], [0, 1], (0,)))
    assert index.lookup([b"x", b"y"]) == 2
    del index
    gc.collect()
    assert policy.victim() is None
    policy.inserted(b"c", None)
    with pytest.raises(ValueError, match="has blocks"):
        block_index(2, policy)
