# SPDX-License-Identifier: Apache-2.0
"""KVCache over a real arena; the test plays the workers and reports on the board."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from memory_tier import MemoryTier

from flexkv import KVCache
from flexkv.cache import _SWEPT_SLOTS
from flexkv.client import Ended, Hold, Reset, Transfer, TransferEnd
from flexkv.eviction import LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.host.board import CELLS
from flexkv.layout import BlockFormat
from flexkv.tiers.base import AttachedTier
from flexkv.transfer.copies import LOAD_RESERVE, DeviceCopy
from flexkv.types.changes import Changes, Medium
from flexkv.types.mover import Direction, Status
from flexkv.types.presence import Presence
from packages.conftest import Clock
from packages.inside import free_cells, index_of
from packages.tier_blocks import assert_no_slot_is_lost, ready_blocks

RANKS = 2


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


class Workers:
    """A cache of a few slots and the ranks that copy for it."""

    def __init__(self, slots: int) -> None:
        self.arena = Arena.create(ArenaSpec(BlockFormat(1, (64,) * RANKS), slots), threads=1)
        self.cache = KVCache(self.arena, LRUPolicy())

    def report(self, transfer: Transfer, *statuses: Status) -> None:
        for rank, status in enumerate(statuses):
            self.arena.board.report(transfer.cell, rank, status)

    def store(self, *names: str) -> None:
        prefix = keys(*names)
        transfer = self.cache.store(prefix, self.cache.missing(prefix))
        assert transfer is not None
        self.report(transfer, Status.DONE, Status.DONE)
        self.cache.poll()


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(3)
    yield made
    made.arena.close()


def test_a_suspended_cache_finds_loads_and_stores_nothing(workers: Workers) -> None:
    workers.store("a")
    workers.cache.reset(Reset.SUSPEND)
    assert workers.cache.lookup(keys("a")) == 0
    assert workers.cache.presence(keys("a")) == [Presence.ABSENT]
    assert workers.cache.load(keys("a")) is None
    assert workers.cache.store(keys("b"), [0]) is None


@pytest.mark.parametrize("kind", [Reset.CLEAR, Reset.EMPTY, Reset.RENEW])
def test_a_reset_of_all_blocks_ends_a_suspension(workers: Workers, kind: Reset) -> None:
    workers.store("a")
    workers.cache.reset(Reset.SUSPEND)
    workers.cache.reset(kind)
    assert not workers.cache.status.disabled
    assert workers.cache.lookup(keys("a")) == 0
    workers.store("a")
    assert workers.cache.lookup(keys("a")) == 1


def test_a_block_is_found_once_every_rank_has_stored_it(workers: Workers) -> None:
    cache = workers.cache
    transfer = cache.store(keys("a", "b"), [0, 1])
    assert transfer is not None
    assert transfer.direction is Direction.STORE
    assert len(set(transfer.slots)) == 2
    workers.report(transfer, Status.DONE)
    assert cache.poll() == []
    assert cache.lookup(keys("a", "b")) == 0
    workers.report(transfer, Status.DONE, Status.DONE)
    assert cache.poll() == [Ended(transfer.id, Direction.STORE, done=True)]
    assert cache.lookup(keys("a", "b")) == 2
    assert cache.counters.stored_bytes == 2 * 64 * RANKS


def test_a_held_store_is_published_once_it_is_confirmed(workers: Workers) -> None:
    cache = workers.cache
    held, other = cache.store(keys("a"), [0], held=True), cache.store(keys("b"), [0])
    assert held is not None
    assert other is not None
    for transfer in (held, other):
        workers.report(transfer, Status.DONE, Status.DONE)
    assert cache.poll() == [Ended(other.id, Direction.STORE, done=True)]
    assert cache.status.under_way.keys() == {held.id}
    assert (cache.lookup(keys("a")), cache.lookup(keys("b"))) == (0, 1)
    cache.end_transfer(held.id, TransferEnd.CONFIRM)
    assert cache.poll() == [Ended(held.id, Direction.STORE, done=True)]
    assert cache.lookup(keys("a")) == 1
    assert cache.status.under_way == {}


def test_discarded_blocks_of_a_store_are_never_found(workers: Workers) -> None:
    cache = workers.cache
    transfer = cache.store(keys("a", "b", "c"), [0, 1, 2])
    assert transfer is not None
    cache.end_transfer(transfer.id, TransferEnd.DISCARD, [1, 2])
    workers.report(transfer, Status.DONE, Status.DONE)
    assert cache.poll() == [Ended(transfer.id, Direction.STORE, done=True)]
    assert cache.presence(keys("a", "b", "c")) == [Presence.HOST, *[Presence.ABSENT] * 2]


def test_calls_for_a_transfer_that_has_ended_do_nothing(workers: Workers) -> None:
    cache = workers.cache
    transfer = cache.store(keys("a"), [0])
    assert transfer is not None
    workers.report(transfer, Status.DONE, Status.DONE)
    cache.poll()
    load = cache.load(keys("a"))
    assert load is not None
    for end in TransferEnd:
        cache.end_transfer(transfer.id, end)
    assert cache.status.under_way.keys() == {load.id}
    assert cache.lookup(keys("a")) == 1
    workers.report(load, Status.DONE, Status.DONE)
    assert cache.poll() == [Ended(load.id, Direction.LOAD, done=True)]
    assert_no_slot_is_lost(index_of(cache))


def test_a_transfer_says_which_key_lies_in_which_slot(workers: Workers) -> None:
    workers.store("a")
    store = workers.cache.store(keys("a", "b", "c"), [0, 1, 2])
    assert store is not None
    assert store.keys == keys("b", "c")
    workers.report(store, Status.DONE, Status.DONE)
    workers.cache.poll()
    load = workers.cache.load(keys("a", "b", "c"))
    assert load is not None
    assert load.slots[1:] == store.slots
    assert workers.cache.status.loading_blocks == 3
    blocks = ready_blocks(index_of(workers.cache))
    assert [blocks[key].slot for key in load.keys] == load.slots
    workers.report(load, Status.DONE, Status.DONE)
    workers.cache.poll()
    assert workers.cache.status.loading_blocks == 0


def test_a_failed_rank_means_never_found(workers: Workers) -> None:
    transfer = workers.cache.store(keys("a"), [0])
    assert transfer is not None
    workers.report(transfer, Status.DONE, Status.FAILED)
    assert workers.cache.poll() == [Ended(transfer.id, Direction.STORE, done=False)]
    assert workers.cache.lookup(keys("a")) == 0
    assert workers.cache.missing(keys("a")) == [0]
    assert workers.cache.counters.failed_stores == 1


def test_what_is_being_stored_is_not_stored_again(workers: Workers) -> None:
    assert workers.cache.store(keys("a"), [0]) is not None
    assert workers.cache.missing(keys("a", "b")) == [1]


def test_loaded_blocks_keep_their_slots_until_all_ranks_have_copied(workers: Workers) -> None:
    workers.store("a", "b", "c")
    load = workers.cache.load(keys("a", "b", "c"))
    assert load is not None
    assert workers.cache.store(keys("x"), [0]) is None
    workers.report(load, Status.DONE, Status.DONE)
    workers.cache.poll()
    assert workers.cache.store(keys("x"), [0]) is not None


def test_a_failed_load_drops_its_blocks(workers: Workers) -> None:
    workers.store("a", "b")
    load = workers.cache.load(keys("a", "b"))
    assert load is not None
    workers.report(load, Status.FAILED, Status.DONE)
    workers.cache.poll()
    assert workers.cache.lookup(keys("a", "b")) == 0
    assert workers.cache.counters.failed_loads == 1
    workers.store("a", "b", "c")  # their slots are free again


def test_a_store_leaves_out_a_key_that_has_a_slot_already(workers: Workers) -> None:
    workers.store("a")
    store = workers.cache.store(keys("b", "b", "c"), [0, 1, 2])
    assert store is not None
    assert store.keys == keys("b", "c")
    assert workers.cache.store(keys("a"), [0]) is None
    assert workers.cache.counters.refused_blocks == 0
    workers.report(store, Status.DONE, Status.DONE)
    assert workers.cache.poll() == [Ended(store.id, Direction.STORE, done=True)]
    assert workers.cache.lookup(keys("b", "c")) == 2
    workers.store("x", "y", "z")  # no slot is lost


def test_a_prefix_that_finds_no_slot_does_not_keep_others_from_being_stored(
    workers: Workers,
) -> None:
    workers.store("a", "b", "c")
    pinned = workers.cache.load(keys("a", "b", "c"))
    assert pinned is not None
    store = workers.cache.store(keys("a", "d", "e", "x", "y"), [1, 2, 3, 4], prefix_starts=(0, 3))
    assert store is None
    workers.report(pinned, Status.DONE, Status.DONE)
    workers.cache.poll()
    gone = workers.cache.store(keys("gone", "d", "e", "x", "y"), [1, 2, 3, 4], prefix_starts=(0, 3))
    assert gone is not None
    assert gone.keys == keys("x", "y")
    assert workers.cache.counters.refused_blocks == 4 + 2


def test_a_prefix_with_a_key_twice_is_loaded_and_pinned(workers: Workers) -> None:
    workers.store("a", "b")
    load = workers.cache.load(keys("a", "b", "a"))
    assert load is not None
    workers.cache.hold(Hold.PIN, keys("a", "a"))
    assert workers.cache.pinned_blocks == 1
    workers.report(load, Status.DONE, Status.DONE)
    assert workers.cache.poll() == [Ended(load.id, Direction.LOAD, done=True)]
    workers.store("x", "y")
    assert [workers.cache.lookup([key]) for key in keys("a", "b", "x", "y")] == [1, 0, 1, 1]


def test_a_load_of_an_absent_block_is_a_miss(workers: Workers) -> None:
    workers.store("a")
    assert workers.cache.load(keys("a", "b")) is None


def test_a_long_prefix_keeps_its_beginning_in_a_small_arena(workers: Workers) -> None:
    prefix = keys(*"abcdefgh")
    transfer = workers.cache.store(prefix, workers.cache.missing(prefix))
    assert transfer is not None
    workers.report(transfer, Status.DONE, Status.DONE)
    workers.cache.poll()
    assert workers.cache.lookup(prefix) == 3
    assert workers.cache.store(prefix, workers.cache.missing(prefix)) is None
    assert workers.cache.lookup(prefix) == 3
    assert workers.cache.counters.refused_blocks == 10


def test_a_new_prefix_pushes_out_an_old_one(workers: Workers) -> None:
    workers.store("a", "b", "c")
    workers.store("x", "y", "z")
    assert workers.cache.lookup(keys("x", "y", "z")) == 3
    assert workers.cache.lookup(keys("a")) == 0
    assert workers.cache.counters.evicted_blocks == 3


def test_clear_with_transfers_under_way_publishes_nothing(workers: Workers) -> None:
    workers.store("a")
    load = workers.cache.load(keys("a"))
    store = workers.cache.store(keys("b"), [0])
    assert load is not None
    assert store is not None
    workers.cache.reset(Reset.CLEAR)
    for transfer in (load, store):
        workers.report(transfer, Status.DONE, Status.DONE)
    workers.cache.poll()
    assert workers.cache.lookup(keys("a")) == workers.cache.lookup(keys("b")) == 0
    assert workers.cache.ready_blocks == 0
    workers.store("x", "y", "z")


def test_polls_report_and_free_all_blocks_of_before_a_reset() -> None:
    spec = ArenaSpec(BlockFormat(1, (64,)), 3 * _SWEPT_SLOTS)
    names = [b"%d" % i for i in range(spec.num_slots)]
    with contextlib.closing(Arena.create(spec, threads=1)) as arena:
        cache = KVCache(arena, LRUPolicy())
        store = cache.store(names, range(len(names)))
        assert store is not None
        arena.board.report(store.cell, 0, Status.DONE)
        cache.poll()
        cache.watch()
        assert all_changes(cache) == [Changes(Medium.HOST, [], names)]
        cache.reset(Reset.CLEAR)
        for _ in range(3):
            assert cache.busy
            cache.poll()
        assert not cache.busy
        assert all_changes(cache) == [Changes(Medium.HOST, names, [])]
        assert cache.ready_blocks == 0


def all_changes(cache: KVCache) -> list[Changes]:
    return list(itertools.chain.from_iterable(iter(cache.drain_changes, [])))


class FailingTier(MemoryTier):
    """Cannot be cleared as long as it is told so."""

    fails = True

    def clear(self) -> None:
        if self.fails:
            raise OSError(errno.EIO, "no answer")
        super().clear()


def test_a_clear_that_fails_leaves_nothing_to_be_found_until_one_succeeds() -> None:
    with contextlib.closing(Arena.create(ArenaSpec(BlockFormat(1, (64,)), 3), threads=1)) as arena:
        tier = FailingTier()
        cache = KVCache(arena, LRUPolicy(), [AttachedTier(tier)])
        transfer = cache.store(keys("a"), [0])
        assert transfer is not None
        with pytest.raises(OSError, match="no answer"):
            cache.reset(Reset.CLEAR)
        arena.board.report(transfer.cell, 0, Status.DONE)
        cache.poll()
        assert cache.lookup(keys("a")) == 0
        assert cache.presence(keys("a")) == [Presence.ABSENT]
        assert cache.load(keys("a")) is cache.fetch(keys("a")) is None
        assert cache.store(keys("b"), [0]) is None
        tier.fails = False
        cache.reset(Reset.CLEAR)
        assert cache.store(keys("a"), [0]) is not None


def test_stores_leave_room_for_loads_and_a_full_board_is_a_miss() -> None:
    workers = Workers(CELLS + 1)
    try:
        workers.store("a")
        for i in range(CELLS - LOAD_RESERVE):
            assert workers.cache.store([i.to_bytes(4, "big")], [0]) is not None
        assert workers.cache.store(keys("one too many"), [0]) is None
        assert workers.cache.missing(keys("one too many")) == [0]
        assert workers.cache.counters.refused_blocks == 1
        for _ in range(LOAD_RESERVE):
            assert workers.cache.load(keys("a")) is not None
        assert workers.cache.load(keys("a")) is None
        assert ready_blocks(index_of(workers.cache))[b"a"].leases == LOAD_RESERVE
    finally:
        workers.arena.close()


def test_a_store_takes_the_slots_of_pins_whose_time_is_over(clock: Clock) -> None:
    workers = Workers(4)
    try:
        workers.store("a", "b", "c", "d")
        workers.cache.hold(Hold.PIN, keys("a", "b"), "me", 60)
        clock.skip(30)
        workers.store("w", "x", "y", "z")
        assert workers.cache.lookup(keys("a", "b")) == 2
        clock.skip(31)
        workers.store("w", "x", "y", "z")
        assert workers.cache.lookup(keys("w", "x", "y", "z")) == 4
    finally:
        workers.arena.close()


def test_a_reset_ends_all_pins() -> None:
    workers = Workers(4)
    try:
        workers.store("a", "b")
        workers.cache.hold(Hold.PIN, keys("a", "b"), "me")
        workers.cache.reset(Reset.CLEAR)
        assert workers.cache.pinned_blocks == 0
        workers.store("x", "y")
        workers.cache.hold(Hold.PIN, keys("x", "y"), "other")
        assert workers.cache.pinned_blocks == 2
    finally:
        workers.arena.close()


def test_an_error_at_the_end_of_one_transfer_loses_no_other(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, blocks of the other would be written for ever, and nobody would learn of its
    end."""
    cache = workers.cache
    first, second = cache.store(keys("a"), [0]), cache.store(keys("b"), [0])
    assert first is not None
    assert second is not None
    for transfer in (first, second):
        workers.report(transfer, Status.DONE, Status.DONE)
    finish = cache._finish_store

    def fail(copy: DeviceCopy, count: int) -> None:
        if copy.transfer is first:
            raise MemoryError
        finish(copy, count)

    ended: list[Ended] = []
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_finish_store", fail)
        with contextlib.suppress(MemoryError):
            ended += cache.poll()
        ended += cache.poll()
    assert Ended(second.id, Direction.STORE, done=True) in ended
    assert cache.lookup(keys("b")) == 1


class CacheModel(RuleBasedStateMachine):
    """The slots hold the key that was stored last, as bytes would: a hit must find its own."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = Workers(4)
        self.cache = self.workers.cache
        self.bytes_of_slot: dict[int, bytes] = {}
        self.pending: list[Transfer] = []

    def teardown(self) -> None:
        for transfer in self.pending:
            self.cache.end_transfer(transfer.id, TransferEnd.CANCEL)
        index = index_of(self.cache)
        assert sorted(free_cells(self.workers.arena.board)) == list(range(CELLS))
        assert_no_slot_is_lost(index)
        assert all(block.leases == 0 for block in ready_blocks(index).values())
        assert self.cache.status.loading_blocks == 0
        self.workers.arena.close()

    @rule(length=st.integers(1, 6), chain=st.integers(0, 2))
    def store(self, length: int, chain: int) -> None:
        prefix = [bytes([chain, i]) for i in range(length)]
        missing = self.cache.missing(prefix)
        transfer = self.cache.store(prefix, missing) if missing else None
        if transfer is not None:
            self.pending.append(transfer)
            for slot in transfer.slots:
                self.bytes_of_slot[slot] = b"torn"

    @rule(length=st.integers(1, 6), chain=st.integers(0, 2))
    def load(self, length: int, chain: int) -> None:
        prefix = [bytes([chain, i]) for i in range(length)]
        prefix = prefix[: self.cache.lookup(prefix)]
        if prefix:
            transfer = self.cache.load(prefix)
            assert transfer is not None
            self.pending.append(transfer)

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), status=st.sampled_from([Status.DONE, Status.DONE, Status.FAILED]))
    def finish(self, data: st.DataObject, status: Status) -> None:
        transfer = data.draw(st.sampled_from(self.pending))
        self.pending.remove(transfer)
        good = status is Status.DONE
        for key, slot in zip(transfer.keys, transfer.slots, strict=True):
            if transfer.direction is Direction.STORE:
                self.bytes_of_slot[slot] = key if good else b"torn"
            else:
                assert self.bytes_of_slot[slot] == key
        self.workers.report(transfer, Status.DONE, status)
        assert self.cache.poll() == [Ended(transfer.id, transfer.direction, good)]

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(self.pending))
        self.pending.remove(transfer)
        self.cache.end_transfer(transfer.id, TransferEnd.CANCEL)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        """Whatever a store's workers say of it after that, its bytes are not to be found."""
        transfer = data.draw(st.sampled_from(self.pending))
        if transfer.direction is Direction.STORE:
            self.pending.remove(transfer)
            self.cache.end_transfer(transfer.id, TransferEnd.DISCARD)
            self.workers.report(transfer, Status.DONE, Status.DONE)
            assert self.cache.poll() == [Ended(transfer.id, transfer.direction, done=True)]

    @rule()
    def clear(self) -> None:
        self.cache.reset(Reset.CLEAR)

    @invariant()
    def every_hit_finds_its_own_bytes(self) -> None:
        for chain in range(3):
            for i in range(6):
                key = bytes([chain, i])
                if self.cache.lookup([key]):
                    assert self.bytes_of_slot[ready_blocks(index_of(self.cache))[key].slot] == key


TestCache = CacheModel.TestCase
TestCache.settings = settings(max_examples=50)
