# SPDX-License-Identifier: Apache-2.0
"""Engines that live while their service ends, and what the next one knows of them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from flexkv.service import attach as attaching
from flexkv.service import attached, pool_changes, server
from flexkv.service import messages as wire
from flexkv.service.attach import Attached
from flexkv.service.attached import AttachedEngine
from flexkv.service.lobby import RefusalError
from flexkv.service.state import clear_pools
from flexkv.types.changes import Medium
from packages.flexkv.tests.service.served import (
    ENGINE,
    OTHER,
    WORKER,
    Scheduler,
    Service,
    attached_again,
    keys_of,
    until,
)
from packages.inside import (
    index_of,
    line_of,
    new_connection,
    reader_of,
    stores_of,
    waiting_newcomers,
)

Attach = Callable[..., Scheduler]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long before another try."""
    monkeypatch.setattr(attaching, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(attached, "_LAST_WRITES_SECONDS", 0.01)


def restart(service: Service) -> None:
    service.close()
    service.start()


def test_blocks_in_memory_outlive_the_service(service: Service, attach: Attach) -> None:
    one, other = attach(service), attach(service)
    keys = keys_of("a", 6)
    one.store(keys)
    slots = {block.key: block.slot for block in index_of(service.pool.cache).blocks}
    held = other.cache.load(keys[:2])
    assert held is not None
    service.close()
    assert one.load(keys), "the service has ended"
    service.start()
    until(lambda: attached_again(service, one, other))
    assert {block.key: block.slot for block in index_of(service.pool.cache).blocks} == slots
    assert one.load(keys)
    until(lambda: len(stores_of(one.cache).free) >= 3, one.cache.poll)
    assert one.store(keys_of("b", 3)) == keys_of("b", 3)
    assert other.cache.lookup(keys_of("b", 3)) == 3
    late = attach(service)
    assert late.load(keys)
    late.fill("filler", 40)
    assert late.cache.lookup(keys) == 2, "what an engine held is there, and nothing else"
    other.copy(held)
    other.settle()
    until(service.accounted)


@pytest.mark.parametrize("clears", [1, 8])
def test_a_store_that_began_before_a_clear_is_not_published_by_the_next_service(
    service: Service, attach: Attach, clears: int
) -> None:
    """Nor is one to a slot that was granted before. After eight resets, their numbers repeat."""
    one = attach(service)
    keys, later = keys_of("a", 3), keys_of("b", 3)
    under_way = one.cache.store(keys, range(3))
    assert under_way is not None
    for _ in range(clears):
        clear_pools(service.root, None)
    restart(service)
    until(lambda: attached_again(service, one))
    one.copy(under_way)
    one.settle()
    assert one.cache.lookup(keys) == 0
    until(service.accounted)
    until(lambda: one.store(later) and one.load(later), one.cache.poll)
    assert one.cache.lookup(keys) == 0


def test_stores_under_way_are_published_by_the_next_service(
    service: Service, attach: Attach
) -> None:
    one = attach(service)
    keys = keys_of("a", 3)
    under_way = one.cache.store(keys, range(3))
    assert under_way is not None
    restart(service)
    until(lambda: attached_again(service, one))
    other = attach(service)
    other.store(keys_of("b", 20))
    used = {block.slot for block in index_of(service.pool.cache).blocks}
    assert not used & set(under_way.slots), "a rank may still write to them"
    one.copy(under_way)
    one.settle()
    assert other.load(keys)
    until(service.accounted)


def test_what_the_service_was_told_at_its_end_loses_no_slot(
    service: Service, attach: Attach
) -> None:
    one = attach(service)
    service.stop()
    for name in ("a", "b"):
        transfer = one.cache.store(keys_of(name, 2), range(2))
        assert transfer is not None
        one.copy(transfer)
        one.cache.poll()
    line_of(one.cache).put(wire.Return([stores_of(one.cache).free.pop()]))
    one.cache.poll()
    restart(service)
    until(lambda: attached_again(service, one))
    until(service.accounted)
    index, number = index_of(service.pool.cache), service.engine.number
    until(lambda: stores_of(one.cache).granted == set(index.taken_by(number)), one.cache.poll)
    assert one.store(keys_of("a", 2)) == keys_of("a", 2)
    assert one.load(keys_of("a", 2))


def test_what_was_published_at_the_end_is_not_claimed(service: Service, attach: Attach) -> None:
    """The engine has not read the answer of the service."""
    one = attach(service)
    keys = keys_of("a", 2)
    transfer = one.cache.store(keys, range(2))
    assert transfer is not None
    one.copy(transfer)
    one.cache.poll()
    until(lambda: service.pool.cache.ready_blocks == 2)
    assert stores_of(one.cache).granted >= set(transfer.slots)
    restart(service)
    until(lambda: new_connection(one.cache))
    until(lambda: attached_again(service, one))
    assert not stores_of(one.cache).granted & set(transfer.slots)
    assert one.load(keys)
    until(service.accounted)


def test_an_engine_at_rest_keeps_no_memory_from_others(service: Service, attach: Attach) -> None:
    one, idle = attach(service), attach(service)
    idle.store(keys_of("a", 2))
    held = idle.cache.load(keys_of("a", 1))
    assert held is not None
    restart(service)
    until(lambda: attached_again(service, one))
    index, number = index_of(service.pool.cache), 0
    while service.pool.cache.counters.evicted_blocks < 8:
        number += 1
        one.store(keys_of(f"filler {number}", 1))
    granted = sum(each.granted for each in service.server.engines)
    assert len(index) + index.free_slots + granted == index.num_slots
    assert set(index.taken_by(2)) >= stores_of(idle.cache).granted
    assert one.cache.lookup(keys_of("a", 2)) == 1, "what the engine holds stays"
    idle.copy(held)
    until(lambda: attached_again(service, one, idle))
    until(service.accounted)


def test_an_engine_that_ended_meanwhile_leaves_its_slots(
    service: Service,
    attach: Attach,
    other_process: Callable[..., subprocess.Popen[str]],
) -> None:
    one = attach(service)
    engine = other_process(ENGINE, service.root)
    assert engine.stdout is not None
    engine.stdout.readline()
    service.close()
    engine.kill()
    engine.wait()
    service.start()
    until(lambda: attached_again(service, one))
    until(lambda: len(service.server.engines) == 1)
    until(service.accounted)
    assert one.load(keys_of("a", 3))


def test_slots_wait_for_a_rank_that_hangs(
    service: Service,
    attach: Attach,
    other_process: Callable[..., subprocess.Popen[str]],
) -> None:
    """The scheduler of the rank ends while the service is away. The rank cannot attach again."""
    one = attach(service)
    engine = other_process(ENGINE, service.root)
    assert engine.stdout is not None
    worker = other_process(WORKER, service.root, *engine.stdout.readline().split())
    assert worker.stdout is not None
    assert worker.stdout.readline() == "joined\n"
    worker.send_signal(signal.SIGSTOP)
    service.close()
    engine.kill()
    engine.wait()
    service.start()
    until(lambda: attached_again(service, one))
    (left,) = [each for each in service.server.engines if each.scheduler is None]
    granted = left.granted
    assert granted >= 3
    assert not any(left.is_gone(now) for now in (0.0, 1e9))
    assert left in service.server.engines
    assert left.granted == granted
    worker.kill()
    worker.wait()
    until(lambda: left not in service.server.engines)
    until(service.accounted)


def test_ranks_attach_again(
    service: Service,
    attach: Attach,
    other_process: Callable[..., subprocess.Popen[str]],
) -> None:
    one = attach(service)
    worker = other_process(
        WORKER,
        service.root,
        str(one.ticket.client),
        one.ticket.token,
        f"/proc/self/fd/{one.arena.fd}",
        pass_fds=(one.arena.fd,),
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "joined\n"
    until(lambda: len(service.engine.processes) == 3)
    restart(service)
    until(lambda: attached_again(service, one))
    until(lambda: len(service.engine.processes) == 3)
    one.close()
    worker.kill()
    worker.wait()
    until(lambda: len(service.server.engines[0].processes) == 2)


def test_an_engine_that_was_given_up_attaches_again(service: Service, attach: Attach) -> None:
    one = attach(service)
    keys = keys_of("a", 3)
    one.store(keys)
    held = one.cache.load(keys[:1])
    assert held is not None
    under_way = one.cache.store(keys_of("b", 2), range(2))
    assert under_way is not None
    line_of(one.cache).put(wire.Return([-1]))
    one.cache.poll()
    until(lambda: service.engine.has_ended)
    until(lambda: attached_again(service, one))
    assert reader_of(one.cache).held == 1
    one.copy(held)
    one.copy(under_way)
    one.settle()
    assert one.load(keys_of("b", 2))
    until(service.accounted)
    assert len(service.engine.processes) == 2, "a process is known once for each connection"


def test_an_answer_that_does_not_arrive_is_not_the_last(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attach(service)
    failed: list[str] = []
    send_fds = socket.send_fds

    def fail_once(connection: socket.socket, *arguments: Any) -> int:
        if threading.current_thread().name.endswith("(run)") and not failed:
            failed.append("once")
            connection.shutdown(socket.SHUT_RDWR)
            raise BrokenPipeError
        return send_fds(connection, *arguments)

    monkeypatch.setattr(socket, "send_fds", fail_once)
    restart(service)
    until(lambda: attached_again(service, one))
    assert failed
    assert len([each for each in service.server.engines if each.is_served]) == 1


def test_events_and_fetches_go_on(
    make_service: Callable[..., Service], attach: Attach, tmp_path: Any
) -> None:
    service = make_service(16, ssd_cache_dir=(str(tmp_path / "disk"),), ssd_cache_gb=0.01)
    one, other = attach(service), attach(service)
    other.cache.watch()
    other.settle()
    keys = keys_of("a", 4)
    one.store(keys)
    until(lambda: not service.pool.busy)
    fillers = (keys_of(f"filler {number}", 1) for number in count())
    until(lambda: not one.cache.lookup(keys), lambda: one.store(next(fillers)))
    until(lambda: not service.pool.busy)
    lost = one.cache.fetch(keys)
    assert lost is not None
    restart(service)
    until(lambda: attached_again(service, one, other))
    assert one.cache.fetch_state(lost).done
    assert not one.cache.extend_fetch(lost, keys)
    one.cache.end_fetch(lost)
    other.cache.drain_changes()
    fetch = one.cache.fetch(keys)
    assert fetch is not None
    until(lambda: one.cache.fetch_state(fetch).arrived == 4, one.cache.poll)
    assert one.load(keys)
    one.cache.end_fetch(fetch)
    seen: list[bytes] = []
    until(
        lambda: set(keys) <= set(seen),
        lambda: (
            other.cache.poll(),
            seen.extend(key for each in other.cache.drain_changes() for key in each.added),
        ),
    )


class Follower:
    """Who applies all changes of an engine."""

    def __init__(self, one: Scheduler) -> None:
        self.one = one
        self.known: dict[Medium, set[bytes]] = {Medium.HOST: set(), Medium.DISK: set()}
        one.cache.watch()
        one.settle()

    def follow(self) -> None:
        self.one.cache.poll()
        for each in self.one.cache.drain_changes():
            there = self.known[each.medium]
            assert there.issuperset(each.removed), "a block leaves that was not there"
            assert there.isdisjoint(each.added), "a block comes twice"
            there.difference_update(each.removed)
            there.update(each.added)


@pytest.mark.parametrize("is_the_same", [True, False])
def test_changes_while_an_engine_is_not_attached_are_told(
    with_disk: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch, is_the_same: bool
) -> None:
    """In memory and on the disk, by the same service and by the next one."""
    monkeypatch.setattr(pool_changes, "_AT_ONCE", 2)
    monkeypatch.setattr(attaching, "_MOST_SECONDS", 0.02)
    one, other = attach(with_disk, step_blocks=4), attach(with_disk, step_blocks=4)
    follower = Follower(one)
    for number in range(8):
        one.store(keys_of(f"mine {number}", 2))
    until(lambda: not with_disk.pool.busy and all(follower.known.values()), follower.follow)
    on_disk, in_memory = follower.known[Medium.DISK].copy(), follower.known[Medium.HOST].copy()
    one.settle()
    with monkeypatch.context() as patch:
        patch.setattr(AttachedEngine, "resume", refuse)
        number = one.ticket.client
        engine = next(each for each in with_disk.server.engines if each.number == number)
        assert engine.scheduler is not None
        engine.scheduler.connection.shutdown(socket.SHUT_RDWR)
        until(lambda: engine.scheduler is None)
        clear_pools(with_disk.root, None)
        for number in range(4):
            other.store(keys_of(f"theirs {number}", 2))
        until(lambda: not with_disk.pool.busy)
        if not is_the_same:
            restart(with_disk)
    until(lambda: attached_again(with_disk, one, other))
    until(lambda: not one.cache.busy, follower.follow)
    follower.follow()
    assert not on_disk & follower.known[Medium.DISK]
    assert not in_memory & follower.known[Medium.HOST]


def refuse(*_: object) -> None:
    raise RefusalError("for the test")


@pytest.mark.parametrize("is_the_same", [True, False])
def test_a_store_of_which_the_last_word_was_lost_is_told(
    service: Service, attach: Attach, is_the_same: bool
) -> None:
    """And blocks that stay are not told again."""
    one = attach(service)
    follower = Follower(one)
    known, keys = keys_of("known", 3), keys_of("a", 3)
    one.store(known)
    until(lambda: follower.known[Medium.HOST] == set(known), follower.follow)
    transfer = one.cache.store(keys, range(3))
    assert transfer is not None
    one.copy(transfer)
    one.cache.poll()
    until(lambda: len(index_of(service.pool.cache)) == 6)
    if is_the_same:
        scheduler = service.engine.scheduler
        assert scheduler is not None
        scheduler.connection.shutdown(socket.SHUT_RDWR)
    else:
        restart(service)
    until(lambda: new_connection(one.cache))
    until(lambda: attached_again(service, one))
    until(lambda: follower.known[Medium.HOST] == {*known, *keys}, follower.follow)


def test_an_engine_that_starts_waits_for_those_that_live(service: Service, attach: Attach) -> None:
    """Idle engines attach again, although they call nothing."""
    one, other = attach(service), attach(service)
    keys = keys_of("a", 3)
    one.store(keys)
    restart(service)
    late = attach(service)
    assert late.load(keys)
    assert len(service.server.pools) == 1
    until(lambda: all(each.scheduler is not None for each in service.server.engines))
    until(lambda: attached_again(service, one, other, late))
    until(service.accounted)


def test_an_engine_that_starts_is_not_refused_for_what_another_hands_back(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_AWAITED_SECONDS", 1e9)
    may_attach, resume, make = threading.Event(), Attached.resume, server._resume_pool
    tries = count()

    def attach_late(attached: Attached) -> Any:
        may_attach.wait()
        return resume(attached)

    def fail_once(config: Any, greeting: Any, fds: list[int]) -> Any:
        if next(tries) == 0:
            for fd in fds:
                os.close(fd)
            raise OSError("on purpose")
        return make(config, greeting, fds)

    monkeypatch.setattr(Attached, "resume", attach_late)
    monkeypatch.setattr(server, "_resume_pool", fail_once)
    one = attach(service)
    keys = keys_of("a", 3)
    one.store(keys)
    restart(service)
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(attach, service)
        until(lambda: waiting_newcomers(service.server))
        may_attach.set()
        assert late.result().load(keys)


def test_an_idle_engine_uses_the_last_of_several_services(
    service: Service, attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    one = attach(service)
    keys = keys_of("a", 3)
    one.store(keys)
    for _ in range(3):
        before = {None, new_connection(one.cache)}
        restart(service)
        until(lambda before=before: new_connection(one.cache) not in before)
    until(lambda: attached_again(service, one))
    assert caplog.text.count("the service of FlexKV is gone") == 1, "it has tried an ended one"
    assert one.load(keys)


def test_claims_against_the_rules_end_the_connection(
    service: Service, attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = attach(service), attach(service)
    not_its = stores_of(other.cache).free[0]
    stores_of(one.cache).granted.add(not_its)
    with caplog.at_level(logging.WARNING, "flexkv"):
        line_of(one.cache).put(wire.Claim([], True))
        one.cache.poll()
        until(lambda: "claims slots only when" in caplog.text)
        until(lambda: "a slot was not granted to this engine" in caplog.text, one.cache.poll)
    stores_of(one.cache).granted.discard(not_its)
    until(lambda: attached_again(service, one, other))
    until(service.accounted)


def test_an_engine_waits_for_nobody_where_none_lives(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_AWAITED_SECONDS", 1e9)
    one = attach(service)
    one.close()
    restart(service)
    assert attach(service).store(keys_of("a", 2))


def test_an_engine_waits_no_longer_than_it_must(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that lives has another model."""
    monkeypatch.setattr(server, "_AWAITED_SECONDS", 0.2)
    attach(service, about=OTHER)
    restart(service)
    assert attach(service).store(keys_of("a", 2))


def test_other_memory_than_the_pools_is_refused(
    service: Service,
    attach: Attach,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_attach = threading.Event()
    resume = Attached.resume

    def attach_late(attached: Attached) -> socket.socket:
        may_attach.wait()
        return resume(attached)

    monkeypatch.setattr(Attached, "resume", attach_late)
    monkeypatch.setattr(server, "_AWAITED_SECONDS", 0.0)
    one = attach(service)
    keys = keys_of("a", 3)
    one.store(keys)
    service.close()
    service.start()
    late = attach(service)
    may_attach.set()
    with caplog.at_level(logging.WARNING, "flexkv"):
        until(
            lambda: "have other memory" in caplog.text,
            lambda: (one.cache.touch(keys), one.cache.poll()),
        )
    assert one.load(keys)
    assert one.cache.store(keys_of("b", 1), [0]) is None
    assert late.cache.lookup(keys) == 0
    assert late.store(keys) == keys
