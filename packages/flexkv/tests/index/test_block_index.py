# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import mmap
import random
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from policy_checks import CheckedPolicy, UseOrderPolicy

from flexkv.eviction import (
    LRUPolicy,
    RequestContext,
)
from flexkv.index.block_index import BlockIndex, BlockState, block_index, publish
from flexkv.types.errors import ConfigError

NUMBERS = count()


def ready_index(slots: int, keys: list[bytes]) -> BlockIndex:
    """An index that has the blocks of a prefix."""
    index = block_index(slots, LRUPolicy())
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
    index = block_index(4, LRUPolicy())
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


def test_a_use_is_a_hit_if_a_request_was_scheduled() -> None:
    policy = CheckedPolicy(UseOrderPolicy())
    index = block_index(3, policy)
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


def test_each_block_of_a_store_builds_on_the_one_before_it() -> None:
    index = ready_index(6, [b"a", b"p"])
    keys = [b"a", b"b", b"c", b"p", b"q"]
    blocks = index.reserve_all(keys, [1, 2, 4], ())
    parents = [block.parent and block.parent.key for block in blocks]
    assert parents == [b"a", b"b", b"p"]


def test_prefixes_leave_whole_the_one_used_longest_ago_first() -> None:
    index = ready_index(6, [b"a", b"b", b"c"])
    add(index, b"p", b"q", b"r")
    index.touch([b"a", b"b", b"c"])
    assert evict(index, 6) == [b"r", b"q", b"p", b"c", b"b", b"a"]


def test_what_is_published_together_was_used_from_its_end() -> None:
    index = block_index(3, LRUPolicy())
    blocks = [index.reserve(key, None) for key in (b"a", b"p", b"x")]
    index.publish([block for block in blocks if block is not None])
    assert evict(index, 3) == [b"x", b"p", b"a"]


def test_every_block_is_found_whatever_left_beside_it() -> None:
    rng = random.Random(0)
    keys = [b"block %d" % i for i in range(2000)]
    there: set[bytes] = set()
    index = block_index(len(keys) // 2, LRUPolicy())
    for _ in range(20):
        for key in rng.sample(keys, 500):
            if key in there:
                leased = index.lease([key])
                assert leased is not None
                index.drop(leased)
                index.release(leased)
                there.remove(key)
            elif index.free_slots:
                add(index, key)
                there.add(key)
        assert index.present(keys) == [key in there for key in keys]


def test_a_prefix_that_has_left_for_a_lower_tier_holds_nothing() -> None:
    index = ready_index(3, [b"a", b"b"])
    for _ in range(2):
        leaving = index.lease_victim()
        assert leaving is not None
        index.retire(leaving)
    assert ready(index) == set()
    add(index, b"a", b"b", b"c")
    assert evict(index, 3) == [b"c", b"b", b"a"]


def test_an_unreadable_block_keeps_its_slot_until_its_last_reader_is_done() -> None:
    index = ready_index(1, [b"a"])
    first, second = index.lease([b"a"]), index.lease([b"a"])
    assert first is not None
    assert second is not None
    index.drop(first)
    index.release(first)
    assert index.free_slots == 0
    index.release(second)
    assert index.free_slots == 1


def test_a_lost_block_takes_those_with_it_that_build_on_it() -> None:
    index = ready_index(6, [b"a", b"b", b"c"])
    add(index, b"d", after=b"b")
    writing = index.reserve(b"e", b"d")
    leased = index.lease([b"b"])
    reader = index.lease([b"c"])
    assert writing is not None
    assert leased is not None
    assert reader is not None
    index.drop(leased)
    assert [block.key for block in index.blocks] == [b"a"]
    assert index.free_slots == 2, "the others are read or written"
    index.release(leased)
    index.release(reader)
    index.publish([writing])
    assert (len(index), index.free_slots) == (1, 5)


def test_an_error_of_the_policy_holds_no_block() -> None:
    errors = [MemoryError()]

    class Failing(UseOrderPolicy):
        def victim(self) -> bytes | None:
            if errors:
                raise errors.pop()
            return super().victim()

    index = block_index(1, Failing())
    add(index, b"a")
    with pytest.raises(MemoryError):
        index.reserve(b"b", b"a")
    assert evict(index, 1) == [b"a"]


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


def test_blocks_that_are_leased_over_and_over_take_no_more_memory() -> None:
    keys = [b"block %d" % i for i in range(1000)]
    index = block_index(len(keys), LRUPolicy())
    for key in keys:
        add(index, key)

    def lease(times: int) -> int:
        for _ in range(times):
            leased = index.lease(keys)
            assert leased is not None
            index.release(leased)
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = lease(100)
    assert lease(2000) - before < 8 << 20, "an entry takes 16 bytes"
    assert index.reserve(b"new", None) is not None
    assert index.present(keys) == [True] * 999 + [False]


def test_a_prefix_may_be_longer_than_the_stack_is_deep() -> None:
    keys = [b"block %d" % i for i in range(200_000)]
    index = block_index(len(keys), LRUPolicy())
    index.publish(index.reserve_all(keys, range(len(keys)), (0,)))
    (last,) = index.lease(keys[-1:]) or ()
    index.clear()
    index.sweep(len(keys))
    assert last.parent is not None
    del last
    references = sys.getrefcount(keys[0])
    assert references == 2, "no block has it any more"


def test_what_is_no_key_or_block_is_named() -> None:
    index: Any = ready_index(2, [b"a"])
    with pytest.raises(TypeError, match="a key is 'a'; allowed: bytes"):
        index.lookup(["a"])
    with pytest.raises(TypeError, match="'a' is no block"):
        index.release(["a"])
    with pytest.raises(IndexError):
        index.reserve_all([b"x"], [0], ())
    with pytest.raises(ValueError, match=r"-1 slots; allowed: 0 to 2147483647"):
        block_index(-1, LRUPolicy())


def test_what_a_policy_raises_is_raised() -> None:
    index = block_index(1, FailingPolicy())
    add(index, b"a")
    with pytest.raises(RuntimeError, match="broken by the test"):
        index.reserve(b"b", None)


def test_blocks_that_an_error_keeps_from_being_ready_give_their_slots_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = block_index(3, FailingPolicy())
    blocks = index.reserve_all([b"a", b"b", b"c"], [0, 1, 2], [0])
    monkeypatch.setattr(FailingPolicy, "broken", b"b")
    with pytest.raises(RuntimeError, match="broken by the test"):
        publish(index, blocks)
    assert index.lookup([b"a"]) == 1
    assert [block.state for block in blocks[1:]] == [BlockState.DROPPED] * 2
    assert (index.free_slots, b"b" in index, b"c" in index) == (2, False, False)


def test_a_policy_that_names_what_may_not_leave_is_refused() -> None:
    policy = FailingPolicy()
    policy.named = b"a"
    index = block_index(1, policy)
    add(index, b"a")
    leased = index.lease([b"a"])
    assert leased is not None
    with pytest.raises(KeyError, match="a"):
        index.reserve(b"b", None)
    assert index.lookup([b"a"]) == 1


class FailingPolicy(UseOrderPolicy):
    """Names one block, whether it may leave or not, or fails; and fails at the block `broken`."""

    named: bytes | None = None
    broken: bytes | None = None

    def inserted(self, key: bytes, after: bytes | None, fetched: bool = False) -> None:
        if key == self.broken:
            raise RuntimeError("broken by the test")
        super().inserted(key, after, fetched)

    def victim(self) -> bytes | None:
        if self.named is None:
            raise RuntimeError("broken by the test")
        return self.named


def test_without_the_kernels_an_error_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flexkv_kernels.block_index", None)
    with pytest.raises(ConfigError, match=r"pip install flexkv-kernels"):
        block_index(1, LRUPolicy())


@pytest.mark.parametrize("resets", [1, 7, 8, 9, 17])
def test_no_number_of_resets_brings_blocks_back(resets: int) -> None:
    index = ready_index(4, [b"a", b"b"])
    leased = index.lease([b"a"])
    assert leased is not None
    for _ in range(resets):
        index.clear()
        assert index.present([b"a", b"b", b"n"]) == [False] * 3
        assert index.lease([b"b"]) is None
        if b"n" not in index:
            add(index, b"n")
    assert leased[0].state is BlockState.DROPPED
    assert index.lookup([b"n"]) == 1
    index.release(leased)
    index.clear()
    index.sweep(4)
    assert index.free_slots == 4


def test_no_use_of_a_stale_block_that_ends_makes_it_ready() -> None:
    index = ready_index(6, [b"a", b"b", b"c"])
    leased = index.lease([b"a"])
    pinned = index.pin(b"b")
    victim = index.lease_victim()
    writing, failed = (index.reserve(key, None) for key in (b"w", b"f"))
    assert leased is not None
    assert pinned is not None
    assert victim is not None
    assert writing is not None
    assert failed is not None
    index.clear()
    index.publish([writing])
    index.abandon([failed])
    index.release(leased)
    index.unpin(pinned)
    index.retire(victim)
    assert index.present([b"a", b"b", b"c", b"w", b"f"]) == [False] * 5
    assert (len(index), index.pinned_blocks, index.evictions) == (0, 0, 0)
    assert (index.free_slots, index.stale_blocks) == (6, 0)


def test_a_slot_of_a_stale_block_is_taken_before_any_block_is_evicted() -> None:
    old, new = ([b"%d" % i for i in range(first, first + 100)] for first in (0, 50))
    index = ready_index(100, old)
    index.clear()
    add(index, *new[:10])
    assert index.lease_victim() is None
    add(index, *new[10:])
    assert index.evictions == 0
    assert index.present(new) == [True] * 100
    assert index.stale_blocks == 0
    victim = index.lease_victim()
    assert victim is not None
    assert victim.key == new[9], "the end of the prefix that was used first"
    index.release_unused([victim])


def test_a_policy_that_errs_at_a_stale_block_keeps_no_other_from_leaving() -> None:
    policy = ForgetfulPolicy()
    index = block_index(4, policy)
    add(index, b"a", b"b", b"c")
    index.clear()
    for _ in range(2):
        with pytest.raises(KeyError):
            index.sweep(4)
    assert index.sweep(4) == 0
    assert index.free_slots == 4
    index.settle([], [], [])
    add(index, b"a", b"b", b"c")
    assert index.lookup([b"a", b"b", b"c"]) == 3


class ForgetfulPolicy(UseOrderPolicy):
    """Errs each time it is asked about these blocks."""

    def evicted(self, key: bytes) -> None:
        if key in (b"a", b"b"):
            raise KeyError(key)
        super().evicted(key)


def test_stale_blocks_count_as_changed_at_last() -> None:
    index = ready_index(4, [b"a", b"b"])
    index.watch()
    assert index.changes == {b"a": True, b"b": True}
    index.changes.clear()
    index.clear()
    assert index.sweep(1) == 1
    assert len(index.changes) == 1
    assert index.sweep(4) == 0
    assert index.changes == {b"a": False, b"b": False}


def test_stale_blocks_of_before_the_watch_are_no_changes() -> None:
    index = ready_index(2, [b"a", b"b"])
    index.clear()
    index.watch()
    index.sweep(2)
    assert index.changes == {}
