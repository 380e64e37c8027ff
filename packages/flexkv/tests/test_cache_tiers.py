# SPDX-License-Identifier: Apache-2.0
"""KVCache over a real arena and a real disk; the test plays the workers and moves real bytes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from unittest import mock

import pytest
from disk_blocks import Client
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tiered_engine import FORMAT, STALL_SECONDS, Engine, content, keys

from flexkv.client import FetchId, Hold, Reset, Transfer
from flexkv.types.admission import ADMISSIONS
from flexkv.types.changes import Changes, Medium
from flexkv.types.mover import Status
from flexkv.types.presence import Presence
from packages.inside import index_of, tier_figures
from packages.seen_fetch import see

Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path, at_end: ExitStack) -> Make:
    return lambda **options: at_end.enter_context(closing(Engine(tmp_path, **options)))


def test_what_was_evicted_comes_back_verified(make: Make) -> None:
    engine = make(slots=4)
    engine.store("a", "b", "c")
    engine.store("x", "y", "z")
    assert engine.cache.lookup(keys("a", "b", "c")) < 3
    assert engine.fetched("a", "b", "c") == 3
    assert engine.cache.counters.fetched_blocks >= 2


def test_nothing_is_fetched_that_the_arena_has_or_nobody_has(make: Make) -> None:
    engine = make()
    engine.store("a", "b")
    assert engine.cache.fetch(keys("a", "b")) is None
    assert engine.cache.fetch(keys("a", "b", "c")) is None
    assert engine.cache.fetch(keys("c")) is None


def test_where_a_block_is(make: Make) -> None:
    engine = make(slots=4)
    engine.store("a", "b")
    engine.store("w", "x", "y", "z")
    assert engine.cache.presence(keys("z", "a", "c")) == [
        Presence.HOST,
        Presence.BELOW,
        Presence.ABSENT,
    ]
    fetch = engine.cache.fetch(keys("a"))
    assert fetch is not None
    engine.wait(fetch)
    assert engine.cache.presence([b"a"]) == [Presence.HOST]


def test_nothing_is_offered_once_a_rank_has_ended_its_copies(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(slots=4)
    engine.store("a", "b")
    engine.store("w", "x", "y", "z")
    transfer = engine.cache.load(keys("w"))
    assert transfer is not None
    engine.arena.board.stop(0)
    engine.arena.board.report(transfer.cell, 0, Status.FAILED)
    engine.settle()
    wanted = keys("a", "b", "w", "x", "y", "z")
    assert set(engine.cache.presence(wanted)) == {Presence.ABSENT}
    assert engine.cache.fetch(keys("a", "b")) is None
    assert engine.cache.store(keys("w"), [0]) is None
    assert [
        record.getMessage()[:27] for record in caplog.records if record.levelname == "ERROR"
    ] == ["rank 0 has ended its copies"]
    engine.close()
    # What was on disk serves the next process.
    assert make(slots=4).fetched("a", "b") == 2


def test_a_load_that_fails_turns_nothing_off(make: Make) -> None:
    engine = make(slots=4)
    engine.store("a", "b")
    transfer = engine.cache.load(keys("b"))
    assert transfer is not None
    engine.arena.board.report(transfer.cell, 0, Status.FAILED)
    engine.settle()
    assert engine.cache.presence([b"a"]) == [Presence.HOST]
    assert engine.fetched("a", "b") == 2


def test_what_was_touched_is_evicted_later(make: Make) -> None:
    engine = make(slots=4)
    engine.store("c", "d")
    engine.store("a", "b")
    engine.cache.touch(keys("c", "d"))
    engine.settle()
    engine.store("x", "y")
    found = [key for key in keys("a", "b", "c", "d") if engine.cache.lookup([key])]
    assert found == keys("c", "d")


def on_disk(engine: Engine, *names: str) -> list[str]:
    there = engine.disk.contains(keys(*names))
    return [name for name, has in zip(names, there, strict=True) if has]


def test_a_prefix_that_the_engine_always_has_stays_on_disk(make: Make) -> None:
    hot = ["p0", "p1"]
    first = make(slots=6, disk_slots=8)
    first.store(*hot)
    for turn in range(10):
        first.cache.record(keys(*hot))
        first.store(*hot, f"u{turn}", f"v{turn}")
    assert on_disk(first, *hot) == hot
    first.close()
    second = make(slots=6, disk_slots=8)
    assert second.fetched(*hot, "new") == 2


def test_a_store_that_ended_unseen_is_written_at_the_end(make: Make) -> None:
    first = make()
    transfer = first.cache.store(keys("a", "b"), [0, 1])
    assert transfer is not None
    for key, slot in zip(transfer.keys, transfer.slots, strict=True):
        with first.arena.slot_view(slot) as view:
            view[:] = content(key)
    first.arena.board.report(transfer.cell, 0, Status.DONE)
    first.close()
    assert first.cache.counters.demoted_blocks == 2
    second = make()
    assert second.fetched("a", "b", "c") == 2


def test_the_end_of_a_prefix_leaves_the_disk_first(make: Make) -> None:
    engine = make(slots=8, disk_slots=8)
    prefix = [f"a{i}" for i in range(6)]
    for end in (2, 4, 6):  # stored in parts, as a long prompt is
        engine.store(*prefix[:end])
    engine.cache.touch(keys(*prefix))
    engine.store("x", "y", "z")
    left = engine.disk.figures.slots - 3
    assert 0 < left < 6
    assert on_disk(engine, *prefix) == prefix[:left]


def test_a_hit_brings_back_what_the_disk_has_lost(make: Make) -> None:
    engine = make()
    engine.store("a", "b", "c")
    Client(engine.disk).delete(keys("b"))
    engine.cache.touch(keys("a", "b", "c"))
    engine.settle()
    assert on_disk(engine, "a", "b", "c") == ["a", "c"]
    engine.cache.record(keys("a", "b", "c"))
    engine.settle()
    assert on_disk(engine, "a", "b", "c") == ["a", "b", "c"]


def test_with_second_hit_a_block_is_written_once_a_request_uses_it(make: Make) -> None:
    engine = make(admission="second_hit")
    engine.store("a", "b")
    engine.cache.touch(keys("a", "b"))  # the request that made them ends
    engine.settle()
    assert on_disk(engine, "a", "b") == []
    engine.cache.record(keys("a", "c"))
    engine.settle()
    assert on_disk(engine, "a", "b", "c") == ["a"]


def test_blocks_in_the_arena_and_on_disk_make_one_prefix(make: Make) -> None:
    engine = make(slots=4)
    engine.store("a", "b", "c", "d")
    engine.store("x", "y")  # pushes out d and c
    assert engine.cache.lookup(keys("a", "b", "c", "d")) == 2
    assert engine.fetched("a", "b", "c", "d") == 4
    assert engine.cache.counters.fetched_blocks == 2


def test_a_clear_reaches_what_is_on_its_way(make: Make) -> None:
    engine = make(slots=4)
    engine.store("a", "b")
    engine.store("w", "x", "y", "z")
    release = engine.hang()
    fetch = see(engine.cache, keys("a", "b"))
    assert fetch is not None
    engine.cache.reset(Reset.CLEAR)
    release()
    assert fetch.done
    assert fetch.arrived == 0
    engine.cache.end_fetch(fetch)
    engine.settle()
    assert engine.cache.ready_blocks == 0
    assert engine.fetched("a", "b") == 0
    engine.store("p", "q", "r", "s")


def store_long(engine: Engine) -> list[bytes]:
    """Store a prefix of which most blocks wait to be written."""
    prefix = keys(*map(str, range(64)))
    transfer = engine.cache.store(prefix, range(64))
    assert transfer is not None
    engine.finish(transfer)
    return prefix


def test_after_a_clear_the_blocks_that_waited_are_not_written(make: Make) -> None:
    engine = make(slots=64, disk_slots=128)
    prefix = store_long(engine)
    engine.cache.reset(Reset.CLEAR)
    engine.settle()
    assert not any(engine.disk.contains(prefix))


def test_a_renewal_forgets_host_memory_and_keeps_the_disk(make: Make) -> None:
    """Keys mean something else in this engine alone: what the disk has serves others."""
    engine = make(slots=4)
    engine.store("a", "b")
    engine.store("w", "x", "y", "z")
    release = engine.hang()
    fetch = see(engine.cache, keys("a", "b"))
    under_way = engine.cache.store(keys("w", "x", "y", "z", "new"), [4])
    assert fetch is not None
    engine.cache.reset(Reset.RENEW, "weights")
    assert fetch.done
    release()
    engine.cache.end_fetch(fetch)
    if under_way is not None:
        engine.finish(under_way)
    engine.settle()
    assert engine.cache.ready_blocks == 0
    assert engine.cache.lookup(keys("w")) == engine.cache.lookup(keys("new")) == 0
    assert engine.disk.contains(keys(*"abwxyz")) == [True] * 6
    assert engine.fetched("a", "b") == 2
    assert engine.cache.counters.weight_resets == 1


def test_a_renewal_ends_the_write_that_is_under_way(make: Make) -> None:
    """Its block is on disk afterwards; the blocks that waited are not, and all slots are free."""
    engine = make(slots=64, disk_slots=128)
    prefix = store_long(engine)
    engine.cache.poll()  # begins the first write
    engine.cache.reset(Reset.RENEW, "weights")
    engine.settle()
    written = engine.disk.contains(prefix)
    assert written == sorted(written, reverse=True)
    assert 0 < sum(written) < 64
    assert index_of(engine.cache).free_slots == 64


def test_a_close_writes_the_blocks_that_wait(make: Make) -> None:
    engine = make(slots=64, disk_slots=128)
    prefix = store_long(engine)
    assert sum(engine.disk.contains(prefix)) < 64
    assert engine.cache.close(STALL_SECONDS)
    assert engine.cache.counters.demoted_blocks == 64


def test_admission_on_evict_writes_only_what_leaves(make: Make) -> None:
    engine = make(slots=16, admission="on_evict")
    engine.store(*"abcdefgh")
    assert not any(engine.disk.contains(keys(*"abcdefgh")))
    engine.store(*"stuvwxyz")
    engine.settle()
    assert any(engine.disk.contains(keys(*"abcdefgh")))
    assert not any(engine.disk.contains(keys(*"stuvwxyz")))


def test_what_the_disk_holds_at_the_start_is_a_change(make: Make) -> None:
    first = make(slots=4)
    first.store("a", "b")
    assert first.cache.drain_changes() == []  # nobody watches
    first.close()
    second = make(slots=4)
    second.cache.watch()
    (changes,) = second.cache.drain_changes()
    assert (changes.medium, changes.removed) == (Medium.DISK, [])
    assert sorted(changes.added) == keys("a", "b")
    assert second.cache.drain_changes() == []


def test_a_block_that_two_disks_have_is_one_change(tmp_path: Path) -> None:
    roots = [tmp_path / "first", tmp_path / "second"]
    for root in roots:
        with contextlib.closing(Engine(root)) as engine:
            engine.store("a", "b")
    with contextlib.closing(Engine(*roots)) as engine:
        engine.cache.watch()
        (changes,) = engine.cache.drain_changes()
        assert sorted(changes.added) == keys("a", "b")
        first, second = (drive.index for drive in engine.disk.drives)
        for index, removed in ((first, []), (second, [[b"a"]])):
            slot = index.lease(b"a")
            assert slot is not None
            index.discard(slot)
            index.release(slot)
            assert [each.removed for each in engine.cache.drain_changes()] == removed
        engine.cache.reset(Reset.CLEAR)
        (changes,) = engine.cache.drain_changes()
        assert (changes.removed, changes.added) == ([b"b"], [])
        assert not engine.cache.status.has_changes


def test_figures_of_the_disk(make: Make) -> None:
    engine = make(slots=4)
    engine.store("a", "b", "c")
    engine.store("x", "y", "z")
    assert engine.fetched("a", "b", "c") == 3
    ((medium, figures, *_),) = tier_figures(engine.cache)
    assert medium is Medium.DISK
    assert figures.blocks == figures.written_blocks == 6
    assert figures.traffic.written_bytes == 6 * FORMAT.slot_bytes
    fetched = engine.cache.counters.fetched_blocks
    assert figures.traffic.read_bytes == fetched * FORMAT.slot_bytes
    assert figures.traffic.read_seconds > 0
    assert figures.queued_blocks == figures.queued_bytes == 0


def test_blocks_that_wait_for_a_later_poll_count_as_queued(make: Make) -> None:
    engine = make(slots=40)
    names = [f"n{i}" for i in range(40)]
    transfer = engine.cache.store(keys(*names), range(40))
    assert transfer is not None
    engine.finish(transfer)
    ((_, figures, *_),) = tier_figures(engine.cache)
    assert figures.queued_blocks == 40
    # The disk knows of the blocks whose writes have begun.
    waiting = 40 - engine.disk.figures.queued_blocks
    assert waiting >= 8
    own = engine.disk.figures.queued_bytes
    assert figures.queued_bytes - own >= waiting * FORMAT.slot_bytes
    engine.settle()
    ((_, figures, *_),) = tier_figures(engine.cache)
    assert figures.queued_blocks == figures.queued_bytes == 0


class TierModel(RuleBasedStateMachine):
    """Random use, damage on disk and restarts: whatever is loaded has its own bytes, and what
    changes tell is what can be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="flexkv-test-")
        self.root = Path(self.folder.name)
        self.pending: list[Transfer] = []
        self.fetches: list[FetchId] = []
        self.engine = self.start("write_through", "a")

    def start(self, admission: str, disks: str) -> Engine:
        self.reported: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        roots = [self.root / disk for disk in disks]
        engine = Engine(*roots, slots=6, disk_slots=10, admission=admission)
        engine.cache.watch()
        return engine

    def teardown(self) -> None:
        self.finish_all()
        self.engine.close()
        self.folder.cleanup()

    def finish_all(self) -> None:
        for transfer in self.pending:
            self.engine.finish(transfer)
        for fetch in self.fetches:
            self.engine.cache.end_fetch(fetch)
        self.pending.clear()
        self.fetches.clear()
        self.engine.settle()

    def prefix(self, chain: int, length: int) -> list[bytes]:
        return [bytes([chain, i]) for i in range(length)]

    @rule(length=st.integers(1, 5), chain=st.integers(0, 3))
    def store(self, length: int, chain: int) -> None:
        prefix = self.prefix(chain, length)
        missing = self.engine.cache.missing(prefix)
        transfer = self.engine.cache.store(prefix, missing) if missing else None
        if transfer is not None:
            self.pending.append(transfer)

    @rule(length=st.integers(1, 5), chain=st.integers(0, 3), early=st.booleans())
    def fetch(self, length: int, chain: int, early: bool) -> None:
        fetch = self.engine.cache.fetch(self.prefix(chain, length), queued=early)
        if fetch is not None:
            self.fetches.append(fetch)

    @rule(length=st.integers(1, 5), chain=st.integers(0, 3))
    def load(self, length: int, chain: int) -> None:
        prefix = self.prefix(chain, length)
        prefix = prefix[: self.engine.cache.lookup(prefix)]
        if prefix:
            transfer = self.engine.cache.load(prefix)
            assert transfer is not None
            self.pending.append(transfer)

    @rule()
    def finish(self) -> None:
        if self.pending:
            self.engine.finish(self.pending.pop(0))

    @rule()
    def end_a_fetch(self) -> None:
        if self.fetches:
            self.engine.cache.end_fetch(self.fetches.pop(0))

    @rule()
    def poll(self) -> None:
        self.engine.cache.poll()

    @rule(disk=st.integers(0, 1), place=st.integers(0, 10 * FORMAT.slot_bytes - 1))
    def damage(self, disk: int, place: int) -> None:
        slabs = sorted(self.root.glob("*/*/slab-*"))
        with slabs[disk % len(slabs)].open("r+b") as file:
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]) if byte else b"")

    @rule()
    def fail(self) -> None:
        if self.pending:
            self.engine.report(self.pending.pop(), Status.FAILED)

    @rule(admission=st.sampled_from(sorted(ADMISSIONS)), disks=st.sampled_from(["a", "ab", "b"]))
    def restart(self, admission: str, disks: str) -> None:
        """Two disks may have the same block once each has been the only one."""
        self.finish_all()
        self.engine.close()
        self.engine = self.start(admission, disks)

    @rule()
    def clear(self) -> None:
        self.engine.cache.reset(Reset.CLEAR)

    @rule(length=st.integers(1, 5), chain=st.integers(0, 3))
    def pin(self, length: int, chain: int) -> None:
        self.engine.cache.hold(Hold.PIN, self.prefix(chain, length))

    @rule(limit=st.integers(1, 9), to_the_end=st.booleans())
    def drain_changes(self, limit: int, to_the_end: bool) -> None:
        cache = self.engine.cache
        with mock.patch("flexkv.cache._CHANGES", limit):
            while cache.status.has_changes:
                for changes in cache.drain_changes():
                    self.apply(changes)
                if not to_the_end:
                    return
        every = [bytes([chain, i]) for chain in range(4) for i in range(5)]
        host = {key for key in every if cache.lookup([key])}
        on_disk = dict(zip(every, self.engine.disk.contains(every), strict=True))
        assert self.reported[Medium.HOST] == host
        assert self.reported[Medium.DISK] == {key for key, there in on_disk.items() if there}

    def apply(self, changes: Changes) -> None:
        """Take changes in; none repeats what was reported."""
        reported = self.reported[changes.medium]
        removed, added = set(changes.removed), set(changes.added)
        assert len(removed) + len(added) == len(changes.removed) + len(changes.added) > 0
        assert removed <= reported
        assert added.isdisjoint(reported | removed)
        reported ^= removed | added

    @invariant()
    def no_slot_is_lost(self) -> None:
        if not self.pending and not self.fetches:
            self.engine.settle()
            index = index_of(self.engine.cache)
            assert index.free_slots + len(index) == index.num_slots


TestTiers = TierModel.TestCase
TestTiers.settings = settings(max_examples=40)
