# SPDX-License-Identifier: Apache-2.0
"""Demoted blocks leave host memory, each once a lower tier has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from memory_tier import MemoryTier
from tiered_engine import FORMAT, STALL_SECONDS, Engine, content, keys

from flexkv import KVCache
from flexkv.client import Hold, Reset
from flexkv.eviction import POLICIES, LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.job import Outcome
from flexkv.transfer import demote
from flexkv.types.admission import ADMISSIONS
from flexkv.types.changes import Medium
from flexkv.types.mover import Status
from packages.conftest import Clock
from packages.inside import assert_no_lease


@pytest.fixture(params=sorted(ADMISSIONS))
def admission(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path, at_end: ExitStack) -> Make:
    return lambda **options: at_end.enter_context(closing(Engine(tmp_path, **options)))


def places(cache: KVCache, names: str) -> tuple[str, str]:
    """Names of the blocks in host memory, and in the lower tier."""
    there = cache.where(keys(*names))
    host, below = there[Medium.HOST], there[Medium.DISK]
    return (
        "".join(name for name, has in zip(names, host, strict=True) if has),
        "".join(name for name, has in zip(names, below, strict=True) if has),
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_demoted_blocks_are_on_disk_alone(make: Make, admission: str, policy: str) -> None:
    engine = make(slots=16, admission=admission, policy=policy)
    engine.store(*"abc")
    engine.store(*"xy")
    engine.cache.record(keys(*"abc"))
    engine.cache.touch(keys(*"abc"))
    engine.cache.demote(keys(*"abc"))
    engine.settle()
    host, disk = places(engine.cache, "abcxy")
    assert host == "xy"
    assert disk.startswith("abc")
    assert engine.fetched(*"abc") == 3


def test_blocks_that_others_build_on_stay(make: Make) -> None:
    engine = make(slots=16)
    engine.store(*"abcd")
    engine.store(*"abx")
    engine.cache.demote(keys(*"abcd"))
    engine.settle()
    assert places(engine.cache, "abcdx") == ("abx", "abcdx")


def test_pinned_and_retained_blocks_stay(make: Make) -> None:
    engine = make(slots=16)
    for names in ("abc", "rst", "xyz"):
        engine.store(*names)
    engine.cache.hold(Hold.PIN, keys(*"ab"))
    engine.cache.hold(Hold.RETAIN, keys(*"rs"), "tenant", 60.0)
    for names in ("abc", "rst", "xyz"):
        engine.cache.demote(keys(*names))
    engine.settle()
    assert places(engine.cache, "abcrstxyz")[0] == "abrs"


def test_blocks_are_demoted_when_their_store_has_ended(make: Make, admission: str) -> None:
    engine = make(slots=16, admission=admission)
    engine.store(*"ab")
    transfer = engine.cache.store(keys(*"abcd"), [2, 3])
    assert transfer is not None
    engine.cache.demote(keys(*"abcd"))
    for _ in range(5):
        engine.cache.poll()
    assert places(engine.cache, "ab")[0] == "ab", "the others build on them"
    engine.finish(transfer)
    engine.settle()
    assert places(engine.cache, "abcd") == ("", "abcd")


def test_blocks_that_a_load_reads_stay_until_it_ends(make: Make) -> None:
    engine = make(slots=16)
    engine.store(*"abcd")
    transfer = engine.cache.load(keys(*"abc"))
    assert transfer is not None
    engine.cache.demote(keys(*"abcd"))
    for _ in range(5):
        engine.cache.poll()
    assert places(engine.cache, "abc")[0] == "abc"
    engine.finish(transfer)
    engine.settle()
    engine.cache.poll()
    engine.settle()
    assert places(engine.cache, "abcd") == ("", "abcd")


class Node:
    """A cache over a tier whose writes end as the test says."""

    def __init__(self, *tiers: MemoryTier, slots: int = 16) -> None:
        self.arena = Arena.create(ArenaSpec(FORMAT, slots), threads=1)
        second = ADMISSIONS["second_hit"]
        attached = [AttachedTier(tier, second, STALL_SECONDS) for tier in tiers]
        self.cache = KVCache(self.arena, LRUPolicy(), attached)

    def store(self, names: str) -> None:
        prefix = keys(*names)
        transfer = self.cache.store(prefix, self.cache.missing(prefix))
        assert transfer is not None
        for key, slot in zip(transfer.keys, transfer.slots, strict=True):
            with self.arena.slot_view(slot) as view:
                view[:] = content(key)
        self.arena.board.report(transfer.cell, 0, Status.DONE)
        self.poll()

    def poll(self) -> None:
        for _ in range(8):
            self.cache.poll()

    def in_host(self, names: str) -> str:
        there = self.cache.where(keys(*names))[Medium.HOST]
        return "".join(name for name, has in zip(names, there, strict=True) if has)


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def node(tier: MemoryTier) -> Iterator[Node]:
    made = Node(tier)
    yield made
    made.poll()
    assert_no_lease(made.cache)
    made.arena.close()


def test_a_block_leaves_only_when_its_write_has_ended(node: Node, tier: MemoryTier) -> None:
    node.store("abc")
    node.cache.demote(keys(*"abc"))
    node.poll()
    assert node.in_host("abc") == "abc"
    assert sorted(task.key for task in tier.tasks) == keys(*"abc")
    tier.end(tier.of(b"c"))
    node.poll()
    assert node.in_host("abc") == "ab"
    tier.end_all()
    node.poll()
    assert node.in_host("abc") == ""
    assert tier.blocks == {key: content(key) for key in keys(*"abc")}
    assert not node.cache.busy


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DROPPED])
def test_a_block_that_is_not_written_stays(node: Node, tier: MemoryTier, outcome: Outcome) -> None:
    node.store("abc")
    node.cache.demote(keys(*"abc"))
    node.poll()
    tier.end(tier.of(b"b"), outcome)
    tier.end_all()
    node.poll()
    assert node.in_host("abc") == "ab", "a hit of b needs a"
    assert not node.cache.busy


def test_nothing_leaves_for_a_tier_that_is_full(node: Node, tier: MemoryTier) -> None:
    tier.full = True
    node.store("abc")
    node.cache.demote(keys(*"abc"))
    node.poll()
    assert node.in_host("abc") == "abc"
    assert not node.cache.busy


def test_one_of_two_tiers_is_enough() -> None:
    disk, other = MemoryTier(), MemoryTier(Medium.OBJECTS)
    node = Node(disk, other)
    other.full = True
    node.store("ab")
    node.cache.demote(keys(*"ab"))
    node.poll()
    assert node.in_host("ab") == "ab"
    disk.end_all()
    node.poll()
    assert node.in_host("ab") == ""
    node.arena.close()


def test_a_block_that_is_used_meanwhile_stays(node: Node, tier: MemoryTier) -> None:
    node.store("abc")
    node.cache.demote(keys(*"abc"))
    node.poll()
    node.cache.record(keys(*"ab"))
    node.poll()
    tier.end_all()
    node.poll()
    assert node.in_host("abc") == "ab"


def test_uses_before_the_demotion_keep_no_block(tier: MemoryTier) -> None:
    """A long prompt is counted in several polls."""
    node = Node(tier, slots=256)
    names = "".join(chr(0x100 + i) for i in range(100))
    node.store(names)
    node.cache.record(keys(*names))
    node.cache.touch(keys(*names))
    node.cache.demote(keys(*names))
    for _ in range(8):
        node.poll()
    tier.end_all()
    node.poll()
    assert node.in_host(names) == ""
    node.arena.close()


def test_a_prefix_in_use_is_forgotten_after_a_while(
    node: Node, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(demote, "time", clock)
    node.store("abc")
    node.cache.hold(Hold.PIN, keys(*"abc"))
    node.cache.demote(keys(*"abc"))
    node.poll()
    assert not node.cache.busy, "nothing is under way"
    clock.skip(demote.HELD_SECONDS)
    node.poll()
    node.cache.unhold(Hold.PIN)
    node.poll()
    tier.end_all()
    node.poll()
    assert node.in_host("abc") == "abc"


def test_few_keys_are_kept(node: Node, monkeypatch: pytest.MonkeyPatch, tier: MemoryTier) -> None:
    monkeypatch.setattr(demote, "MOST_KEYS", 4)
    for names in ("abc", "xyz"):
        node.store(names)
    for names in ("abc", "xyz"):
        node.cache.demote(keys(*names))
    for _ in range(9):
        node.poll()
        tier.end_all()
    assert node.in_host("abcxyz") == "abc", "the oldest are forgotten"


def test_a_poll_looks_at_few_prefixes_and_all_get_their_turn(
    node: Node, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those behind prefixes that are in use."""
    monkeypatch.setattr(demote, "_PREFIXES", 2)
    for name in "abcde":
        node.store(name)
    held = node.cache.load(keys(*"a"))
    assert held is not None
    for name in "abcde":
        node.cache.demote(keys(name))
    written: list[str] = []
    while node.cache.busy and "e" not in written:
        node.cache.poll()
        begun = [task.key.decode() for task in tier.tasks]
        new = [name for name in begun if name not in written]
        assert len(new) <= 2
        written += new
    assert sorted(written) == [*"bcde"]
    node.arena.board.report(held.cell, 0, Status.DONE)
    node.poll()
    tier.end_all()
    node.poll()
    assert node.in_host("abcde") == ""


def test_a_reset_forgets_what_is_to_leave(node: Node, tier: MemoryTier) -> None:
    node.store("abc")
    node.cache.demote(keys(*"abc"))
    node.poll()
    node.cache.demote(keys(*"abc"))
    node.cache.reset(Reset.CLEAR)
    node.store("abc")
    tier.end_all()
    node.poll()
    assert node.in_host("abc") == "abc"
    assert not node.cache.busy


def test_without_a_lower_tier_nothing_leaves() -> None:
    node = Node()
    node.store("abc")
    node.cache.demote(keys(*"abc"))
    node.poll()
    assert node.cache.lookup(keys(*"abc")) == 3
    assert not node.cache.busy
    node.arena.close()
