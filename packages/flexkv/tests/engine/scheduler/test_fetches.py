# SPDX-License-Identifier: Apache-2.0
"""Fetches of a scheduler's requests over a tier that gives what the test says."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from memory_tier import MemoryTier

from flexkv import KVCache
from flexkv.client import AwaitedBlocks, FetchId, FetchState, Reset
from flexkv.engine.scheduler import fetches
from flexkv.engine.scheduler.fetches import Fetches, fetched_blocks, note_media, slowest
from flexkv.engine.scheduler.options import RequestOptions
from flexkv.engine.scheduler.request import TrackedRequest, limited
from flexkv.eviction import LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.job import Outcome, Priority
from flexkv.types.admission import ADMISSIONS
from flexkv.types.changes import Medium
from flexkv.types.mover import Status
from packages.inside import assert_no_fetch, assert_no_lease

KEYS = [bytes([i]) for i in range(4)]
SLOT = 4096


class Node:
    """A cache over a disk with four blocks, and a request that wants them."""

    def __init__(self, ahead: bool = False, *, plain: bool = True) -> None:
        self.arena = Arena.create(ArenaSpec(BlockFormat(1, (SLOT,)), 16), threads=1)
        self.disk = MemoryTier()
        self.disk.blocks = {key: key * SLOT for key in KEYS}
        tiers = [AttachedTier(self.disk, ADMISSIONS["second_hit"], 60.0)]
        self.cache = KVCache(self.arena, LRUPolicy(), tiers)
        self.ended: list[tuple[FetchId, FetchState]] = []
        self.fetches = Fetches(self.cache, ahead, lambda *end: self.ended.append(end), plain=plain)
        request: Any = SimpleNamespace(request_id="r")
        self.tracked = TrackedRequest(request, RequestOptions())
        self.waits = True
        self.answers: list[FetchState] = []

    def offer(self, first: int = 0) -> int | None:
        def is_worth_waiting(_: FetchId, state: FetchState, end: int, whole: bool) -> bool:
            assert end == first + (state.reach if whole else state.stop)
            self.answers.append(state)
            return self.waits

        return self.fetches.offer(self.tracked, KEYS[first:], first, is_worth_waiting)

    def give_all(self) -> None:
        self.disk.end_all()
        self.cache.poll()

    def load(self, status: Status) -> None:
        """Another request loads all blocks."""
        transfer = self.cache.load(KEYS)
        assert transfer is not None
        self.arena.board.report(transfer.cell, 0, status)
        self.cache.poll()

    def assert_at_rest(self) -> None:
        self.fetches.end(self.tracked)
        self.cache.poll()
        assert_no_fetch(self.cache)
        assert_no_lease(self.cache)
        assert self.tracked.fetch is None
        assert not self.tracked.awaited


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.disk.tasks.clear()
    made.arena.close()


@pytest.mark.parametrize(("priority", "turn"), [(None, 0), (9, -9), (-9, 9)])
def test_reads_have_the_priority_of_their_request(
    node: Node, priority: int | None, turn: int
) -> None:
    node.tracked = TrackedRequest(node.tracked.request, RequestOptions(priority=priority))
    node.fetches.begin(node.tracked, KEYS[:2], 0, queued=True)
    assert node.offer() is None
    assert {(task.key, task.priority, task.turn) for task in node.disk.tasks} == {
        (key, Priority.LOAD, turn) for key in KEYS
    }


def test_a_request_waits_until_its_blocks_have_arrived(node: Node) -> None:
    assert node.offer() is None
    assert node.fetches.is_waiting(node.tracked)
    node.give_all()
    assert node.offer() == 4
    assert not node.fetches.is_waiting(node.tracked)
    assert node.fetches.media_of(node.tracked) == dict.fromkeys(KEYS, Medium.DISK)
    node.assert_at_rest()
    ((_, last),) = node.ended
    assert (last.arrived, last.gave[Medium.DISK][0]) == (4, 4)


def test_blocks_of_several_groups_stay_until_the_engine_has_room_for_them() -> None:
    """Each lookup of such a request makes its keys anew."""
    node = Node(plain=False)
    assert node.offer() is None
    fetch = node.tracked.fetch
    node.give_all()
    assert [node.offer(), node.offer()] == [4, 4]
    assert node.tracked.fetch is fetch
    node.assert_at_rest()
    node.arena.close()


def test_a_load_does_not_go_on_behind_a_block_that_did_not_come() -> None:
    node = Node(ahead=True)
    assert node.offer() is None
    node.disk.end(node.disk.of(KEYS[0]))
    node.disk.end(node.disk.of(KEYS[1]), Outcome.FAILED)
    node.cache.poll()
    node.disk.blocks[KEYS[1]] = KEYS[1] * SLOT  # to be read once more, and to fail again
    assert node.fetches.fetch_next(node.tracked, KEYS[1:], 1) is None
    node.disk.tasks.clear()
    node.arena.close()


def test_a_request_for_which_a_wait_is_not_worthwhile_gets_what_is_there(node: Node) -> None:
    node.waits = False
    assert node.offer() == 0
    node.disk.end(node.disk.of(KEYS[0]))
    node.cache.poll()
    assert node.offer() == 1
    node.assert_at_rest()


def test_blocks_that_came_while_the_request_was_queued_need_no_other_fetch(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.fetches.begin(node.tracked, KEYS, 0, queued=True)
    node.give_all()
    with monkeypatch.context() as patch:
        patch.setattr(node.cache, "fetch", None)
        patch.setattr(node.cache, "lookup", None)
        assert node.offer() == 4
    assert node.answers == []
    assert node.tracked.fetch is not None
    assert not node.tracked.fetch.queued
    assert node.fetches.media_of(node.tracked) == dict.fromkeys(KEYS, Medium.DISK)
    node.assert_at_rest()
    assert len(node.ended) == 1


def test_a_request_waits_for_the_blocks_that_its_early_fetch_still_reads(node: Node) -> None:
    node.fetches.begin(node.tracked, KEYS, 0, queued=True)
    node.disk.end(node.disk.of(KEYS[0]))
    node.cache.poll()
    assert node.offer() is None
    assert node.tracked.fetch is not None
    assert not node.tracked.fetch.queued
    node.give_all()
    assert node.offer() == 4
    assert node.fetches.media_of(node.tracked) == dict.fromkeys(KEYS, Medium.DISK)
    node.assert_at_rest()
    ((_, last),) = node.ended
    assert (last.first, last.gave[Medium.DISK][0]) == (1, 3), "what came in the queue says nothing"


def test_an_early_fetch_does_not_answer_for_other_blocks(node: Node) -> None:
    node.fetches.begin(node.tracked, KEYS[:3], 0, queued=True)
    node.give_all()
    assert node.offer(first=1) is None, "the last of three blocks is still on disk"
    node.give_all()
    assert node.offer(first=1) == 3
    node.assert_at_rest()


@pytest.mark.parametrize("end", [Reset.SUSPEND, Reset.STOP, Reset.RENEW])
def test_a_cache_that_has_lost_its_blocks_offers_none(node: Node, end: Reset) -> None:
    node.fetches.begin(node.tracked, KEYS, 0, queued=True)
    node.give_all()
    node.cache.reset(end)
    assert node.offer() in (0, None)
    node.fetches.end(node.tracked)


def test_a_block_that_another_request_found_unreadable_is_not_offered(node: Node) -> None:
    node.fetches.begin(node.tracked, KEYS, 0, queued=True)
    node.give_all()
    node.load(Status.DONE)
    assert node.offer() == 4
    node.load(Status.FAILED)
    node.disk.blocks.clear()
    assert node.offer() == 0
    node.assert_at_rest()


def test_what_a_tier_has_got_while_a_request_was_queued_comes_in_the_same_fetch(
    node: Node,
) -> None:
    later = {key: node.disk.blocks.pop(key) for key in KEYS[2:]}
    fetch = node.fetches.begin(node.tracked, KEYS, 0, queued=True)
    node.give_all()
    node.disk.blocks |= later
    assert node.offer() is None
    assert node.tracked.fetch is fetch
    assert node.tracked.awaited.keys() == set(KEYS)
    node.give_all()
    assert node.offer() == 4
    node.assert_at_rest()
    assert len(node.ended) == 1


@pytest.mark.parametrize("outcome", [Outcome.DROPPED, Outcome.DONE])
def test_a_read_that_was_dropped_in_the_queue_is_repeated_at_the_turn(
    node: Node, outcome: Outcome
) -> None:
    """Full queues drop prefetches, but no read for a request that waits."""
    node.fetches.begin(node.tracked, KEYS, 0, queued=True)
    node.disk.end(node.disk.of(KEYS[1]), Outcome.DROPPED)
    node.disk.end_all(outcome)
    node.cache.poll()
    assert node.offer() is None
    node.give_all()
    assert node.offer() == 4
    node.assert_at_rest()


BLOCKS = [bytes([i]) for i in range(8)]


def test_what_a_fetch_has_is_neither_copied_as_it_grows_nor_noted_as_it_ends(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = KEYS[:1]
    fetch = node.fetches.begin(node.tracked, given, 0)
    assert fetch is not None
    assert node.fetches.extend(node.tracked, KEYS[1:2])
    grown = fetch.keys
    assert node.fetches.extend(node.tracked, KEYS[2:])
    assert fetch.keys is grown
    assert (given, grown) == (KEYS[:1], KEYS)
    monkeypatch.setattr(fetches, "note_media", None)
    node.assert_at_rest()


def test_blocks_count_for_the_tier_that_the_last_fetch_took_them_from() -> None:
    first = FetchState(
        0.0, awaited=(AwaitedBlocks(0, 2, Medium.DISK), AwaitedBlocks(4, 6, Medium.OBJECTS))
    )
    second = FetchState(0.0, awaited=(AwaitedBlocks(0, 1, Medium.MOONCAKE),))
    media: dict[bytes, Medium] = {}
    note_media(media, BLOCKS, first)
    note_media(media, BLOCKS[1:], second)
    assert fetched_blocks(media, BLOCKS) == {Medium.DISK: 1, Medium.MOONCAKE: 1, Medium.OBJECTS: 2}
    assert fetched_blocks(media, BLOCKS[:2]) == {Medium.DISK: 1, Medium.MOONCAKE: 1}


def test_blocks_that_no_tier_gave_are_those_of_host_memory() -> None:
    media = {BLOCKS[0]: Medium.HOST, BLOCKS[1]: Medium.DISK}
    assert fetched_blocks(media, BLOCKS) == {Medium.DISK: 1}
    assert fetched_blocks({}, BLOCKS) == {}


def test_the_slowest_tiers_keep_their_tokens_first() -> None:
    fetched = {Medium.DISK: 10, Medium.OBJECTS: 5}
    assert slowest(fetched) is Medium.OBJECTS
    assert limited(fetched, 7) == {Medium.OBJECTS: 5, Medium.DISK: 2}


@pytest.mark.parametrize("follows", [False, True], ids=["ended", "followed"])
def test_an_error_as_a_fetch_ends_loses_no_fetch(
    node: Node, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    node.fetches.begin(node.tracked, KEYS[:2], 0)
    end, errors = node.cache.end_fetch, [MemoryError()]

    def fail(fetch: FetchId) -> FetchState:
        if errors:
            raise errors.pop()
        return end(fetch)

    monkeypatch.setattr(node.cache, "end_fetch", fail)
    if follows:
        with pytest.raises(MemoryError):
            node.fetches.begin(node.tracked, KEYS, 0)
    else:
        with pytest.raises(MemoryError):
            node.fetches.end(node.tracked)
    assert node.tracked.fetch is not None
    node.assert_at_rest()
