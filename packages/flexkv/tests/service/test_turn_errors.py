# SPDX-License-Identifier: Apache-2.0
"""What an error in a turn of the service costs: at most the engine that it concerns."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn

import pytest

from flexkv.service.attached import AttachedEngine
from flexkv.service.server import NodeServer
from flexkv.service.state import state_of
from flexkv.types.changes import Medium
from packages.flexkv.tests.service.served import (
    ENGINE,
    Scheduler,
    Service,
    attached_again,
    keys_of,
    raising,
    until,
)
from packages.inside import below_of, end_of_server, index_of

Attach = Callable[..., Scheduler]


def test_an_error_of_the_policy_costs_one_engine(
    make_service: Callable[..., Service], attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots of a store whose publication fails come back with the end of its engine."""
    service = make_service(64)
    one, other = attach(service), attach(service)
    keys = keys_of("a", 3)
    other.store(keys)
    cache = service.pool.cache

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr("flexkv.service.pool.publish", fail)
        transfer = one.cache.store(keys_of("b", 3), range(3))
        assert transfer is not None
        one.copy(transfer)
        one.cache.poll()
        until(lambda: service.server.engines[0].has_ended)
    until(lambda: not cache.busy)
    assert other.load(keys)
    assert other.store(keys_of("c", 3)) == keys_of("c", 3)
    assert other.cache.lookup(keys_of("b", 1)) == 0
    until(service.accounted)
    service.stop()
    gone, _ = service.server.engines
    gone.free()
    gone.free()
    assert service.accounted()


def test_a_pool_that_cannot_be_polled_stops_nothing(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attach(service)
    keys = keys_of("a", 3)
    one.store(keys)
    failures = []

    def fail() -> None:
        failures.append(1)
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(service.pool.cache, "drain_changes", fail)
        until(lambda: len(failures) > 3)
        assert one.load(keys)
    assert one.store(keys_of("b", 3)) == keys_of("b", 3)


@pytest.mark.parametrize(
    "part",
    [
        "lobby.Lobby.serve",
        "endpoints.Operators.serve",
        "pool.SharedPool.poll",
        "pool.SharedPool.busy",
        "attached.AttachedEngine.is_gone",
    ],
)
def test_an_error_in_a_part_of_a_turn_costs_no_engine_anything(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    one, other = attach(service), attach(service)
    failures: list[int] = []

    def fail(*_: object) -> NoReturn:
        failures.append(1)
        raising()

    with monkeypatch.context() as patch:
        is_property = part.endswith("busy")
        patch.setattr(f"flexkv.service.{part}", property(fail) if is_property else fail)
        until(lambda: len(failures) > 2)
        keys = keys_of("a", 3)
        assert one.store(keys) == keys
        assert other.load(keys)
        assert other.store(keys_of("b", 3)) == keys_of("b", 3)
    another = attach(service)
    assert another.load(keys)
    assert state_of(service.root).pools
    assert not any(engine.has_ended for engine in service.server.engines)


@pytest.mark.parametrize("part", ["serve", "send", "look", "busy", "tell"])
def test_an_error_of_one_engine_ends_the_attachment_of_that_one(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    bad, good = attach(service), attach(service)
    for each in bad, good:
        each.cache.watch()
        each.settle()
    engine, of_the_good = service.server.engines
    whole = vars(AttachedEngine)[part]

    def fail(self: AttachedEngine, *arguments: Any) -> Any:
        if self is engine:
            raising()
        return whole.fget(self) if part == "busy" else whole(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(AttachedEngine, part, property(fail) if part == "busy" else fail)
        keys = keys_of("a", 3)
        assert good.store(keys) == keys, "engines that watch are told of it"
        until(lambda: engine.has_ended)
        assert good.load(keys)
        assert good.store(keys_of("b", 3)) == keys_of("b", 3)
        told: list[bytes] = []

        def read() -> None:
            good.cache.poll()
            for change in good.cache.drain_changes():
                told.extend(change.added)

        until(lambda: {*told} >= {*keys, *keys_of("b", 3)}, read)
    assert not of_the_good.has_ended
    assert bad.cache.lookup(keys) == 3
    assert bad.load(keys)
    until(lambda: attached_again(service, bad))


def test_a_process_whose_end_cannot_be_handled_is_tried_again_and_keeps_no_loop_busy(
    service: Service,
    attach: Attach,
    other_process: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures, shown, ended = list[int](), list[int](), end_of_server()

    def fail(*_: object) -> NoReturn:
        failures.append(1)
        raising()

    def show(*arguments: Any) -> None:
        shown.append(1)
        ended(*arguments)

    monkeypatch.setattr("flexkv.service.server._GONE_SECONDS", 0.01)
    monkeypatch.setattr(NodeServer, "_ended", show)
    good = attach(service)
    engine = other_process(ENGINE, service.root)
    assert engine.stdout is not None
    engine.stdout.readline()
    processes = len(service.server.engines[1].processes)
    with monkeypatch.context() as patch:
        patch.setattr(AttachedEngine, "ended", fail)
        engine.kill()
        engine.wait()
        until(lambda: len(failures) > 3 * processes)
        assert good.load(keys_of("a", 3))
        assert len(service.server.engines) == 2
    assert len(shown) <= processes, "its descriptor wakes the loop no more"
    until(lambda: len(service.server.engines) == 1)
    until(service.accounted)


def test_an_error_of_one_part_hides_none_of_another(
    service: Service,
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    attach(service)
    with monkeypatch.context() as patch:
        patch.setattr("flexkv.service.lobby.Lobby.serve", raising)
        until(lambda: "processes wait longer" in caplog.text)
        patch.setattr("flexkv.service.pool.SharedPool.poll", raising)
        until(lambda: "a pool could not be polled" in caplog.text)
    assert caplog.text.count("processes wait longer") == 1


def test_changes_that_an_error_kept_from_engines_are_told(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = attach(service), attach(service)
    other.cache.watch()
    other.settle()
    failures: list[int] = []
    with monkeypatch.context() as patch:
        note = service.pool.below.note

        def fail(changes: Sequence[object], **_: bool) -> None:
            if changes:
                failures.append(1)
                raising()

        patch.setattr(service.pool.below, "note", fail)
        keys = keys_of("a", 3)
        one.store(keys)
        until(lambda: len(failures) > 2)
        patch.setattr(service.pool.below, "note", note)
        told: list[bytes] = []

        def read() -> None:
            other.cache.poll()
            for change in other.cache.drain_changes():
                told.extend(change.added)

        until(lambda: told == keys, read)


def test_changes_whose_descriptions_cannot_be_read_are_told_later(
    with_disk: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = attach(with_disk), attach(with_disk)
    other.cache.watch()
    other.settle()
    (tier,) = below_of(with_disk.pool.cache).indexed
    failures: list[int] = []
    told: dict[Medium, set[bytes]] = {Medium.HOST: set(), Medium.DISK: set()}
    numbers = count()

    def fail(keys: Sequence[bytes]) -> dict[bytes, bytes]:
        if keys:
            failures.append(1)
            raising()
        return {}

    def store_another() -> None:
        one.store(keys_of("b", 1, next(numbers)))

    def read() -> None:
        other.cache.poll()
        for change in other.cache.drain_changes():
            told[change.medium].difference_update(change.removed)
            told[change.medium].update(change.added)

    keys = keys_of("a", 3)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "take_descriptions", fail)
        assert one.store(keys) == keys
        until(lambda: len(failures) > 2, store_another)
    until(lambda: told[Medium.DISK] >= {*keys}, lambda: (store_another(), read()))
    one.settle()
    until(lambda: not with_disk.pool.busy, read)
    until(lambda: told[Medium.HOST] == {*index_of(with_disk.pool.cache).blocks.keys}, read)
