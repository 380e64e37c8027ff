# SPDX-License-Identifier: Apache-2.0
"""Engines wait for blocks that another one is storing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import NoReturn

import pytest

from flexkv.client import FetchId, FetchState, Reset, Transfer, TransferEnd
from flexkv.eviction import RequestContext
from flexkv.service import attach as attaching
from flexkv.service import messages as wire
from flexkv.service import pool_keys
from flexkv.service.attached import AttachedEngine
from flexkv.service.lobby import RefusalError
from flexkv.service.pool_keys import AnnouncedKeys, Announcements
from flexkv.types.mover import Status
from flexkv.types.presence import Presence
from packages.flexkv.tests.service.served import (
    Scheduler,
    Service,
    attached_again,
    keys_of,
    until,
)
from packages.inside import (
    announced,
    announced_keys,
    index_of,
    open_fetches,
    stores_of,
    tier_keys,
)

Attach = Callable[..., Scheduler]

KEYS = keys_of("a", 6)
SLOTS = 128
"""Enough for three engines to be granted as many slots as there are keys."""


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends because it takes long."""
    monkeypatch.setattr(pool_keys, "ANNOUNCED_SECONDS", 1e9)


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    return make_service(SLOTS)


def ordered(one: Scheduler, keys: Sequence[bytes], places: Sequence[int]) -> Transfer:
    """A store that no rank has copied yet."""
    transfer = one.cache.store(keys, places)
    assert transfer is not None
    return transfer


def awaited(other: Scheduler, keys: Sequence[bytes]) -> FetchId:
    """A fetch of blocks that have been announced."""
    until(lambda: other.cache.presence(keys)[-1] is Presence.BELOW)
    fetch = other.cache.fetch(keys)
    assert fetch is not None
    other.cache.poll()
    return fetch


def state(other: Scheduler, fetch: FetchId) -> FetchState:
    """The state once it is done."""
    until(lambda: other.cache.fetch_state(fetch).done, other.cache.poll)
    return other.cache.fetch_state(fetch)


def settled(service: Service, *engines: Scheduler) -> None:
    for engine in engines:
        engine.settle()
    until(service.accounted)
    index = index_of(service.pool.cache)
    assert not any(announced_keys(service.pool).contains(KEYS))
    assert not announced(service.pool.cache)
    assert not index.stale_blocks


def test_an_engine_waits_for_what_another_is_storing(service: Service, attach: Attach) -> None:
    one, other = attach(service), attach(service)
    transfer = ordered(one, KEYS, range(6))
    fetch = awaited(other, KEYS)
    until(lambda: open_fetches(service.pool.cache))
    until(lambda: other.cache.fetch_state(fetch).missing == {}, other.cache.poll)
    assert not other.cache.fetch_state(fetch).done
    assert other.cache.lookup(KEYS) == 0
    one.copy(transfer)
    one.settle()
    assert state(other, fetch).arrived == 6
    assert other.load(KEYS)
    other.cache.end_fetch(fetch)
    settled(service, one, other)


def test_a_prompt_of_several_steps_comes_as_far_as_it_is_ordered(
    service: Service, attach: Attach
) -> None:
    one, other = attach(service), attach(service)
    one.store(KEYS[:2])
    transfer = ordered(one, KEYS[:5], [2, 3, 4])
    until(lambda: other.cache.presence(KEYS)[4] is Presence.BELOW)
    assert other.cache.presence(KEYS) == [
        *[Presence.HOST] * 2,
        *[Presence.BELOW] * 3,
        Presence.ABSENT,
    ]
    fetch = awaited(other, KEYS[:5])
    assert other.cache.fetch([*KEYS[3:], b"x"]) is not None, "without what is behind them"
    other.settle_line()
    one.copy(transfer)
    one.settle()
    done = state(other, fetch)
    assert (done.first, done.arrived, done.stop) == (2, 5, 5)
    other.cache.end_fetch(fetch)
    settled(service, one, other)


def test_blocks_that_requests_fill_one_by_one_are_not_announced(
    service: Service, attach: Attach
) -> None:
    """A step that decodes stores a block here and there, and each message costs it time."""
    one, other = attach(service), attach(service)
    one.store(KEYS[:1])
    one.store(keys_of("b", 1))
    chain = [*KEYS[:2], *keys_of("b", 2)]
    transfer = one.cache.store(chain, [1, 3], prefix_starts=(0, 2))
    assert transfer is not None
    one.settle_line()
    assert other.cache.presence(chain) == [Presence.HOST, Presence.ABSENT] * 2
    one.copy(transfer)
    settled(service, one, other)
    assert other.cache.lookup(KEYS) == 2


@pytest.mark.parametrize("how", ["fails", "is cancelled", "is discarded", "is reset", "leaves"])
def test_a_store_that_comes_to_nothing_ends_the_wait(
    service: Service, attach: Attach, how: str
) -> None:
    one, other = attach(service), attach(service)
    transfer = ordered(one, KEYS, range(6))
    fetch = awaited(other, KEYS)
    if how == "fails":
        one.copy(transfer, Status.FAILED)
    elif how == "is cancelled":
        one.cache.end_transfer(transfer.id, TransferEnd.CANCEL)
    elif how == "is discarded":
        one.cache.end_transfer(transfer.id, TransferEnd.DISCARD)
        one.copy(transfer)
    elif how == "is reset":
        one.cache.reset(Reset.CLEAR)
        one.copy(transfer)
    if how == "leaves":
        one.close()
    else:
        one.settle()
    assert state(other, fetch).arrived == 0
    assert other.cache.presence(KEYS) == [Presence.ABSENT] * 6
    other.cache.end_fetch(fetch)
    assert other.store(KEYS) == KEYS
    settled(service, other)


def test_a_part_that_is_not_published_ends_the_prefix(service: Service, attach: Attach) -> None:
    one, other = attach(service), attach(service)
    transfer = ordered(one, KEYS, range(6))
    fetch = awaited(other, KEYS)
    one.cache.end_transfer(transfer.id, TransferEnd.DISCARD, [3])
    one.copy(transfer)
    one.settle()
    done = state(other, fetch)
    assert (done.arrived, done.stop) == (3, 3)
    other.cache.end_fetch(fetch)
    settled(service, one, other)


def test_of_two_that_store_the_same_one_is_enough(service: Service, attach: Attach) -> None:
    first, second, other = attach(service), attach(service), attach(service)
    failing, coming = ordered(first, KEYS, range(6)), ordered(second, KEYS, range(6))
    fetch = awaited(other, KEYS)
    first.copy(failing, Status.FAILED)
    first.settle()
    assert not other.cache.fetch_state(fetch).done
    second.copy(coming)
    second.settle()
    assert state(other, fetch).arrived == 6
    assert other.load(KEYS)
    other.cache.end_fetch(fetch)
    settled(service, first, second, other)


def test_nobody_waits_longer_for_an_engine_that_hangs(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = attach(service), attach(service)
    transfer = ordered(one, KEYS, range(6))
    fetch = awaited(other, KEYS)
    monkeypatch.setattr(pool_keys, "ANNOUNCED_SECONDS", 0.0)
    assert state(other, fetch).arrived == 0
    other.cache.end_fetch(fetch)
    one.copy(transfer)
    one.settle()
    assert other.load(KEYS), "published all the same"
    settled(service, one, other)


def test_blocks_of_a_disk_and_of_another_engine_come_as_one_prefix(
    make_service: Callable[..., Service], attach: Attach, tmp_path: Path
) -> None:
    service = make_service(
        SLOTS,
        eviction_policy="lru",
        ssd_cache_gb=0.01,
        ssd_cache_dir=(str(tmp_path / "disk"),),
        ssd_timeout_seconds=60.0,
    )
    one, other = attach(service), attach(service)
    one.store(KEYS[:3])
    names = (f"b {number}" for number in count())
    until(
        lambda: other.cache.presence(KEYS[:3]) == [Presence.BELOW] * 3,
        lambda: one.store(keys_of(next(names), 8)),
    )
    back = one.cache.fetch(KEYS[:3])
    assert back is not None
    assert state(one, back).arrived == 3
    transfer = ordered(one, KEYS, [3, 4, 5])
    fetch = awaited(other, KEYS)
    until(lambda: len(open_fetches(service.pool.cache)) == 2)
    one.copy(transfer)
    one.settle()
    assert state(other, fetch).arrived == 6
    assert other.load(KEYS)
    for engine, each in ((one, back), (other, fetch)):
        engine.cache.end_fetch(each)
    settled(service, one, other)


def test_a_new_service_knows_no_announcement_of_the_last(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "_FIRST_SECONDS", 0.01)
    one, other = attach(service), attach(service)
    transfer = ordered(one, KEYS, range(6))
    fetch = awaited(other, KEYS)
    service.close()
    assert state(other, fetch).arrived == 0
    other.cache.end_fetch(fetch)
    service.start()
    until(lambda: attached_again(service, one, other))
    assert other.cache.presence(KEYS) == [Presence.ABSENT] * 6
    one.copy(transfer)
    until(lambda: other.cache.lookup(KEYS) == 6, lambda: (one.cache.poll(), other.cache.poll()))
    settled(service, one, other)


COMPUTES = RequestContext(request_id="r", stores=True)


def test_an_engine_waits_for_all_of_a_prompt_that_another_computes(
    service: Service, attach: Attach
) -> None:
    """It takes several steps, between which nothing is being stored."""
    one, other = attach(service), attach(service)
    one.cache.record((), COMPUTES, KEYS)
    fetch = awaited(other, KEYS)
    for stop in (2, 4, 6):
        one.store(KEYS[:stop])
        until(lambda stop=stop: other.cache.fetch_state(fetch).arrived == stop, other.cache.poll)
    assert other.load(KEYS)
    other.cache.end_fetch(fetch)
    settled(service, one, other)
    one.cache.ended("r", 1)
    one.settle_line()


@pytest.mark.parametrize(
    "how", ["ends", "has no slots", "hangs", "leaves", "is reset", "pauses", "has a failed store"]
)
def test_what_a_request_does_not_compute_or_store_ends_the_wait(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    one, other = attach(service), attach(service)
    one.cache.record((), COMPUTES, KEYS)
    fetch = awaited(other, KEYS)
    one.store(KEYS[:3])
    until(lambda: other.cache.fetch_state(fetch).arrived == 3, other.cache.poll)
    assert not other.cache.fetch_state(fetch).done
    if how == "ends":
        one.cache.ended("r", 0)
    elif how == "has no slots":
        stores_of(one.cache).free.clear()
        assert one.cache.store(KEYS, [3, 4, 5]) is None
    elif how == "is reset":
        one.cache.reset(Reset.CLEAR)
    elif how == "pauses":
        one.cache.reset(Reset.PAUSE)
    elif how == "has a failed store":
        one.copy(ordered(one, KEYS[:4], [3]), Status.FAILED)
    elif how == "hangs":
        monkeypatch.setattr(pool_keys, "ANNOUNCED_SECONDS", 0.0)
    else:
        one.close()
    if how != "leaves":
        one.cache.poll()
        one.settle_line()
    done = state(other, fetch)
    assert (done.arrived, done.stop) == (3, 3)
    assert other.cache.presence(KEYS)[3:] == [Presence.ABSENT] * 3
    other.cache.end_fetch(fetch)
    assert not announced(service.pool.cache)


@pytest.mark.parametrize(
    ("context", "found"),
    [(RequestContext(request_id="r"), 0), (COMPUTES, 6), (RequestContext(stores=True), 0)],
    ids=["not stored", "found", "no request"],
)
def test_what_nobody_computes_and_stores_is_not_announced(
    service: Service, attach: Attach, context: RequestContext, found: int
) -> None:
    one, other = attach(service), attach(service)
    one.cache.record(KEYS[:found], context, KEYS)
    one.store(keys_of("b", 1))
    assert other.cache.presence(KEYS) == [Presence.ABSENT] * 6
    assert other.cache.fetch(KEYS) is None


def test_an_engine_that_stores_nothing_announces_nothing(service: Service, attach: Attach) -> None:
    one, other = attach(service), attach(service)
    one.cache.reset(Reset.STOP)
    one.cache.record((), COMPUTES, KEYS)
    one.settle()
    other.store(keys_of("b", 1))
    assert other.cache.fetch(KEYS) is None


def test_without_a_lower_tier_nobody_asks_for_what_nobody_announces(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a service that has begun again still looks at what is there."""
    other = attach(service)
    monkeypatch.setattr(service.pool.below, "note", lambda *_, **__: None)
    tier_keys(service.pool).is_complete = False
    assert other.cache.presence(KEYS) == [Presence.ABSENT] * 6
    assert other.cache.fetch(KEYS) is None


def test_two_requests_with_one_prompt_announce_it_once(service: Service, attach: Attach) -> None:
    one, other = attach(service), attach(service)
    one.cache.record((), COMPUTES, KEYS)
    one.cache.record((), RequestContext(request_id="s", stores=True), [*KEYS, b"x"])
    fetch = awaited(other, [*KEYS, b"x"])
    one.cache.ended("s", 0)
    left = [*[Presence.BELOW] * 6, Presence.ABSENT]
    until(lambda: other.cache.presence([*KEYS, b"x"]) == left, one.cache.poll)
    one.store(KEYS)
    assert state(other, fetch).arrived == 6
    other.cache.end_fetch(fetch)
    settled(service, one, other)


@pytest.mark.parametrize(
    ("cell", "blocks", "reason"),
    [
        (-1, 1, "cell -1 is none of the board"),
        (1 << 20, 1, "none of the board"),
        (0, SLOTS + 1, "more"),
    ],
)
def test_no_engine_announces_what_cannot_be(
    service: Service, attach: Attach, cell: int, blocks: int, reason: str
) -> None:
    attach(service)
    with pytest.raises(RefusalError, match=reason):
        service.engine.handle(wire.Announce(cell, keys_of("x", blocks)))


class OnPurposeError(Exception):
    """Of a test."""


@pytest.mark.parametrize("failures", [1, 2], ids=["at its end", "when its engine leaves, too"])
def test_a_fetch_whose_end_fails_holds_nothing_afterwards(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise RefusalError("for the test")

    one, other = attach(service), attach(service)
    ordered(one, KEYS, range(6))
    fetch = awaited(other, KEYS)
    cache = service.pool.cache
    until(lambda: open_fetches(cache))
    end_fetch, failed, ended = cache.end_fetch, list[FetchId](), list[FetchId]()

    def fail(number: FetchId) -> FetchState:
        if len(failed) < failures:
            failed.append(number)
            raise OnPurposeError
        ended.append(number)
        return end_fetch(number)

    monkeypatch.setattr(cache, "end_fetch", fail)
    monkeypatch.setattr(AttachedEngine, "resume", refuse)
    other.cache.end_fetch(fetch)
    other.settle_line()
    until(lambda: not open_fetches(cache))
    assert {*failed} == {*ended}
    assert len(failed) == failures
    assert [engine.has_ended for engine in service.server.engines] == [False, True]


@pytest.mark.parametrize("request_", [False, True], ids=["of a store", "of a request"])
@pytest.mark.parametrize("place", ["begin", "end"])
def test_an_error_leaves_nothing_announced(
    service: Service,
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    request_: bool,
) -> None:
    attach(service)
    service.stop()
    pool = service.pool
    mine = Announcements(pool.announced, SLOTS)
    whole = vars(AnnouncedKeys)[place]

    def fail(keys: AnnouncedKeys, names: Sequence[bytes]) -> NoReturn:
        if place == "begin":
            whole(keys, names)
        raise OnPurposeError

    def begin() -> None:
        if request_:
            mine.begin_request("r", KEYS)
        else:
            mine.begin(7, KEYS)

    if place == "end":
        begin()
    with monkeypatch.context() as patch:
        patch.setattr(AnnouncedKeys, place, fail)
        with pytest.raises(OnPurposeError):
            (begin if place == "begin" else mine.clear)()
    mine.clear()
    assert not announced(pool.cache)
    assert not any(announced_keys(pool).contains(KEYS))
