# SPDX-License-Identifier: Apache-2.0
"""Subscribers are told of each page that a tier can load, once, and of each that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from page_subscriber import Subscriber, numbers_of, pages_of
from sglang_world import PATIENCE_SECONDS, Rank, hashes_of

from flexkv.types.changes import Medium
from flexkv_sglang.events import TierEvent
from packages.inside import cache_of
from packages.inside_adapters import kept_pages

MakeRank = Callable[..., Rank]
HOST, DISK = Medium.HOST, Medium.DISK


@pytest.fixture
def subscribe(make_rank: MakeRank) -> Callable[..., Subscriber]:
    return lambda **settings: Subscriber(make_rank(settings=settings))


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {
        "ssd_cache_gb": 1 / 64,
        "ssd_cache_dir": (str(tmp_path / "disk"),),
        "ssd_timeout_seconds": PATIENCE_SECONDS,
    }


def test_stored_pages_are_told_in_their_order(subscribe: Callable[..., Subscriber]) -> None:
    subscriber = subscribe()
    subscriber.offload("a", 3)
    told = subscriber.listen()
    assert [each.page for each in told] == pages_of("a", 3)
    assert {(each.medium, each.stored) for each in told} == {(HOST, True)}
    assert subscriber.listen() == []


def test_pages_of_an_engine_whose_keys_are_its_own_are_told(make_rank: MakeRank) -> None:
    """As in the node's service, if another process would mean other blocks by them."""
    rank = make_rank()
    rank.side.page_keys.renew(mixed=False)
    subscriber = Subscriber(rank)
    subscriber.offload("a", 3)
    assert [each.page for each in subscriber.listen()] == pages_of("a", 3)


def test_a_page_that_is_offered_again_is_told_once(subscribe: Callable[..., Subscriber]) -> None:
    subscriber = subscribe()
    subscriber.offload("a", 2)
    subscriber.listen()
    subscriber.learn("a", 2)
    assert subscriber.listen() == []


def test_evicted_pages_are_told(subscribe: Callable[..., Subscriber]) -> None:
    subscriber = subscribe()
    arena = cache_of(subscriber.rank.side)
    assert arena is not None
    room = arena.info.num_slots
    for number in range(room // 10 + 2):
        subscriber.offload(f"prompt {number}", 10)
        subscriber.leave(f"prompt {number}", 10)
        subscriber.listen()
    known = {number for _, number in subscriber.known}
    assert len(known) == arena.ready_blocks <= room
    assert set(numbers_of(f"prompt {room // 10 + 1}", 10)) <= known
    assert not set(numbers_of("prompt 0", 10)) & known
    # Nothing is kept of what no tier has.
    assert len(kept_pages(subscriber.events)) == len(known)


def test_pages_on_disk_are_told_beside_those_in_host_memory(
    subscribe: Callable[..., Subscriber], disk: dict[str, Any]
) -> None:
    subscriber = subscribe(**disk)
    subscriber.offload("a", 3)
    subscriber.wait_for(DISK, set(numbers_of("a", 3)))
    subscriber.wait_for(HOST, set(numbers_of("a", 3)))


def test_what_an_earlier_engine_wrote_is_told_in_full(
    subscribe: Callable[..., Subscriber], disk: dict[str, Any]
) -> None:
    first = subscribe(**disk)
    first.offload("a", 3)
    first.wait_for(DISK, set(numbers_of("a", 3)))
    first.rank.close()
    second = subscribe(**disk)
    second.wait_for(DISK, set(numbers_of("a", 3)))
    assert list(second.pages.values()) == pages_of("a", 3)
    before = [each.page for each in told_again(second)]
    assert before == pages_of("a", 3)


def told_again(subscriber: Subscriber) -> list[TierEvent]:
    subscriber.flush()
    return subscriber.listen()


def test_what_an_earlier_engine_wrote_without_events_is_told_once_sglang_has_it(
    make_rank: MakeRank, subscribe: Callable[..., Subscriber], disk: dict[str, Any]
) -> None:
    first = make_rank(settings=disk)
    assert first.store(hashes_of("a", 3), [1, 2, 3])
    first.close()
    second = subscribe(**disk)
    assert second.listen() == []
    second.learn("a", 2)
    assert [each.page for each in second.listen()] == pages_of("a", 2)
    assert {medium for medium, _ in second.known} == {DISK}


def test_after_a_flush_all_is_told_again(subscribe: Callable[..., Subscriber]) -> None:
    subscriber = subscribe()
    subscriber.offload("a", 3)
    before = subscriber.listen()
    subscriber.flush()
    assert subscriber.listen() == before


def test_other_weights_end_all_pages(subscribe: Callable[..., Subscriber]) -> None:
    subscriber = subscribe()
    subscriber.offload("a", 3)
    subscriber.listen()
    subscriber.rank.side.weights_changed(flushed=True)
    told = subscriber.listen()
    assert [each.stored for each in told] == [False] * 3
    assert not subscriber.known
    subscriber.offload("a", 3)
    assert [each.stored for each in subscriber.listen()] == [True] * 3


def test_pages_of_old_weights_are_not_told(subscribe: Callable[..., Subscriber]) -> None:
    subscriber = subscribe()
    subscriber.offload("a", 3)
    subscriber.rank.side.weights_changed(flushed=True)
    assert subscriber.listen() == []


def test_pages_of_new_weights_are_told_on_disk_too(
    subscribe: Callable[..., Subscriber], disk: dict[str, Any]
) -> None:
    subscriber = subscribe(**disk)
    subscriber.rank.side.weights_changed(flushed=True)
    subscriber.offload("a", 3)
    subscriber.wait_for(DISK, set(numbers_of("a", 3)))


@pytest.mark.parametrize("place", ["_forget", "confirm"], ids=["is computed", "is published"])
def test_after_an_error_all_pages_are_told_anew(
    subscribe: Callable[..., Subscriber], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The cache has given the changes that the lost events were of."""

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("on purpose")

    subscriber = subscribe()
    subscriber.offload("a", 3)
    subscriber.listen()
    arena = cache_of(subscriber.rank.side)
    assert arena is not None
    assert arena.remove(subscriber.rank.side.keys_of(hashes_of("a", 3)[2:])) == 0
    subscriber.offload("b", 2)
    with monkeypatch.context() as patch:
        patch.setattr(subscriber.events, place, fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            subscriber.listen()
    subscriber.listen()
    wanted = {(HOST, number) for number in [*numbers_of("a", 2), *numbers_of("b", 2)]}
    assert subscriber.known == wanted
    assert subscriber.listen() == []


def test_pages_that_nobody_has_are_not_kept(subscribe: Callable[..., Subscriber]) -> None:
    subscriber = subscribe()
    subscriber.learn("a", 3)
    assert subscriber.listen() == []
    subscriber.leave("a", 3)
    assert subscriber.listen() == []
    assert not kept_pages(subscriber.events)


def test_nobody_pays_for_events_that_nobody_wants(make_rank: MakeRank) -> None:
    assert make_rank().side.events is None


def test_a_page_that_has_come_back_meanwhile_is_not_told(
    subscribe: Callable[..., Subscriber],
) -> None:
    subscriber = subscribe()
    subscriber.offload("a", 3)
    subscriber.listen()
    arena = cache_of(subscriber.rank.side)
    assert arena is not None
    for number in range(arena.info.num_slots // 10 + 2):
        subscriber.offload(f"prompt {number}", 10, told=False)
    assert arena.missing(subscriber.rank.side.keys_of(hashes_of("a", 3)))
    subscriber.offload("a", 3)
    assert not {each.page.number for each in subscriber.listen()} & set(numbers_of("a", 3))


def test_what_one_call_leaves_the_calls_of_an_engine_at_rest_report(
    subscribe: Callable[..., Subscriber], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang publishes events in each round of its idle loop."""
    monkeypatch.setattr("flexkv.cache._CHANGES", 2)
    subscriber = subscribe()
    subscriber.offload("a", 5)
    cache = cache_of(subscriber.rank.side)
    assert cache is not None
    assert [len(subscriber.listen()) for _ in range(4)] == [2, 2, 1, 0]
    assert not cache.status.has_changes
    assert subscriber.known == {(HOST, number) for number in numbers_of("a", 5)}
