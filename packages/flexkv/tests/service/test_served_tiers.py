# SPDX-License-Identifier: Apache-2.0
"""What schedulers see of the tiers below the memory that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from ages_clock import AgesClock

from flexkv.cache import KVCache
from flexkv.cli.stat import print_service
from flexkv.client import FetchId, FetchState, Reset
from flexkv.eviction import RequestContext
from flexkv.figures.definitions import sample
from flexkv.service import engine_requests, served_tiers
from flexkv.service import messages as wire
from flexkv.service import pool as pool_module
from flexkv.service.line import MOST_WAITING
from flexkv.service.page import READ
from flexkv.service.pool_keys import TierKeys
from flexkv.service.state import state_of
from flexkv.transfer import fetcher
from flexkv.types.changes import Changes, Medium
from flexkv.types.mover import Status
from flexkv.types.presence import Presence
from packages.flexkv.tests.service.served import Scheduler, Service, attached_again, keys_of, until
from packages.inside import (
    bell_of,
    below_of,
    line_of,
    open_fetches,
    stores_of,
    urgencies_of,
    waiting_messages,
)

Attach = Callable[..., Scheduler]

HOST, BELOW, ABSENT = Presence.HOST, Presence.BELOW, Presence.ABSENT


def leave_memory(service: Service, one: Scheduler, keys: list[bytes]) -> None:
    """Store blocks, and others until they are on the disk alone."""
    assert one.store(keys) == keys
    until(lambda: not service.pool.busy)
    numbers = count()

    def store_another() -> None:
        one.store([b"%b and %d" % (keys[0], next(numbers))])
        one.settle()
        until(lambda: not service.pool.busy)

    until(lambda: one.cache.presence(keys) == [BELOW] * len(keys), store_another)


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    """The URL of a shared store."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")
    (tmp_path / "bucket").mkdir(mode=0o700)
    return f"file://{tmp_path / 'bucket'}"


def test_old_blocks_leave_the_memory_and_disks_of_all_engines(
    make_service: Callable[..., Service],
    attach: Attach,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = AgesClock(monkeypatch)
    service = make_service(
        16,
        max_age_seconds=600,
        ssd_cache_gb=0.01,
        ssd_cache_dir=(str(tmp_path / "disk"),),
        ssd_timeout_seconds=60.0,
    )
    one, other = attach(service, step_blocks=4), attach(service, step_blocks=4)
    keys, late = keys_of("a", 4), keys_of("b", 2)
    assert one.store(keys) == keys
    clock.pass_by(400)
    until(lambda: len(stores_of(one.cache).free) >= 2, one.cache.poll)  # granted by and by
    assert one.store(late) == late
    until(lambda: not service.pool.busy)
    assert other.cache.presence(keys) == [HOST] * 4
    clock.pass_by(200)
    until(lambda: other.cache.presence(keys) == [ABSENT] * 4)
    assert other.cache.presence(late) == [HOST] * 2
    figures = service.pool.cache.figures
    until(lambda: figures().shared["blocks:disk"] == 2)
    for tier in ("host", "disk"):
        assert figures().shared[sample("expired_blocks", tier)] == 4
    print_service(service.root, state_of(service.root))
    assert capsys.readouterr().out.count("blocks, 4 expired\n") == 2


def messages_of(one: Scheduler) -> list[wire.ToService]:
    return list(waiting_messages(line_of(one.cache)))


def test_what_disks_have_is_known_without_a_question(with_disk: Service, attach: Attach) -> None:
    one, other = attach(with_disk, step_blocks=4), attach(with_disk, step_blocks=4)
    keys = keys_of("a", 4)
    leave_memory(with_disk, one, keys)
    other.store(keys_of("b", 1))
    mixed = [keys_of("b", 1)[0], keys[2], b"x"]
    assert other.cache.presence(mixed) == [HOST, BELOW, ABSENT]
    assert messages_of(other) == []
    with_disk.pool.cache.reset(Reset.EMPTY)
    until(lambda: other.cache.presence(mixed) == [ABSENT] * 3)


def test_blocks_of_a_disk_are_fetched(with_disk: Service, attach: Attach) -> None:
    one, other = attach(with_disk, step_blocks=4), attach(with_disk, step_blocks=4)
    keys = keys_of("a", 4)
    leave_memory(with_disk, one, keys)
    fetch = other.cache.fetch(keys)
    assert fetch is not None
    until(lambda: other.cache.fetch_state(fetch).arrived == 4, other.cache.poll)
    assert other.load(keys), "what was fetched stays until the fetch ends"
    assert other.cache.end_fetch(fetch).gave[Medium.DISK][0] == 4
    other.settle()
    until(lambda: not open_fetches(with_disk.pool.cache))


def test_demoted_blocks_leave_the_memory_of_all_engines(with_disk: Service, attach: Attach) -> None:
    one, other = attach(with_disk, step_blocks=4), attach(with_disk, step_blocks=4)
    keys, kept = keys_of("a", 4), keys_of("b", 2)
    assert one.store(keys) == keys
    assert other.store(kept) == kept
    other.settle()
    one.cache.touch(keys)
    one.cache.demote(keys)
    one.settle()
    until(lambda: one.cache.presence(keys) == [BELOW] * 4, one.cache.poll)
    assert other.cache.presence(keys + kept) == [BELOW] * 4 + [HOST] * 2


def test_a_demotion_of_a_long_prefix_takes_several_messages(
    with_disk: Service, attach: Attach
) -> None:
    one = attach(with_disk)
    one.settle()
    keys = keys_of("long", 2 * wire.MOST_KEYS + 1)
    one.cache.demote(keys)
    sent = [message for message in messages_of(one) if isinstance(message, wire.Demote)]
    assert [len(message.keys) for message in sent] == [1, wire.MOST_KEYS, wire.MOST_KEYS]
    assert [key for message in reversed(sent) for key in message.keys] == keys


def test_a_fetch_has_the_priority_of_its_request(with_disk: Service, attach: Attach) -> None:
    one, other = attach(with_disk, step_blocks=4), attach(with_disk, step_blocks=4)
    keys = keys_of("a", 4)
    leave_memory(with_disk, one, keys)
    fetch = other.cache.fetch(keys, queued=True, priority=-100)
    assert fetch is not None
    until(lambda: bool(open_fetches(with_disk.pool.cache)), other.cache.poll)
    urgencies = urgencies_of(with_disk.pool.cache)
    assert [urgency.turn for urgency in urgencies] == [100]
    other.cache.end_fetch(fetch)
    other.settle()


@pytest.mark.parametrize("status", [Status.DONE, Status.FAILED])
def test_blocks_are_demoted_after_the_stores_before(
    with_disk: Service, attach: Attach, status: Status
) -> None:
    one = attach(with_disk, step_blocks=4)
    keys = keys_of("a", 4)
    assert one.store(keys[:2]) == keys[:2]
    transfer = one.cache.store(keys, (2, 3))
    assert transfer is not None
    one.settle_line()
    one.cache.demote(keys)
    for _ in range(20):
        one.cache.poll()
    one.settle_line()
    assert one.cache.presence(keys[:2]) == [HOST] * 2, "the service does not know of it"
    one.copy(transfer, status)
    left = 4 if status is Status.DONE else 2
    until(lambda: one.cache.presence(keys[:left]) == [BELOW] * left, one.cache.poll)
    assert with_disk.pool.cache.ready_blocks == 0


def test_what_no_disk_has_costs_no_message(with_disk: Service, attach: Attach) -> None:
    """A new prompt does not wait for the service."""
    one = attach(with_disk)
    one.settle()
    assert one.cache.fetch(keys_of("nowhere", 3)) is None
    assert messages_of(one) == []


def test_an_engine_that_fetches_much_stays_attached(
    with_disk: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of its fetches may be for queued requests; the others are for those whose turn it is."""
    monkeypatch.setattr(served_tiers, "FETCH_ROWS", 4)
    one = attach(with_disk, step_blocks=4)
    keys = keys_of("a", 4)
    leave_memory(with_disk, one, keys)
    queued = [one.cache.fetch(keys, queued=True) for _ in range(3)]
    turns = [one.cache.fetch(keys) for _ in range(3)]
    begun = [fetch for fetch in (*queued, *turns) if fetch is not None]
    assert [fetch is None for fetch in (*queued, *turns)] == [False, False, True] * 2
    one.settle_line()
    for fetch in begun:
        one.cache.end_fetch(fetch)
    again = one.cache.fetch(keys, queued=True)
    assert again is not None
    one.settle_line()
    one.cache.end_fetch(again)
    one.settle()
    assert not line_of(one.cache).is_cut


def test_a_fetch_ends_before_the_first_block_that_is_nowhere(
    with_disk: Service, attach: Attach
) -> None:
    one, other = attach(with_disk, step_blocks=4), attach(with_disk, step_blocks=4)
    keys = keys_of("a", 4)
    leave_memory(with_disk, one, keys)
    fetch = other.cache.fetch([*keys[:2], b"x", *keys[2:]])
    assert fetch is not None
    assert other.cache.fetch_state(fetch).stop == 2
    assert not other.cache.extend_fetch(fetch, keys[3:])
    until(lambda: other.cache.fetch_state(fetch).done, other.cache.poll)
    assert other.cache.fetch_state(fetch).arrived == 2
    other.cache.end_fetch(fetch)
    whole = other.cache.fetch(keys[:3])
    assert whole is not None
    assert other.cache.extend_fetch(whole, keys[3:])
    until(lambda: other.cache.fetch_state(whole).arrived == 4, other.cache.poll)
    other.cache.end_fetch(whole)


def test_a_fetch_does_not_wait_for_room_that_nobody_looks_for(
    with_disk: Service, attach: Attach
) -> None:
    """More messages wait than are kept."""
    one = attach(with_disk, step_blocks=4)
    begun: list[FetchId | None] = []
    for name in "abc":
        leave_memory(with_disk, one, keys_of(name, 3))
    for name in "abc":  # half of the memory
        begun.append(one.cache.fetch(keys_of(name, 3), queued=True))
        one.settle_line()
    fetch = begun[-1]
    assert fetch is not None
    until(lambda: one.cache.fetch_state(fetch).done, one.cache.poll)
    assert one.cache.fetch_state(fetch).is_short
    for _ in range(MOST_WAITING):
        line_of(one.cache).put(wire.Touch([]))
    assert not one.cache.extend_fetch(fetch)
    assert one.cache.fetch_state(fetch).done
    for each in begun:
        assert each is not None
        one.cache.end_fetch(each)
    one.settle()


def test_the_next_service_tells_what_the_disk_has(with_disk: Service, attach: Attach) -> None:
    one, other = attach(with_disk, step_blocks=4), attach(with_disk, step_blocks=4)
    keys = keys_of("a", 4)
    leave_memory(with_disk, one, keys)
    with_disk.close()
    lost = one.cache.fetch(keys)
    assert lost is not None
    until(lambda: one.cache.fetch_state(lost).done, one.cache.poll)
    assert one.cache.presence(keys) == [ABSENT] * 4
    assert one.cache.fetch(keys) is None, "nobody would bring them"
    with_disk.start()
    until(lambda: attached_again(with_disk, one, other))
    until(lambda: not with_disk.pool.busy)
    for each in (one, other):
        assert each.cache.presence(keys) == [BELOW] * 4
    fetch = other.cache.fetch(keys)
    assert fetch is not None
    until(lambda: other.cache.fetch_state(fetch).arrived == 4, other.cache.poll)
    other.cache.end_fetch(fetch)
    other.settle()
    leave_memory(with_disk, one, keys_of("later", 1))


def test_what_engines_cannot_know_is_asked(
    make_service: Callable[..., Service],
    attach: Attach,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A disk has more blocks than there is room for."""
    monkeypatch.setattr(pool_module, "TierKeys", lambda _: TierKeys(0))
    service = make_service(16, ssd_cache_gb=0.01, ssd_cache_dir=(str(tmp_path / "disk"),))
    one = attach(service, step_blocks=4)
    keys = keys_of("a", 4)
    one.store(keys)
    numbers = count()
    until(
        lambda: not one.cache.lookup(keys),
        lambda: (one.store([b"%d" % next(numbers)]), one.settle()),
    )
    until(lambda: not service.pool.busy)
    assert one.cache.presence([keys[0], b"x"]) == [Presence.UNKNOWN] * 2
    fetch = one.cache.fetch(keys)
    assert fetch is not None
    until(lambda: one.cache.fetch_state(fetch).done, one.cache.poll)
    assert one.cache.fetch_state(fetch).arrived == 4
    one.cache.end_fetch(fetch)
    lines = [each for each in caplog.records if "more blocks than" in each.getMessage()]
    assert len(lines) == 1


def test_blocks_of_a_shared_store_are_asked_for(
    make_service: Callable[..., Service], attach: Attach, bucket: str
) -> None:
    service = make_service(16, objects_url=bucket, objects_question_seconds=60.0)
    one = attach(service, step_blocks=4)
    keys = keys_of("a", 4)
    one.store(keys)
    until(lambda: not service.pool.busy)
    numbers = count()

    def store_another() -> None:
        one.store([b"%d" % next(numbers)])
        one.settle()
        until(lambda: not service.pool.busy)

    until(lambda: not one.cache.lookup(keys), store_another)
    assert one.cache.presence(keys) == [Presence.UNKNOWN] * 4
    state = FetchState(0.0)
    while state.arrived < 4:  # a try waits for a bounded time
        fetch = one.cache.fetch(keys)
        assert fetch is not None
        until(lambda fetch=fetch: one.cache.fetch_state(fetch).done, one.cache.poll)
        state = one.cache.end_fetch(fetch)
    assert state.gave[Medium.OBJECTS][0] == 4


def test_what_a_shared_store_has_is_known_after_a_query(
    make_service: Callable[..., Service],
    attach: Attach,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_tiers, "ANSWER_SECONDS", 60.0)
    here, there = (
        make_service(16, objects_url=bucket, objects_question_seconds=60.0) for _ in "ab"
    )
    one, other = attach(here, step_blocks=8), attach(there)
    keys = keys_of("a", 4)
    one.store(keys)
    until(lambda: not here.pool.busy)
    wanted = [*keys[:2], *keys_of("b", 2)]
    assert other.cache.query(wanted, keys[3:])
    until(lambda: not other.cache.query(wanted, keys[3:]), other.cache.poll)
    below, absent = Presence.BELOW, Presence.ABSENT
    assert other.cache.presence([*wanted, keys[3]]) == [below, below, absent, absent, below]
    assert other.cache.presence(keys[2:3]) == [Presence.UNKNOWN], "nobody has asked"


def test_a_look_for_answers_is_about_a_part_of_what_an_engine_asks(
    make_service: Callable[..., Service],
    attach: Attach,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that asks much costs the others nothing; the answers to all come nevertheless."""
    monkeypatch.setattr(served_tiers, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(wire, "MOST_KEYS", 4)
    looks: list[int] = []
    presence = KVCache.presence

    def look(cache: KVCache, keys: Sequence[bytes]) -> list[Presence]:
        looks.append(len(keys))
        return presence(cache, keys)

    monkeypatch.setattr(KVCache, "presence", look)
    one = attach(make_service(16, objects_url=bucket, objects_question_seconds=60.0))
    keys = keys_of("a", 30)
    assert one.cache.query(keys)
    until(lambda: not one.cache.query(keys), one.cache.poll)
    assert one.cache.presence(keys) == [Presence.ABSENT] * 30
    assert 0 < max(looks) <= 4


def test_a_question_whose_answer_is_forgotten_ends(
    make_service: Callable[..., Service],
    attach: Attach,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a pool that is cleared meanwhile: the service comes to rest."""
    monkeypatch.setattr(engine_requests, "LACKS_SECONDS", 0.2)
    service = make_service(16, objects_url=bucket)
    one = attach(service)
    monkeypatch.setattr(KVCache, "presence", lambda _, keys: [Presence.UNKNOWN] * len(keys))
    assert one.cache.query(keys_of("a", 4))
    one.settle_line()
    until(lambda: not service.engine.busy)


def test_a_question_without_an_answer_ends(
    make_service: Callable[..., Service],
    attach: Attach,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a service that lives: of another, no tier is asked."""
    monkeypatch.setattr(served_tiers, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(engine_requests.EngineQueries, "answers", lambda *_: iter(()))
    one = attach(make_service(16, objects_url=bucket))
    keys = keys_of("a", 4)
    assert one.cache.query(keys)
    until(lambda: not one.cache.query(keys), one.cache.poll)
    assert one.cache.presence(keys) == [Presence.ABSENT] * 4


def test_blocks_on_their_way_to_a_shared_store_are_awaited(
    make_service: Callable[..., Service],
    attach: Attach,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The services of two nodes share a store."""
    monkeypatch.setattr(fetcher, "_ANNOUNCED_SECONDS", 60.0)
    monkeypatch.setattr(served_tiers, "ANSWER_SECONDS", 60.0)
    here, there = (
        make_service(16, objects_url=bucket, objects_question_seconds=60.0) for _ in "ab"
    )
    one, other = attach(here, step_blocks=4), attach(there, step_blocks=4)
    keys = keys_of("a", 4)
    fetch = one.cache.fetch(keys, announced=3)
    assert fetch is not None
    # The service has heard of what is announced, and that the store lacks it.
    until(lambda: one.cache.fetch_state(fetch).stop == 3, one.cache.poll)
    assert not one.cache.fetch_state(fetch).done
    assert other.store(keys) == keys
    until(lambda: one.cache.fetch_state(fetch).done, one.cache.poll)
    assert one.cache.end_fetch(fetch).gave[Medium.OBJECTS][0] >= 3
    assert one.load(keys[:3])


def fetch_slowly(
    service: Service, one: Scheduler, monkeypatch: pytest.MonkeyPatch, states: list[FetchState]
) -> FetchId:
    """Begin a fetch that has the last of these states."""
    service.pool.below.note([Changes(Medium.DISK, [], keys_of("a", 4))], are_all=True)
    monkeypatch.setattr(service.pool.cache, "fetch", lambda *_, **__: 1)
    monkeypatch.setattr(service.pool.cache, "fetch_state", lambda _: states[-1])
    monkeypatch.setattr(service.pool.cache, "end_fetch", lambda _: states[-1])
    fetch = one.cache.fetch(keys_of("a", 4))
    assert fetch is not None
    until(lambda: one.cache.fetch_state(fetch) == states[-1], one.cache.poll)
    return fetch


def read_figures(one: Scheduler) -> None:
    """Until the service has sent some, and the engine has read them."""
    bell = bell_of(line_of(one.cache))
    before = bell[READ]
    until(lambda: bell[READ] != before, one.cache.poll)


def test_a_fetch_ends_when_the_service_hangs_in_the_middle(
    make_service: Callable[..., Service],
    attach: Attach,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not before, however long a tier reads: the service is heard of meanwhile."""
    service = make_service(64, ssd_cache_gb=0.001, ssd_cache_dir=(str(tmp_path / "disk"),))
    one = attach(service)
    begun = FetchState(time.monotonic(), 4, 0, 1, 4, missing={Medium.DISK: 3}, awaited=[])
    fetch = fetch_slowly(service, one, monkeypatch, [begun])
    for _ in range(6):  # figures come four times a second, and the limit is a second
        read_figures(one)
        assert not one.cache.fetch_state(fetch).done
    service.stop()
    until(lambda: one.cache.fetch_state(fetch).done, one.cache.poll)
    assert not one.cache.busy


def test_a_service_that_hangs_after_a_block_has_come_is_noticed(
    make_service: Callable[..., Service],
    attach: Attach,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The block is the last that the engine hears of the service."""
    service = make_service(64, ssd_cache_gb=0.001, ssd_cache_dir=(str(tmp_path / "disk"),))
    one = attach(service)
    states = [FetchState(time.monotonic(), 4, 0, 1, 4, missing={Medium.DISK: 3}, awaited=[])]
    fetch = fetch_slowly(service, one, monkeypatch, states)
    read_figures(one)
    states.append(replace(states[-1], arrived=2))
    until(lambda: one.cache.fetch_state(fetch).arrived == 2)
    service.stop()
    until(lambda: one.cache.fetch_state(fetch).done, one.cache.poll)
    assert not one.cache.busy


def test_a_conversation_that_ends_on_another_engine_leaves_first(
    make_service: Callable[..., Service], attach: Attach, tmp_path: Path
) -> None:
    """From memory and from the disk, though it was used last."""
    service = make_service(
        24,
        ssd_cache_gb=48 * 4096 / (1 << 30),
        ssd_cache_dir=(str(tmp_path / "disk"),),
        ssd_timeout_seconds=60.0,
    )
    one, other = attach(service, step_blocks=4), attach(service, step_blocks=4)

    def turn(engine: Scheduler, name: str, returns: bool | None = None) -> list[bytes]:
        keys = keys_of(name, 4)
        context = RequestContext(0, 0, name, f"session {name}", returns)
        engine.cache.record(keys[: engine.cache.lookup(keys)], context, keys)
        engine.store(keys)
        engine.cache.ended(name, 10)
        engine.settle()
        until(lambda: not service.pool.busy)
        return keys

    stays, ends = turn(one, "stays"), turn(one, "ends")
    turn(other, "ends", returns=False)
    (disk,) = below_of(service.pool.cache).tiers
    numbers = count()

    def send_another() -> None:
        turn(one, f"new {next(numbers)}")
        here = one.cache.presence(stays), one.cache.presence(ends)
        assert here[0] == [HOST] * 4 or HOST not in here[1]
        assert disk.contains(stays) == [True] * 4 or True not in disk.contains(ends)

    until(lambda: one.cache.presence(ends) == [ABSENT] * 4, send_another)
    assert True in disk.contains(stays)
