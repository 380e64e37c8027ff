# SPDX-License-Identifier: Apache-2.0
"""What the state of a fetch says of tiers: which may still give blocks, which has given some."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from memory_tier import MemoryTier, QueriedMemoryTier

from flexkv import KVCache
from flexkv.client import FetchState, Reset
from flexkv.eviction import LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.job import Outcome
from flexkv.types.admission import ADMISSIONS
from flexkv.types.changes import Medium
from flexkv.types.mover import Status
from packages.conftest import Clock
from packages.seen_fetch import SeenFetch, see

KEYS = [bytes([i]) for i in range(8)]
SLOT = 4096


class Node:
    """A cache over a disk with two blocks, and an object store that has six and is queried."""

    def __init__(self) -> None:
        self.arena = Arena.create(ArenaSpec(BlockFormat(1, (SLOT,)), 16), threads=1)
        self.disk, self.objects = MemoryTier(Medium.DISK), MemoryTier(Medium.OBJECTS)
        self.disk.blocks = {key: key * SLOT for key in KEYS[:2]}
        self.objects.blocks = {key: key * SLOT for key in KEYS[2:]}
        self.asked = QueriedMemoryTier(self.objects, 60.0)
        tiers = [
            AttachedTier(tier, ADMISSIONS["second_hit"], 60.0) for tier in (self.disk, self.asked)
        ]
        self.cache = KVCache(self.arena, LRUPolicy(), tiers)

    def begin(self) -> SeenFetch:
        fetch = see(self.cache, KEYS)
        assert fetch is not None
        return fetch

    def answer(self) -> None:
        for ticket in list(self.asked.questions):
            self.asked.answer(ticket)
        self.cache.poll()

    def give(self, tier: MemoryTier, key: bytes, outcome: Outcome = Outcome.DONE) -> None:
        tier.end(tier.of(key), outcome)
        self.cache.poll()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    for tier in (made.disk, made.objects):
        tier.tasks.clear()
    made.arena.close()


def test_missing_blocks_are_those_of_the_tier_that_may_give_them(node: Node) -> None:
    fetch = node.begin()
    assert (fetch.queried, fetch.stop) == (Medium.OBJECTS, 8)
    assert fetch.missing == {Medium.DISK: 2, Medium.OBJECTS: 6}
    assert fetch.next_medium is Medium.DISK
    assert fetch.awaited == ((0, 2, Medium.DISK), (2, 8, Medium.OBJECTS))
    node.give(node.disk, KEYS[0])
    assert fetch.missing == {Medium.DISK: 1, Medium.OBJECTS: 6}
    del node.objects.blocks[KEYS[5]]
    node.answer()
    assert (fetch.queried, fetch.stop, fetch.missing[Medium.OBJECTS]) == (None, 5, 3)
    node.give(node.disk, KEYS[1])
    assert fetch.next_medium is Medium.OBJECTS


def test_a_fetch_is_steady_once_each_tier_has_given_a_block(node: Node) -> None:
    fetch = node.begin()
    steady = []
    for step in (lambda: node.give(node.disk, KEYS[0]), node.answer):
        step()
        steady.append(fetch.is_steady)
    node.give(node.objects, KEYS[4])
    assert [*steady, fetch.is_steady] == [False, False, True]


def test_a_block_came_from_the_tier_that_gave_it(node: Node) -> None:
    node.objects.blocks[KEYS[0]] = KEYS[0] * SLOT
    store = node.cache.store(KEYS[:2], [1], (1,))
    assert store is not None
    fetch = node.begin()
    assert fetch.media[KEYS[0]] is Medium.DISK, "where it is read from, as long as it is"
    assert fetch.media[KEYS[1]] is Medium.HOST, "the engine stores it"
    node.answer()
    node.give(node.disk, KEYS[0], Outcome.FAILED)
    node.answer()
    node.give(node.objects, KEYS[0])
    node.arena.board.report(store.cell, 0, Status.DONE)
    node.cache.poll()
    last = node.cache.end_fetch(fetch)  # type: ignore[arg-type]
    assert (last.arrived, last.done) == (2, False)
    assert last.awaited[0] == (0, 1, Medium.OBJECTS)
    assert last.awaited[1] == (1, 2, Medium.HOST)
    assert {medium: count for medium, (count, _) in last.gave.items()} == {Medium.OBJECTS: 1}


def test_a_state_is_made_anew_only_after_a_change(node: Node) -> None:
    fetch = node.cache.fetch(KEYS)
    assert fetch is not None
    before = node.cache.fetch_state(fetch)
    node.cache.poll()
    assert node.cache.fetch_state(fetch) is before
    node.give(node.disk, KEYS[1])
    after = node.cache.fetch_state(fetch)
    assert (before.missing[Medium.DISK], after.missing[Medium.DISK]) == (2, 1)
    assert (before.gave.keys(), after.gave.keys()) == (set(), {Medium.DISK})


@pytest.mark.parametrize("end", [Reset.CLEAR, Reset.STOP])
def test_a_fetch_that_the_cache_has_ended_has_no_block(node: Node, end: Reset) -> None:
    fetch = node.begin()
    node.give(node.disk, KEYS[0])
    assert fetch.arrived == 1
    node.cache.reset(end)
    assert (fetch.arrived, fetch.stop, fetch.done, fetch.awaited) == (0, 0, True, ())
    assert not node.cache.extend_fetch(fetch, KEYS)  # type: ignore[arg-type]
    assert node.cache.end_fetch(fetch).gave == {}  # type: ignore[arg-type]


def test_seconds_left_are_those_at_the_pace_so_far(still_clock: Clock) -> None:
    begun = still_clock.monotonic()
    still_clock.skip(3.0)
    assert FetchState(begun, first=1, arrived=3, stop=5).seconds_left == 3.0
    assert FetchState(begun, first=3, arrived=3, stop=5).seconds_left == float("inf")
    assert FetchState(begun, arrived=5, stop=5).seconds_left == 0.0
