# SPDX-License-Identifier: Apache-2.0
"""Fetches over tiers whose every read ends as the test says: which blocks come, which are held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

import pytest
from memory_tier import MemoryTier

from flexkv import KVCache
from flexkv.client import Reset, TransferEnd
from flexkv.eviction import LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.job import Outcome, Priority
from flexkv.types.admission import ADMISSIONS
from flexkv.types.mover import Status
from packages.conftest import Clock
from packages.inside import assert_no_read, below_of, index_of
from packages.seen_fetch import SeenFetch, see
from packages.tier_blocks import ready_blocks, writing_blocks

FORMAT = BlockFormat(1, (4096,))
STALL_SECONDS = 5.0
FAULTS = (Outcome.FAILED, Outcome.DAMAGED, Outcome.MISSING)


def keys(names: str) -> list[bytes]:
    return [name.encode() for name in names]


def content(key: bytes) -> bytes:
    return key * FORMAT.slot_bytes


class Node:
    """A cache over `tiers` tiers, of which each has the blocks named."""

    def __init__(self, *below: str, slots: int = 8) -> None:
        self.arena = Arena.create(ArenaSpec(FORMAT, slots), threads=1)
        self.tiers = [MemoryTier() for _ in below]
        for tier, names in zip(self.tiers, below, strict=True):
            tier.blocks = {key: content(key) for key in keys(names)}
        # Nothing is demoted: which tier has what stays as it is.
        second_hit = ADMISSIONS["second_hit"]
        tiers = [AttachedTier(tier, second_hit, STALL_SECONDS) for tier in self.tiers]
        self.cache = KVCache(self.arena, LRUPolicy(), tiers)

    def store(self, names: str) -> None:
        prefix = keys(names)
        transfer = self.cache.store(prefix, self.cache.missing(prefix))
        assert transfer is not None
        for key, slot in zip(transfer.keys, transfer.slots, strict=True):
            with self.arena.slot_view(slot) as view:
                view[:] = content(key)
        self.arena.board.report(transfer.cell, 0, Status.DONE)
        self.cache.poll()

    def fetch(self, names: str, *, queued: bool = False, priority: int = 0) -> SeenFetch:
        fetch = see(self.cache, keys(names), queued=queued, priority=priority)
        assert fetch is not None
        return fetch

    def ready(self) -> str:
        """Names of the blocks in the arena, each of which has its own bytes."""
        for key, block in ready_blocks(index_of(self.cache)).items():
            with self.arena.slot_view(block.slot) as view:
                assert bytes(view) == content(key)
        return "".join(sorted(key.decode() for key in ready_blocks(index_of(self.cache))))

    def leased(self) -> dict[str, int]:
        ready = ready_blocks(index_of(self.cache)).values()
        return {block.key.decode(): block.leases for block in ready if block.leases}

    def assert_at_rest(self) -> None:
        """Nothing is under way, leased or lost."""
        index = index_of(self.cache)
        self.cache.poll()  # what has come is offered to faster tiers
        assert not (self.cache.busy)
        assert_no_read(self.cache)
        assert not (writing_blocks(index))
        assert not (self.leased())
        assert index.free_slots + len(index) == index.num_slots

    def close(self) -> None:
        for tier in self.tiers:
            tier.tasks.clear()
        self.arena.close()


Make = Callable[..., Node]


@pytest.fixture
def make(at_end: ExitStack) -> Make:
    return lambda *below, **options: at_end.enter_context(closing(Node(*below, **options)))


def read_keys(tier: MemoryTier) -> list[bytes]:
    return [task.key for task in tier.tasks]


def test_blocks_are_leased_as_they_come_and_released_at_the_end(make: Make) -> None:
    node = make("abc")
    fetch = node.fetch("abcd")
    (tier,) = node.tiers
    assert read_keys(tier) == keys("abc")
    tier.end(tier.of(b"b"))
    node.cache.poll()
    assert (fetch.arrived, fetch.done, node.leased()) == (0, False, {"b": 1})
    tier.end_all()
    node.cache.poll()
    assert (fetch.arrived, fetch.done, node.leased()) == (3, True, {"a": 1, "b": 1, "c": 1})
    node.cache.end_fetch(fetch)
    node.cache.end_fetch(fetch)
    assert node.ready() == "abc"
    node.assert_at_rest()


def test_reads_have_the_priority_of_their_request(make: Make) -> None:
    node = make("abcdefg", "g", slots=16)
    first, second = node.tiers
    node.fetch("ab", queued=True)
    node.fetch("cd", queued=True, priority=9)
    node.fetch("ef", priority=-9)
    node.fetch("g", priority=4)
    turns = {task.key.decode(): (task.priority, task.turn) for task in first.tasks}
    assert turns == {
        **dict.fromkeys("ab", (Priority.PREFETCH, 0)),
        **dict.fromkeys("cd", (Priority.PREFETCH, -9)),
        **dict.fromkeys("ef", (Priority.LOAD, 9)),
        "g": (Priority.LOAD, -4),
    }
    first.end(first.of(b"g"), Outcome.FAILED)
    node.cache.poll()
    assert [task.turn for task in second.tasks] == [-4], "the next tier keeps the order"


def test_a_read_has_the_highest_priority_of_all_that_wait_for_it(make: Make) -> None:
    node = make("ab", slots=16)
    (tier,) = node.tiers

    def turns() -> list[tuple[Priority, int]]:
        return [(task.priority, task.turn) for task in tier.tasks]

    early = node.fetch("ab", queued=True)
    node.fetch("ab", queued=True, priority=5)
    assert turns() == [(Priority.PREFETCH, -5)] * 2
    node.fetch("ab", queued=True, priority=-5)
    assert turns() == [(Priority.PREFETCH, -5)] * 2
    node.cache.extend_fetch(early, raise_priority=True)
    assert turns() == [(Priority.LOAD, 0)] * 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_block_that_is_not_given_ends_the_prefix(make: Make, fault: Outcome) -> None:
    node = make("abcd")
    fetch = node.fetch("abcd")
    (tier,) = node.tiers
    tier.end(tier.of(b"b"), fault)
    tier.end(tier.of(b"c"))
    tier.end(tier.of(b"a"))
    node.cache.poll()
    assert (fetch.arrived, fetch.done) == (1, True)
    assert node.ready() == "ac"
    assert node.cache.counters.fetched_blocks == 2
    assert node.cache.counters.failed_fetches == 1
    assert node.cache.counters.damaged_fetches == (fault is Outcome.DAMAGED)
    tier.end_all()
    node.cache.poll()
    node.cache.end_fetch(fetch)
    assert node.ready() == "acd"
    node.assert_at_rest()


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_tier_does_not_give_the_next_one_is_asked_for(make: Make, fault: Outcome) -> None:
    node = make("abc", "bc")
    fetch = node.fetch("abc")
    first, second = node.tiers
    assert (read_keys(first), read_keys(second)) == (keys("abc"), [])
    first.end(first.of(b"b"), fault)
    first.end(first.of(b"c"), fault)
    node.cache.poll()
    assert (read_keys(second), fetch.done) == (keys("bc"), False)
    first.end_all()
    second.end_all()
    node.cache.poll()
    assert (fetch.arrived, node.ready()) == (3, "abc")
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def test_the_last_tier_is_not_asked_twice(make: Make) -> None:
    node = make("a", "a")
    fetch = node.fetch("a")
    for tier in node.tiers:
        tier.end_all(Outcome.FAILED)
        tier.blocks[b"a"] = content(b"a")
        node.cache.poll()
    assert (fetch.arrived, fetch.done) == (0, True)
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def test_nobody_is_asked_for_what_no_fetch_waits_for(make: Make) -> None:
    node = make("a", "a")
    fetch = node.fetch("a")
    first, second = node.tiers
    first.tasks[0].begun = True
    node.cache.end_fetch(fetch)
    first.end_all(Outcome.FAILED)
    node.cache.poll()
    assert second.tasks == []
    node.assert_at_rest()


def test_a_fetch_that_ends_cancels_what_nobody_else_wants(make: Make) -> None:
    node = make("abcd")
    one, other = node.fetch("ab"), node.fetch("abcd")
    (tier,) = node.tiers
    node.cache.end_fetch(one)
    assert read_keys(tier) == keys("abcd")
    node.cache.end_fetch(other)  # the one that joined ends what the other began, too
    assert read_keys(tier) == []
    node.cache.poll()
    assert node.cache.counters.failed_fetches == 0
    node.assert_at_rest()


def test_a_retry_before_the_next_poll_has_what_was_cancelled(make: Make) -> None:
    node = make("abcd")
    (tier,) = node.tiers
    first = node.fetch("abcd")
    tier.tasks[0].begun = True
    node.cache.end_fetch(first)
    again = node.fetch("abcd")
    node.cache.poll()
    assert sorted(read_keys(tier)) == keys("abcd")
    tier.end_all()
    node.cache.poll()
    assert (again.arrived, node.ready()) == (4, "abcd")
    node.cache.end_fetch(again)
    node.assert_at_rest()


def test_a_dropped_read_is_not_asked_for_again(make: Make) -> None:
    """A full queue would drop it for ever."""
    node = make("ab")
    fetch = node.fetch("ab", queued=True)
    (tier,) = node.tiers
    tier.end_all(Outcome.DROPPED)
    node.cache.poll()
    assert (tier.tasks, fetch.arrived, fetch.done) == ([], 0, True)
    assert node.cache.counters.failed_fetches == 0
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def test_a_load_raises_the_prefetch_that_it_joins(make: Make) -> None:
    node = make("abc", slots=16)
    (tier,) = node.tiers
    early = node.fetch("ab", queued=True)
    late = node.fetch("abc", queued=True)
    node.cache.extend_fetch(late, raise_priority=True)
    assert {task.key: task.priority for task in tier.tasks} == dict.fromkeys(
        keys("abc"), Priority.LOAD
    )
    for fetch in (early, late):
        node.cache.end_fetch(fetch)
    node.cache.poll()
    early = node.fetch("ab", queued=True)
    load = node.fetch("abc")
    assert {task.priority for task in tier.tasks} == {Priority.LOAD}
    for fetch in (early, load):
        node.cache.end_fetch(fetch)
    node.cache.poll()
    node.assert_at_rest()


def test_what_is_read_again_has_the_priority_of_who_waits(make: Make) -> None:
    node = make("ab", "ab")
    first, second = node.tiers
    early = node.fetch("ab", queued=True)
    first.end_all(Outcome.FAILED)
    node.cache.poll()
    assert {task.priority for task in second.tasks} == {Priority.PREFETCH}
    node.cache.extend_fetch(early, raise_priority=True)
    assert {task.priority for task in second.tasks} == {Priority.LOAD}
    node.cache.end_fetch(early)
    node.cache.poll()
    node.assert_at_rest()


def test_a_hung_source_ends_its_fetch_while_others_deliver(make: Make, still_clock: Clock) -> None:
    node = make("abcde")
    (tier,) = node.tiers
    fetch = node.fetch("abcd")
    tier.tasks[1].begun = True
    tier.end(tier.of(b"a"))
    tier.end(tier.of(b"d"))
    node.cache.poll()
    assert fetch.arrived == 1
    tier.stalled.add(b"b")
    still_clock.skip(STALL_SECONDS + 1)
    tier.end(tier.of(b"c"))
    node.cache.poll()
    assert (fetch.arrived, fetch.done) == (1, True)  # up to the gap
    assert node.cache.counters.stalled_fetches == 1
    node.cache.end_fetch(fetch)
    assert node.ready() == "acd"
    # Nobody waits for the hung read again; what it gives at last is not lost.
    assert node.cache.fetch(keys("abce")) is None
    other = node.fetch("eb")
    assert read_keys(tier) == keys("be")
    tier.end(tier.of(b"e"))
    node.cache.poll()
    assert (other.arrived, other.done) == (1, True)
    node.cache.end_fetch(other)
    tier.stalled.clear()
    tier.end_all()
    node.cache.poll()
    assert node.ready() == "abcde"
    node.assert_at_rest()


def test_a_read_that_hangs_alone_is_given_up_though_its_batch_delivers(
    make: Make, still_clock: Clock
) -> None:
    node = make("abcd")
    (tier,) = node.tiers
    fetch = node.fetch("abcd", queued=True)
    tier.tasks[1].begun = True
    tier.end(tier.of(b"a"))
    node.cache.poll()
    tier.hanging.add(b"b")
    still_clock.skip(STALL_SECONDS + 1)
    tier.end(tier.of(b"c"))
    node.cache.poll()
    assert (fetch.arrived, fetch.done) == (1, True)
    # A new fetch does not wait for the block, but for the others of the batch.
    other = node.fetch("abcd")
    assert (other.arrived, other.done) == (1, True)
    joined = node.fetch("d")
    assert not joined.done
    tier.end(tier.of(b"d"))
    node.cache.poll()
    assert joined.arrived == 1
    for each in (fetch, other, joined):
        node.cache.end_fetch(each)
    tier.hanging.clear()
    tier.end_all()
    node.cache.poll()
    assert node.ready() == "abcd"
    node.assert_at_rest()


def test_a_slow_source_is_waited_for_as_long_as_it_delivers(make: Make, still_clock: Clock) -> None:
    node = make("abx")
    (tier,) = node.tiers
    other, fetch = node.fetch("x"), node.fetch("ab")
    still_clock.skip(STALL_SECONDS + 1)
    tier.end(tier.of(b"x"))
    node.cache.poll()
    assert not fetch.done
    still_clock.skip(STALL_SECONDS + 1)
    node.cache.poll()
    assert (fetch.arrived, fetch.done) == (0, True)
    for each in (other, fetch):
        node.cache.end_fetch(each)
    node.cache.poll()
    node.assert_at_rest()


def test_a_fetch_joins_what_the_engine_stores(make: Make) -> None:
    node = make("ac")
    store = node.cache.store(keys("b"), [0])
    assert store is not None
    fetch = node.fetch("abc")
    (tier,) = node.tiers
    tier.end_all()
    node.cache.poll()
    assert (fetch.arrived, fetch.done) == (1, False)
    with node.arena.slot_view(store.slots[0]) as view:
        view[:] = content(b"b")
    node.arena.board.report(store.cell, 0, Status.DONE)
    node.cache.poll()
    assert (fetch.arrived, fetch.done) == (3, True)
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def test_a_store_that_fails_ends_the_fetch_that_joined_it(make: Make) -> None:
    node = make("ac")
    store = node.cache.store(keys("b"), [0])
    assert store is not None
    fetch = node.fetch("abc")
    node.tiers[0].end_all()
    node.arena.board.report(store.cell, 0, Status.FAILED)
    node.cache.poll()
    assert (fetch.arrived, fetch.done) == (1, True)
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def test_a_key_that_is_wanted_twice_is_read_once(make: Make) -> None:
    node = make("ab")
    fetch = node.fetch("aba")
    (tier,) = node.tiers
    assert read_keys(tier) == keys("ab")
    tier.end_all()
    node.cache.poll()
    assert (fetch.arrived, node.leased()) == (3, {"a": 2, "b": 1})
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def test_a_read_that_outlives_a_clear_gives_nothing(make: Make) -> None:
    node = make("abc")
    (tier,) = node.tiers
    fetch = node.fetch("abc")
    tier.end(tier.of(b"a"))
    node.cache.poll()
    hung = tier.of(b"b")
    hung.begun = True
    node.cache.reset(Reset.CLEAR)
    assert (fetch.arrived, fetch.done, read_keys(tier)) == (0, True, [b"b"])
    # The same keys come anew, and a request joins their store.
    store = node.cache.store(keys("b"), [0])
    assert store is not None
    tier.blocks[b"a"] = content(b"a")
    new = node.fetch("ab")
    tier.end(hung)
    tier.end(tier.of(b"a"))
    node.cache.poll()
    assert (new.arrived, new.done) == (1, False)
    with node.arena.slot_view(store.slots[0]) as view:
        view[:] = content(b"b")
    node.arena.board.report(store.cell, 0, Status.DONE)
    node.cache.poll()
    assert (new.arrived, new.done, node.ready()) == (2, True, "ab")
    for each in (fetch, new):
        node.cache.end_fetch(each)
    node.assert_at_rest()


def test_a_fetch_pushes_out_others_and_never_its_own_prefix(make: Make) -> None:
    node = make("bcd", slots=4)
    for names in ("a", "d", "xy"):
        node.store(names)
    fetch = node.fetch("abcd")
    node.tiers[0].end_all()
    node.cache.poll()
    assert (fetch.arrived, node.ready()) == (4, "abcd")
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def test_a_fetch_ends_where_the_arena_has_no_slot(make: Make) -> None:
    node = make("abcdef", slots=4)
    fetch = node.fetch("abcdef")
    assert read_keys(node.tiers[0]) == keys("abcd")
    node.tiers[0].end_all()
    node.cache.poll()
    assert (fetch.arrived, fetch.done, node.ready()) == (4, True, "abcd")
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def test_a_prefetch_leaves_what_others_hold_within_half(make: Make) -> None:
    node = make("abcdef")
    fetches: list[Sequence[bytes]] = []
    first = node.fetch("abc", queued=True)
    second = node.fetch("def", queued=True)
    fetches += [first.awaited_keys, second.awaited_keys]
    assert fetches == [keys("abc"), keys("d")]
    for each in (first, second):
        node.cache.end_fetch(each)
    node.cache.poll()
    node.assert_at_rest()


def test_a_fetch_that_finds_no_room_asks_no_tier(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may look in each step of an engine, and have 100,000 blocks."""
    node = make("abc", slots=4)
    (tier,) = node.tiers
    node.store("wxyz")
    load = node.cache.load(keys("wxyz"))
    assert load is not None
    fetch = node.fetch("abc")
    assert fetch.is_short
    with monkeypatch.context() as patch:
        patch.setattr(tier, "contains", _raising)
        node.cache.extend_fetch(fetch)
    node.cache.end_transfer(load.id, TransferEnd.CANCEL)
    node.cache.extend_fetch(fetch)
    tier.end_all()
    node.cache.poll()
    assert fetch.arrived == 3
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def test_a_tier_that_raises_keeps_no_fetch_no_key_and_no_slot(make: Make) -> None:
    node = make("abc", slots=8)
    (tier,) = node.tiers
    read = tier.read
    node.store("a")

    def fail(*_: object) -> int:
        raise MemoryError

    tier.read = fail  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        node.fetch("abc")
    index = index_of(node.cache)
    assert not node.leased()
    assert not writing_blocks(index)
    assert index.free_slots == index.num_slots - 3, "the tier may have begun to write to two"
    node.cache.poll()
    assert not node.cache.busy
    assert index.free_slots == index.num_slots - 1
    tier.read = read  # type: ignore[method-assign]
    fetch = node.fetch("abc")
    tier.end_all()
    node.cache.poll()
    assert (fetch.done, fetch.arrived, node.ready()) == (True, 3, "abc")
    node.cache.end_fetch(fetch)
    assert not node.cache.busy


def test_an_extended_fetch_brings_what_follows_its_prefix(make: Make) -> None:
    node = make("abcd", slots=4)
    node.store("c")
    fetch = node.fetch("ab")
    (tier,) = node.tiers
    tier.end_all()
    node.cache.poll()
    assert (fetch.arrived, fetch.done) == (2, True)
    assert node.cache.extend_fetch(fetch, keys("cd"))
    assert (fetch.done, read_keys(tier)[-1]) == (False, b"d")
    assert [(start, stop) for start, stop, _ in fetch.awaited] == [(0, 2), (3, 4)]
    tier.end_all()
    node.cache.poll()
    assert (fetch.arrived, fetch.done) == (4, True)
    assert node.leased() == dict.fromkeys("abcd", 1)
    node.cache.end_fetch(fetch)
    assert not node.cache.extend_fetch(fetch, keys("e"))
    node.assert_at_rest()


def test_an_error_while_a_fetch_is_extended_ends_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make("abcd")
    fetch = node.fetch("ab")
    with monkeypatch.context() as patch:
        patch.setattr(below_of(node.cache).fetcher, "_fill", _raising)
        with pytest.raises(MemoryError):
            node.cache.extend_fetch(fetch, keys("cd"))
    assert fetch.done
    assert (fetch.arrived, fetch.queried) == (0, None)
    node.cache.end_fetch(fetch)


def _raising(*_: object) -> None:
    raise MemoryError


def test_a_fetch_is_not_extended_behind_a_block_that_does_not_come(make: Make) -> None:
    node = make("abd")
    fetch = node.fetch("ab")
    assert not node.cache.extend_fetch(fetch, keys("cd"))
    assert not node.cache.extend_fetch(fetch, keys("d"))
    (tier,) = node.tiers
    assert read_keys(tier) == keys("ab")
    tier.end_all()
    node.cache.poll()
    assert fetch.done
    node.cache.end_fetch(fetch)
    node.assert_at_rest()
