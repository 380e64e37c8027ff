# SPDX-License-Identifier: Apache-2.0
"""Fetches of blocks that another node is said to write to a store which both share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from memory_store import MemoryStore
from two_tiers import LONG, Node, content, names

from flexkv.client import FetchId
from flexkv.engine.scheduler.fetches import Fetches
from flexkv.engine.scheduler.options import RequestOptions
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.tiers.circuit import FAILURES
from flexkv.transfer import sources
from flexkv.types.changes import Medium
from packages.conftest import Clock
from packages.seen_fetch import SeenFetch


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store lacks is asked again because it is announced, not because a test was slow."""
    monkeypatch.setattr(sources, "LACKS_SECONDS", LONG)


Make = Callable[..., Node]


@pytest.fixture
def make(tmp_path: Path, store: MemoryStore, at_end: ExitStack) -> Make:
    roots = (tmp_path / str(number) for number in count())
    return lambda **options: at_end.enter_context(closing(Node(next(roots), store, **options)))


def fill(store: MemoryStore, text: str) -> None:
    store.fill({key: content(key) for key in names(text)})


def begin(node: Node, text: str, announced: int) -> SeenFetch:
    fetch = node.cache.fetch(names(text), announced=announced)
    assert fetch is not None
    return SeenFetch(node.cache, FetchId(fetch), names(text))


def test_announced_blocks_come_when_the_store_has_got_them(make: Make, store: MemoryStore) -> None:
    node = make()
    fetch = begin(node, "abcd", announced=3)
    begun = fetch.begun
    node.until(lambda: len(store.finds) == 4)
    assert (fetch.arrived, fetch.stop, fetch.queried) == (0, 3, Medium.MOONCAKE)
    fill(store, "a")
    node.until(lambda: fetch.arrived == 1)
    assert fetch.begun > begun, "the store is not slow: it did not have the blocks"
    begun = fetch.begun
    fill(store, "bc")
    node.until(lambda: fetch.done)
    assert (fetch.arrived, fetch.begun) == (3, begun)
    node.assert_own_bytes()
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def test_only_the_next_block_is_asked_about_until_it_is_there(
    make: Make, store: MemoryStore
) -> None:
    node = make()
    fetch = begin(node, "abcd", announced=3)
    node.until(lambda: len(store.finds) == 4)
    assert store.finds[:4] == [names("abcd"), names("a"), names("a"), names("a")]
    fill(store, "abc")
    node.until(lambda: fetch.done)
    assert fetch.arrived == 3
    assert names("bc") in store.finds
    assert store.finds.count(names("bc")) == 1
    node.cache.end_fetch(fetch)


def test_a_block_that_does_not_come_ends_the_fetch_at_its_deadline(
    make: Make, store: MemoryStore, clock: Clock
) -> None:
    fill(store, "a")
    node = make(stall_seconds=1.0)
    fetch = begin(node, "abc", announced=3)
    node.until(lambda: fetch.arrived == 1)
    clock.skip(9.0)
    asked = len(store.finds)
    node.until(lambda: len(store.finds) > asked + 1)
    assert (fetch.done, fetch.stop) == (False, 3)
    clock.skip(1.1)
    node.until(lambda: fetch.done)
    assert (fetch.arrived, fetch.stop) == (1, 1)
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def test_a_request_that_was_queued_for_longer_waits_at_its_turn(
    make: Make, store: MemoryStore, clock: Clock
) -> None:
    node = make()
    request: Any = SimpleNamespace(request_id="r")
    tracked = TrackedRequest(request, RequestOptions())
    fetches = Fetches(node.cache, False, lambda *_: None)
    fetch = fetches.begin(tracked, names("abc"), 0, queued=True, announced=3)
    assert fetch is not None
    node.until(lambda: len(store.finds) == 2)
    clock.skip(10.1)
    node.until(lambda: node.cache.fetch_state(fetch.id).done)

    def offer() -> int | None:
        return fetches.offer(tracked, names("abc"), 0, lambda *_: True, announced=3)

    assert offer() is None
    fill(store, "abc")
    node.until(lambda: offer() == 3)
    fetches.end(tracked)
    node.assert_at_rest()


def test_each_block_that_comes_gives_the_next_one_time(
    make: Make, store: MemoryStore, clock: Clock
) -> None:
    node = make(stall_seconds=1.0)
    fetch = begin(node, "abc", announced=3)
    for number, name in enumerate("abc", start=1):
        node.until(lambda: fetch.queried is not None)
        asked = len(store.finds)
        node.until(lambda asked=asked: len(store.finds) > asked)  # type: ignore[misc]
        clock.skip(9.0)
        fill(store, name)
        node.until(lambda number=number: fetch.arrived == number)  # type: ignore[misc]
    assert fetch.done
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def test_the_disk_gives_what_it_has_and_the_store_the_rest(make: Make, store: MemoryStore) -> None:
    node = make()
    node.put_on_disk("ab")
    fetch = begin(node, "abcd", announced=4)
    node.until(lambda: fetch.arrived == 2)
    assert fetch.stop == 4
    fill(store, "cd")
    node.until(lambda: fetch.done)
    assert fetch.media == {
        key: Medium.DISK if key in names("ab") else Medium.MOONCAKE for key in names("abcd")
    }
    node.cache.end_fetch(fetch)


def test_nobody_waits_for_a_store_that_cannot_be_asked(make: Make, store: MemoryStore) -> None:
    store.broken = {"find"}
    node = make()
    for number in range(FAILURES):
        assert node.fetched(chr(ord("p") + number)) == ""
    assert node.cache.fetch(names("abc"), announced=3) is None


def test_without_a_store_nothing_is_awaited(tmp_path: Path, make: Make) -> None:
    node = make()
    assert node.fetched("abc") == ""
    assert node.cache.fetch(names("abc")) is None, "the store has said that it lacks them"
    fetch = begin(node, "abc", announced=1)
    assert fetch.stop == 1
    node.cache.end_fetch(fetch)
    node.assert_at_rest()
