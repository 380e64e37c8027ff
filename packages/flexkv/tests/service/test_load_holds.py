# SPDX-License-Identifier: Apache-2.0
"""How much of a pool the loads of an engine may hold, and what an engine gets that holds more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.client import Transfer, TransferEnd
from flexkv.engine.scheduler.fetches import Fetches
from flexkv.engine.scheduler.options import RequestOptions
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.service import engine_requests, page
from flexkv.service.attached import AttachedEngine
from flexkv.types.changes import Medium
from flexkv.types.presence import Presence
from packages.flexkv.tests.service.served import Scheduler, Service, keys_of, until
from packages.inside import open_fetches, reader_of, stores_of

Attach = Callable[..., Scheduler]


@pytest.fixture
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service looks at what engines hold in each turn."""
    from flexkv.service import server

    monkeypatch.setattr(server, "_GONE_SECONDS", 0.0)


def begun(one: Scheduler, keys: list[bytes]) -> Transfer:
    """A load that does not end."""
    transfer = one.cache.load(keys)
    assert transfer is not None, keys[0]
    return transfer


def engine_of(service: Service, one: Scheduler) -> AttachedEngine:
    number = one.ticket.client
    return next(each for each in service.server.engines if each.number == number)


def stored(one: Scheduler, names: str) -> list[list[bytes]]:
    """Prompts of four blocks."""
    prompts = [keys_of(name, 4) for name in names]
    for prompt in prompts:
        until(
            lambda prompt=prompt: one.cache.lookup(prompt) == 4,
            lambda prompt=prompt: one.store(prompt),
        )
    return prompts


def test_an_engine_alone_may_hold_the_whole_pool(service: Service, attach: Attach) -> None:
    one = attach(service, step_blocks=4)
    prompts = stored(one, "abcdef")
    for prompt in prompts:
        assert one.cache.lookup(prompt) == 4
        begun(one, prompt)
    assert reader_of(one.cache).held == 24


def test_an_engine_among_others_holds_a_quarter_of_the_pool(
    service: Service, attach: Attach
) -> None:
    """More is a miss for it, and a hit for the others."""
    one, other = attach(service, step_blocks=4), attach(service, step_blocks=4)
    prompts = stored(other, "abc")
    first, second = (begun(one, prompt) for prompt in prompts[:2])
    left = prompts[2]
    assert one.cache.lookup(left) == 0
    assert one.cache.load(left) is None
    assert one.cache.presence(left) == [Presence.ABSENT] * 4
    assert one.cache.missing(left) == [], "it stores nothing twice"
    assert one.cache.status.loading_blocks == reader_of(one.cache).held == 8
    assert other.cache.lookup(left) == 4
    assert other.load(left)
    one.copy(first)
    assert one.cache.poll()
    assert one.cache.lookup(left) == 4
    assert one.cache.presence(left) == [Presence.HOST] * 4
    for transfer in (second, begun(one, left)):
        one.copy(transfer)
    one.settle()
    until(service.accounted)


def test_a_hit_ends_where_the_share_does(service: Service, attach: Attach) -> None:
    one, other = attach(service, step_blocks=8), attach(service, step_blocks=8)
    first, second = keys_of("a", 6), keys_of("b", 6)
    for prompt in (first, second):
        other.store(prompt[:3])
        other.store(prompt)
        assert other.cache.lookup(prompt) == 6
    begun(one, first)
    assert one.cache.lookup(second) == 2
    assert one.cache.presence(second) == [Presence.HOST] * 2 + [Presence.ABSENT] * 4
    assert one.cache.load(second[:3]) is None
    begun(one, second[:2])


def test_loads_of_the_same_blocks_count_once(service: Service, attach: Attach) -> None:
    one, _ = attach(service, step_blocks=4), attach(service, step_blocks=4)
    (prompt,) = stored(one, "a")
    for _ in range(5):
        begun(one, prompt)
    assert reader_of(one.cache).held == 20
    assert reader_of(one.cache).held_slots == 4


def test_a_lone_load_may_hold_half_of_the_pool(service: Service, attach: Attach) -> None:
    """Else a prompt longer than a quarter of a small pool would never be a hit."""
    one, other = attach(service, step_blocks=8), attach(service, step_blocks=8)
    long = keys_of("long", 18)
    until(lambda: not other.cache.missing(long), lambda: other.store(long))
    assert other.cache.lookup(long) == 16
    assert other.cache.load(long) is None
    first = begun(one, long[:16])
    assert one.cache.lookup(long[16:]) == 0
    assert one.cache.lookup(long) == 0, "it is 18 blocks"
    assert one.cache.lookup(long[:16]) == 16, "it holds them"
    assert one.cache.presence(long[:16]) == [Presence.HOST] * 16
    second = begun(one, long[:16])
    one.cache.end_transfer(first.id, TransferEnd.CANCEL)
    one.copy(second)
    one.settle()
    assert reader_of(one.cache).held_slots == 0


@pytest.mark.usefixtures("look_often")
def test_an_engine_that_breaks_its_share_gets_no_more_and_reads_no_wrong_byte(
    service: Service, attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes its holds itself, as a faulty engine may."""
    caplog.set_level(logging.WARNING)
    rogue, other = attach(service, step_blocks=4), attach(service, step_blocks=4)
    prompts = stored(rogue, "abcde")
    rogue.settle()
    reader = reader_of(rogue.cache)
    slots = {key: slot for prompt in prompts for key, slot in _held(rogue, prompt)}
    assert len(slots) == 20
    engine, numbers = engine_of(service, rogue), count()

    def store_another() -> None:
        other.store([b"%d" % next(numbers)])
        other.settle()

    def warned() -> list[str]:
        lines = [each.getMessage() for each in caplog.records]
        return [each for each in lines if "holds 20 of the pool's 32 blocks" in each]

    until(warned, store_another)
    for key, slot in slots.items():
        view = rogue.arena.slot_view(slot)
        assert bytes(view[: len(key)]) == key
        view.release()
    rogue.cache.poll()
    had = len(stores_of(rogue.cache).free)
    rogue.store([b"rogue %d" % number for number in range(had)])
    for _ in range(20):
        store_another()
        rogue.cache.poll()
    assert engine.granted == 0, "it has used all, and gets none"
    for prompt in prompts:
        reader.release([slots[key] for key in prompt])
    until(lambda: engine.granted, lambda: (store_another(), rogue.cache.poll()))
    assert len(warned()) == 1
    until(service.accounted, rogue.cache.poll)


def _held(one: Scheduler, keys: list[bytes]) -> list[tuple[bytes, int]]:
    slots = reader_of(one.cache).lease(keys)
    assert slots is not None
    return list(zip(keys, slots, strict=True))


@pytest.mark.usefixtures("look_often")
def test_loads_that_do_not_end_are_stalled(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "STALLED_SECONDS", 0.05)
    one, other = attach(service, step_blocks=4), attach(service, step_blocks=4)
    (prompt,) = stored(one, "a")
    transfer = begun(one, prompt)
    until(lambda: engine_of(service, one).state.stalled_blocks == 4)
    assert engine_of(service, other).state.stalled_blocks == 0
    one.copy(transfer)
    one.settle()
    assert engine_of(service, one).state.stalled_blocks == 0


@pytest.mark.usefixtures("look_often")
def test_fetches_of_an_engine_that_hangs_end(
    with_disk: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = attach(with_disk, step_blocks=4), attach(with_disk, step_blocks=4)
    (prompt,) = stored(one, "a")
    until(lambda: all(with_disk.pool.cache.where(prompt)[Medium.DISK]))
    numbers = count()

    def store_another() -> None:
        other.store([b"%d" % next(numbers)])
        other.settle()

    until(lambda: one.cache.presence(prompt) == [Presence.BELOW] * 4, store_another)
    fetch = one.cache.fetch(prompt)
    assert fetch is not None
    one.cache.poll()
    until(lambda: other.cache.lookup(prompt) == 4)
    for _ in range(20):
        store_another()
    assert other.cache.lookup(prompt) == 4, "it may load them yet"
    monkeypatch.setattr(engine_requests, "_UNREAD_SECONDS", 0.05)
    until(lambda: not open_fetches(with_disk.pool.cache))
    until(lambda: other.cache.lookup(prompt) == 0, store_another)
    until(lambda: one.cache.fetch_state(fetch).done, one.cache.poll)
    one.cache.end_fetch(fetch)
    one.settle()
    until(with_disk.accounted)


def test_an_engine_among_others_fetches_its_share(with_disk: Service, attach: Attach) -> None:
    one, other = attach(with_disk, step_blocks=4), attach(with_disk, step_blocks=4)
    prompts = stored(one, "abc")
    for prompt in prompts:
        until(lambda prompt=prompt: all(with_disk.pool.cache.where(prompt)[Medium.DISK]))
    numbers = count()

    def store_another() -> None:
        other.store([b"%d" % next(numbers)])
        other.settle()

    until(
        lambda: (
            [each for prompt in prompts for each in one.cache.presence(prompt)]
            == [Presence.BELOW] * 12
        ),
        store_another,
    )
    fetches = [one.cache.fetch(prompt) for prompt in prompts]
    states = []
    for fetch in fetches:
        assert fetch is not None
        until(lambda fetch=fetch: one.cache.fetch_state(fetch).done, one.cache.poll)
        states.append(one.cache.fetch_state(fetch).arrived)
    assert states == [4, 0, 0]


def test_a_request_gets_at_its_turn_what_its_share_lacked_while_it_was_queued(
    with_disk: Service, attach: Attach
) -> None:
    one, other = attach(with_disk, step_blocks=4), attach(with_disk, step_blocks=4)
    before, prompt = stored(one, "ab")
    numbers = count()

    def store_another() -> None:
        other.store([b"%d" % next(numbers)])
        other.settle()

    until(lambda: one.cache.presence([*before, *prompt]) == [Presence.BELOW] * 8, store_another)
    first = one.cache.fetch(before[:3], queued=True)
    assert first is not None
    request: Any = SimpleNamespace(request_id="r")
    tracked = TrackedRequest(request, RequestOptions())
    fetches = Fetches(one.cache, False, lambda *_: None)
    second = fetches.begin(tracked, prompt, 0, queued=True)
    assert second is not None
    until(lambda: one.cache.fetch_state(second.id).done, one.cache.poll)
    assert one.cache.fetch_state(second.id).arrived == 1
    one.cache.end_fetch(first)
    offered: list[int | None] = []

    def offer() -> None:
        one.cache.poll()
        offered.append(fetches.offer(tracked, prompt, 0, lambda *_: True))

    until(lambda: offered and offered[-1] is not None, offer)
    assert offered[-1] == 4
    fetches.end(tracked)
    one.settle()
    until(lambda: not open_fetches(with_disk.pool.cache))


@pytest.mark.usefixtures("look_often")
def test_an_error_of_one_engine_costs_the_others_nothing(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attach(service, step_blocks=4)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine_of(service, one), "look", fail)
    other = attach(service, step_blocks=4)
    (prompt,) = stored(other, "a")
    assert other.load(prompt)
    assert one.load(prompt)
