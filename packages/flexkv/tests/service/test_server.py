# SPDX-License-Identifier: Apache-2.0
"""What peers send the service, by fault or by intent: it costs the others nothing."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from flexkv.client import Hold
from flexkv.eviction import RequestContext
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.service import messages as wire
from flexkv.service import pool, server
from flexkv.service.attach import Attached, join_pool, open_pool
from flexkv.service.server import NodeServer
from flexkv.service.state import state_of
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.session.wire import ServiceTicket, SessionInfo
from flexkv.settings import CacheConfig
from flexkv.types.errors import ArenaError
from packages.flexkv.tests.service.served import (
    ABOUT,
    ENGINE,
    FORMAT,
    OTHER,
    WORKER,
    Scheduler,
    Service,
    keys_of,
    raising,
    until,
)
from packages.inside import (
    index_of,
    is_making,
    line_of,
    pools_of,
    waiting_newcomers,
    waiting_packets,
)

Attach = Callable[..., Scheduler]


def connection_to(service: Service) -> socket.socket:
    with RuntimeDirectory(service.root) as directory:
        return directory.connect(wire.SOCKET, 60.0, socket.SOCK_SEQPACKET)


def greet(service: Service, packet: bytes, fds: Sequence[int]) -> wire.ToEngine | None:
    """What the service answers; None if it closes the connection. The descriptors are closed."""
    with connection_to(service) as connection:
        socket.send_fds(connection, [packet], fds)
        for fd in fds:
            os.close(fd)
        answer, came = wire.receive_greeting(connection)
        for fd in came:
            os.close(fd)
        return wire.read_engine(answer)[0] if answer else None


def packet(*messages: wire.ToService) -> bytes:
    (made,) = wire.packets(messages)
    return made


def opening(fingerprint: str, shard_bytes: tuple[int, ...]) -> bytes:
    blocks = wire.PoolBlocks(fingerprint, 1, shard_bytes, 1, ())
    return packet(wire.Open(wire.PROTOCOL, "toy", "toy", blocks))


TICKET = wire.Ticket(1, b"guess")


@pytest.mark.parametrize(
    ("sent", "fds", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 1, "18 bytes are no messages of an engine"),
        (b"\xdd\xff\xff\xff\xff", 1, "no messages of an engine"),
        (packet(wire.Watch(1)), 1, "Watch is no greeting"),
        (packet(wire.Join(wire.PROTOCOL, TICKET)), 0, "one message with one pidfd"),
        (packet(wire.Join(wire.PROTOCOL, TICKET)), 2, "one message with one pidfd"),
        (packet(wire.Join(wire.PROTOCOL, TICKET)), 1, "the ticket is of no engine"),
        (packet(wire.Schedule(wire.PROTOCOL, TICKET, 1, 0)), 1, "the ticket is of no engine"),
        (packet(wire.Join(1, TICKET)), 1, f"speaks protocol 1; allowed: {wire.PROTOCOL}"),
        (opening("../../etc", (4096,)), 1, "the fingerprint '../../etc' and 1 parts of (4096,)"),
        (opening("", (4096,)), 1, "the fingerprint '' and 1 parts"),
        (opening("same", ()), 1, "0 parts of () bytes; allowed: 1 to 64 letters and digits"),
        (opening("same", (4096, 0)), 1, "2 parts of (4096, 0) bytes"),
        (opening("same", (1 << 62,)), 1, "1 parts of (4611686018427387904,) bytes"),
    ],
)
def test_a_wrong_greeting_gets_one_sentence(
    service: Service, sent: bytes, fds: int, reason: str
) -> None:
    answer = greet(service, sent, [wire.own_process() for _ in range(fds)])
    assert isinstance(answer, wire.Refused)
    assert reason in answer.reason
    assert not service.server.engines


@pytest.mark.parametrize("kind", ["pipe", "memory", "device"])
def test_a_process_whose_end_does_not_show_is_refused(service: Service, kind: str) -> None:
    """Its slots would never be free again."""
    if kind == "pipe":
        shown, other = os.pipe()
        os.close(other)
    else:
        shown = os.memfd_create("toy") if kind == "memory" else os.open("/dev/zero", os.O_RDWR)
    answer = greet(service, opening("same", FORMAT.shard_bytes), [shown])
    assert isinstance(answer, wire.Refused)
    assert "one pidfd" in answer.reason
    assert not service.server.engines


@pytest.mark.parametrize(
    "message",
    [
        wire.Return([0]),
        wire.Return([-1]),
        wire.Publish(0, [b"a"], [None], [0], [], True),
        wire.Publish(-1, [b"a"], [None], [], [], True),
        wire.Publish(1 << 40, [b"a"], [None], [], [], True),
        wire.Publish(0, [b"a"], [None], [], [], True),
        wire.Fetch(1, [b"a" * 4000], False, None, 0, 0),
        wire.Open(wire.PROTOCOL, "again", "toy", wire.PoolBlocks("x", 1, (4096,), 1, ())),
    ],
)
def test_a_message_against_the_rules_ends_that_engine_alone(
    service: Service, attach: Attach, message: wire.ToService
) -> None:
    good, bad = attach(service), attach(service)
    keys = keys_of("a", 3)
    bad.store(keys)
    line_of(bad.cache).put(message)
    if isinstance(message, wire.Fetch):
        line_of(bad.cache).put(message)  # one of this number is open
    bad.cache.poll()
    until(lambda: any(each.has_ended for each in service.server.engines))
    assert good.load(keys)
    assert good.store(keys_of("b", 3)) == keys_of("b", 3)
    until(service.accounted)


def test_an_engine_that_is_not_served_any_more_reads_right_bytes(
    service: Service, attach: Attach
) -> None:
    """It goes on to load what is in host memory, while the service evicts for others."""
    good, bad = attach(service), attach(service)
    keys = keys_of("a", 3)
    bad.store(keys)
    under_way = bad.cache.load(keys)
    assert under_way is not None
    line_of(bad.cache).put(wire.Return([-1]))
    bad.cache.poll()
    until(lambda: any(each.has_ended for each in service.server.engines))
    good.fill("b", 40)
    held = service.pool.cache.index.look_at_holds
    until(lambda: held() > 0)  # the last block: the others cannot leave before it
    bad.copy(under_way)
    until(lambda: not bad.cache.busy, bad.cache.poll)
    until(lambda: held() == 0)
    good.fill("c", 40)
    assert bad.cache.lookup(keys) == 0
    assert good.cache.lookup(keys_of("c", 1, 39)) == 1


def test_a_store_that_no_rank_has_copied_is_not_published(service: Service, attach: Attach) -> None:
    """The service believes the board, and not the message."""
    one = attach(service)
    transfer = one.cache.store(keys_of("a", 2), range(2))
    assert transfer is not None
    line_of(one.cache).put(
        wire.Publish(transfer.cell, keys_of("a", 2), [None, b""], list(transfer.slots), [], True)
    )
    one.cache.poll()
    until(lambda: service.engine.has_ended)
    assert service.pool.cache.ready_blocks == 0


def test_random_packets_harm_nobody(make_service: Callable[..., Service], attach: Attach) -> None:
    service = make_service(4096)
    rng = random.Random(7)
    good = attach(service)
    keys = keys_of("a", 3)
    good.store(keys)
    samples = [
        packet(wire.Touch(keys), wire.UnholdBlocks(Hold.PIN, "x", []), wire.RequestEnded("r", 1)),
        packet(wire.RecordUse(keys, 2, [], RequestContext(9, 3, "r", "s"))),
        packet(
            wire.HoldBlocks(Hold.PIN, keys, "x", 5.0),
            wire.Fetch(1, keys, True, None, 2, 3),
            wire.EndFetch(1),
        ),
    ]
    # Those who send them are this process, which lives: each keeps its board.
    for number in range(50):
        bad = Scheduler(service.root)
        sent = bytearray(rng.choice(samples))
        for _ in range(rng.randint(0, 4)):
            sent[rng.randrange(len(sent))] = rng.randrange(256)
        if number % 3 == 0:
            sent = bytearray(rng.randbytes(rng.randint(1, 300)))
        waiting_packets(line_of(bad.cache)).append(bytes(sent))
        line_of(bad.cache).send()
        bad.cache.poll()
        bad.close()
        assert good.load(keys)
    until(lambda: sum(each.has_ended for each in service.server.engines) == 50)
    assert good.load(keys)
    until(service.accounted)


def test_slots_of_a_scheduler_that_was_killed_wait_for_its_workers(
    service: Service,
    attach: Attach,
    other_process: Callable[..., subprocess.Popen[str]],
) -> None:
    engine = other_process(ENGINE, service.root)
    assert engine.stdout is not None
    worker = other_process(WORKER, service.root, *engine.stdout.readline().split())
    assert worker.stdout is not None
    assert worker.stdout.readline() == "joined\n"
    until(lambda: len(service.engine.processes) == 3)
    granted = service.engine.granted
    assert granted > 0
    engine.kill()
    engine.wait()
    until(lambda: len(service.engine.processes) == 1)
    assert service.engine.has_ended
    assert service.engine.granted == granted, "a worker may still write to them"
    good = attach(service)
    assert good.load(keys_of("a", 3)), "what was published stays"
    assert good.cache.lookup(keys_of("b", 1)) == 0
    worker.kill()
    worker.wait()
    until(lambda: len(service.server.engines) == 1)
    until(service.accounted)
    index = index_of(service.pool.cache)
    assert index.free_slots + len(index) == index.num_slots - service.server.engines[0].granted


def test_an_engine_has_one_scheduler(service: Service, attach: Attach) -> None:
    one = attach(service)
    with pytest.raises(ArenaError, match="has had a scheduler"):
        Attached(one.info, 1, one.arena)
    one.cache.close()
    until(lambda: service.engine.has_ended)
    with pytest.raises(ArenaError, match="has had a scheduler"):
        Attached(one.info, 1, one.arena)
    join_pool(one.ticket, one.arena).close()


def test_memory_that_is_no_arena_is_one_clear_error(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = SimpleNamespace(**vars(wire))
    answers.Opened = lambda ticket, slots, _: wire.Opened(ticket, slots, ticket.client)
    monkeypatch.setattr(server, "wire", answers)
    with pytest.raises(ArenaError, match=r"memory of the service cannot be mapped: .* is no arena"):
        open_pool(service.root, "toy", "engine", ABOUT)


def test_models_do_not_share_a_pool(service: Service, attach: Attach) -> None:
    one = attach(service)
    other = attach(service, about=OTHER)
    larger = attach(service, about=SessionInfo("same", ArenaSpec(BlockFormat(1, (8192,)), 0)))
    keys = keys_of("a", 3)
    one.store(keys)
    assert other.cache.lookup(keys) == larger.cache.lookup(keys) == 0
    assert len(service.server.pools) == 3


def test_pools_without_engines_make_room_for_others(
    make_service: Callable[..., Service],
    other_process: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is memory for one pool only."""
    service = make_service(32)
    plan = pool.plan_arena

    def plan_one(*arguments: Any, **options: Any) -> ArenaSpec:
        if service.server.pools:
            raise ArenaError("no memory is left")
        return plan(*arguments, **options)

    monkeypatch.setattr(pool, "plan_arena", plan_one)
    engine = other_process(ENGINE, service.root)
    assert engine.stdout is not None
    engine.stdout.readline()
    with pytest.raises(ArenaError, match="no memory is left"):
        Scheduler(service.root, about=OTHER)
    assert len(service.server.engines) == 1
    engine.kill()
    until(lambda: not service.server.engines)
    other = Scheduler(service.root, about=OTHER)
    assert other.store(keys_of("a", 2)) == keys_of("a", 2)
    assert [each.fingerprint for each in pools_of(service.server)] == ["other"]
    other.close()


def test_an_engine_waits_for_a_service_that_starts(
    service: Service, attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    service.close()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(attach, service)
        until(lambda: "waiting for it, 30 s at most" in caplog.text)
        service.start()
        one = waiting.result(60)
    assert one.store(keys_of("a", 2)) == keys_of("a", 2)
    assert caplog.text.count("waiting for it") == 1


def test_no_service_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexkv.service.attach._START_SECONDS", 0.2)
    for root in (tmp_path / "missing", tmp_path):
        with pytest.raises(ArenaError, match="no service of FlexKV answers in"):
            open_pool(str(root), "toy", "engine", ABOUT)
    info = replace(ABOUT, service=ServiceTicket(str(tmp_path), 1, "00", "toy", "toy"))
    with (
        closing(Arena.create(ArenaSpec(FORMAT, 1))) as arena,
        pytest.raises(ArenaError, match="no service of FlexKV answers in"),
    ):
        Attached(info, 1, arena)


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Pools of other models are filled until this is set, or the test ends."""
    filled, create = threading.Event(), pool.PoolMemory.create

    def fill(config: CacheConfig, blocks: wire.PoolBlocks) -> pool.PoolMemory:
        if blocks.fingerprint == OTHER.fingerprint:
            assert filled.wait(60)
        return create(config, blocks)

    monkeypatch.setattr(pool.PoolMemory, "create", fill)
    yield filled
    filled.set()


def test_engines_are_served_while_the_pool_of_another_is_filled(
    service: Service, attach: Attach, filling: threading.Event
) -> None:
    one = attach(service)
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(attach, service, about=OTHER) for _ in range(2)]
        assert one.store(keys_of("a", 3)) == keys_of("a", 3)
        assert one.load(keys_of("a", 3))
        assert [each.fingerprint for each in state_of(service.root).pools] == ["same"]
        assert not any(each.done() for each in both)
        filling.set()
        first, second = (each.result(60) for each in both)
    first.store(keys_of("b", 3))
    assert second.load(keys_of("b", 3)), "one pool is made for both"


def test_an_error_of_the_lobby_loses_no_process_that_waits(
    service: Service,
    attach: Attach,
    filling: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures: list[int] = []

    def fail(*_: object) -> NoReturn:
        failures.append(1)
        raising()

    with ThreadPoolExecutor() as threads:
        both = [threads.submit(attach, service, about=OTHER) for _ in range(2)]
        until(lambda: waiting_newcomers(service.server) == 2)
        with monkeypatch.context() as patch:
            patch.setattr("flexkv.service.lobby.Lobby._receive", fail)
            until(lambda: len(failures) > 2)
        filling.set()
        first, second = (each.result(60) for each in both)
    first.store(keys_of("b", 3))
    assert second.load(keys_of("b", 3))


@pytest.mark.usefixtures("filling")
def test_a_service_ends_while_a_pool_is_filled(service: Service) -> None:
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(open_pool, service.root, "toy", "toy", OTHER)
        until(lambda: is_making(service.server))
        service.close()
        with pytest.raises(ArenaError, match="closed the connection"):
            waiting.result(60)


def test_a_directory_has_one_service(service: Service) -> None:
    with pytest.raises(ArenaError, match="owned by the living process"):
        NodeServer(service.root, CacheConfig())


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    root = tmp_path / "service"
    environ = os.environ | {
        "FLEXKV_CPU_CACHE_GB": "0.001",
        "FLEXKV_RUNTIME_DIR": str(tmp_path / "runtime"),
    }
    command = [sys.executable, "-m", "flexkv", "serve"]
    with subprocess.Popen(
        [*command, str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"the service of FlexKV listens in {root}\n"
            assert root.stat().st_mode & 0o777 == 0o700
            one = Scheduler(str(root))
            assert one.store(keys_of("a", 3)) == keys_of("a", 3)
            second = subprocess.run(
                [*command, str(root)], capture_output=True, text=True, env=environ, check=False
            )
            assert second.returncode == 2
            assert "owned by the living process" in second.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
            assert one.load(keys_of("a", 3)), "the engine has the memory"
            one.close()
        finally:
            process.kill()
    without = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert without.returncode == 2
    assert "serve needs DIR, or the setting service" in without.stderr
