# SPDX-License-Identifier: Apache-2.0
"""What operators ask of a service that runs."""

from __future__ import annotations

import contextlib
import errno
import http.client
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from socketserver import BaseServer

import pytest
from prometheus_client.parser import text_string_to_metric_families
from refused_writes import refuse_writes

from flexkv import cli
from flexkv.eviction import RequestContext
from flexkv.figures.health_samples import problems_of
from flexkv.operators import door as doors
from flexkv.operators.ask_door import AskError
from flexkv.operators.ask_door import ask as question
from flexkv.operators.door import listen_at
from flexkv.operators.verbs import PromptQuestion
from flexkv.service import endpoints
from flexkv.service import messages as wire
from flexkv.service.server import NodeServer
from flexkv.service.state import (
    SOCKET,
    PoolState,
    clear_pools,
    find_prompt,
    is_service,
    metrics_of,
    state_of,
)
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.tiers.disk import OsFiles
from flexkv.transfer.stack import TierStack
from flexkv.types.changes import Medium
from flexkv.types.presence import Presence
from flexkv.types.troubles import Trouble
from packages.conftest import PATIENCE_SECONDS
from packages.flexkv.tests.service.served import OTHER, Scheduler, Service, keys_of, until
from packages.inside import index_of

Attach = Callable[..., Scheduler]


def pool_of(service: Service) -> PoolState:
    (pool,) = state_of(service.root).pools
    return pool


def ask(port: int, method: str, path: str) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as peer:
        peer.request(method, path)
        answer = peer.getresponse()
        return answer.status, answer.read().decode()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port at which the next service shows figures."""
    figures = listen_at("127.0.0.1", 0)
    begin = NodeServer.__init__
    monkeypatch.setattr(
        NodeServer, "__init__", lambda self, *args, pools: begin(self, *args, figures, pools)
    )
    return int(figures.getsockname()[1])


def test_the_state_names_pools_and_engines(service: Service, attach: Attach) -> None:
    one, other = attach(service), attach(service)
    keys = keys_of("a", 3)
    one.store(keys)
    context = RequestContext(request_id="r")
    one.cache.record(keys, context, [*keys, *keys_of("b", 1)])
    one.settle()
    transfer = other.cache.load(keys)
    assert transfer is not None
    pool = pool_of(service)
    assert (pool.fingerprint, pool.identity, pool.slots) == ("same", ("model: toy",), 32)
    assert [each.held_blocks for each in pool.engines] == [0, 3]
    assert all(each.attached and each.processes == 2 for each in pool.engines)
    assert [each.granted_blocks for each in pool.engines] == [
        each.granted for each in service.server.engines
    ]
    figures = pool.figures
    assert (figures["blocks:host"], figures["capacity_blocks:host"]) == (3, 32)
    assert (figures["engines"], figures["prompt_blocks"], figures["found_blocks"]) == (2, 4, 3)
    assert figures["stalled_blocks"] == 0
    other.copy(transfer)
    other.settle()
    assert [each.held_blocks for each in pool_of(service).engines] == [0, 0]


def test_blocks_of_a_scheduler_that_has_left_are_stalled(service: Service, attach: Attach) -> None:
    one = attach(service)
    one.store(keys_of("a", 3))
    assert one.cache.load(keys_of("a", 3))
    granted = service.engine.granted
    one.cache.close()
    until(lambda: service.engine.has_ended)
    pool = pool_of(service)
    assert [each.attached for each in pool.engines] == [False]
    assert pool.figures["stalled_blocks"] == granted + 3


def test_metrics_are_those_of_each_pool(service: Service, attach: Attach) -> None:
    attach(service).store(keys_of("a", 3))
    attach(service, about=OTHER).store(keys_of("a", 2))
    text = metrics_of(service.root).decode()
    found = {
        (each.name, *each.labels.values()): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }
    prefix = "service:flexkv_"
    assert found[f"{prefix}blocks", "toy", "same", "host"] == 3
    assert found[f"{prefix}blocks", "toy", "other", "host"] == 2
    assert found[f"{prefix}stored_blocks_total", "toy", "same", "host"] == 3
    assert found[f"{prefix}engines", "toy", "other"] == 1
    assert [value for name, *_, value in ((*k, v) for k, v in found.items()) if "info" in name] == [
        1
    ]


def test_the_port_shows_figures_and_clears_nothing(
    port: int, make_service: Callable[..., Service], attach: Attach
) -> None:
    service = make_service()
    one = attach(service)
    one.store(keys_of("a", 3))
    status, text = ask(port, "GET", "/metrics")
    assert (
        status,
        'service:flexkv_blocks{model_name="toy",pool="same",tier="host"} 3.0' in text,
    ) == (200, True)
    assert ask(port, "GET", "/health") == (200, "ok\n")
    for method, path in (("POST", "/clear"), ("GET", "/state"), ("GET", "/"), ("GET", "/clear")):
        status, text = ask(port, method, path)
        assert (status, text) == (
            404,
            "nothing is here; allowed: GET /metrics, GET /health\n",
        )
    assert ask(port, "DELETE", "/metrics")[0] == 501
    assert one.load(keys_of("a", 3))


def test_a_clear_that_names_nothing_clears_nothing(
    make_service: Callable[..., Service], attach: Attach
) -> None:
    service = make_service()
    one = attach(service)
    one.store(keys_of("a", 3))
    for path in ("/clear", "/clear?fingerprint=", "/clear?fingerprnt=ab"):
        with pytest.raises(AskError, match="fingerprint is missing; allowed: a fingerprint"):
            question(service.root, SOCKET, "service", ("POST", path))
    assert one.load(keys_of("a", 3))


def test_a_port_that_nobody_asks_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseServer.serve_forever, "__defaults__", (86400.0,))
    idle = doors.Door(listen_at("127.0.0.1", 0), {}, is_open=True)
    idle.close()


def test_a_loop_that_does_not_answer_is_no_health(
    port: int, make_service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "_LOOP_SECONDS", 0.05)
    service = make_service()
    service.stop()
    status, text = ask(port, "GET", "/health")
    assert (status, text) == (503, "the loop of the service has not answered for 0.05 s\n")
    with pytest.raises(AskError, match=r"the loop of the service has not answered for 0.05 s"):
        clear_pools(service.root, None)


def test_health_tells_a_pool_that_is_suspended_until_it_is_cleared(
    port: int,
    make_service: Callable[..., Service],
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = make_service()
    one = attach(service)

    def problems() -> list[Trouble]:
        return [each.trouble for each in problems_of(one.cache.figures().own)]

    def fails(*_: object) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(TierStack, "empty", fails)
        with pytest.raises(AskError, match="no room"):
            clear_pools(service.root, None)
    status, text = ask(port, "GET", "/health")
    assert status == 200
    assert text.startswith("pool same is off: a reset failed")
    labels = 'model_name="toy",pool="same",reason="suspended",state="off",tier=""'
    assert f"service:flexkv_health{{{labels}}} 1.0" in ask(port, "GET", "/metrics")[1]
    until(lambda: problems() == [Trouble.POOL], one.cache.poll)
    clear_pools(service.root, None)
    until(lambda: problems() == [], one.cache.poll)
    assert ask(port, "GET", "/health") == (200, "ok\n")


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.EPIPE])
def test_an_error_of_a_disk_at_a_clear_reaches_the_operator(
    number: int, service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(service)

    def fails(*_: object) -> None:
        raise OSError(number, "for the test", "/the/disk")

    monkeypatch.setattr(TierStack, "empty", fails)
    with pytest.raises(AskError, match=r"for the test"):
        clear_pools(service.root, None)


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_health_says_that_no_engine_finds_the_service(
    port: int, make_service: Callable[..., Service], how: str
) -> None:
    service = make_service()
    assert ask(port, "GET", "/health") == (200, "ok\n")
    if how == "removed":
        shutil.rmtree(service.root)
    else:
        Path(service.root).rename(f"{service.root} of before")
    if how == "replaced":
        with RuntimeDirectory(service.root, create=True) as other:
            for name in (wire.SOCKET, SOCKET):
                other.listen(name).close()
    said = "the service is degraded: the sockets in its directory were removed or replaced: "
    status, text = ask(port, "GET", "/health")
    assert (status, text.startswith(said)) == (200, True)


def test_silent_peers_keep_nobody_out(
    port: int, make_service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "_MOST_PEERS", 3)
    service = make_service()
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            peer.send(b"GET /metrics HTTP/1.1\r\n")
        assert ask(port, "GET", "/health") == (200, "ok\n")
        assert state_of(service.root).pools == ()


def test_a_failure_is_told_and_others_are_served(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attach(service)

    def fail() -> None:
        raise ZeroDivisionError("for the test")

    with monkeypatch.context() as patch:
        patch.setattr(service.pool.cache, "figures", fail)
        with pytest.raises(AskError, match=r"ZeroDivisionError\('for the test'\)"):
            state_of(service.root)
    assert state_of(service.root).pools
    assert one.store(keys_of("a", 3)) == keys_of("a", 3)


def test_a_cleared_pool_has_no_block_and_takes_new_ones(service: Service, attach: Attach) -> None:
    one, other = attach(service), attach(service, about=OTHER)
    keys = keys_of("a", 4)
    for each in (one, other):
        each.store(keys)
    assert clear_pools(service.root, "same").pools == {"same": 4}
    assert (one.cache.lookup(keys), other.cache.lookup(keys)) == (0, 4)
    until(lambda: one.store(keys) and one.load(keys), one.cache.poll)
    assert clear_pools(service.root, None).pools == {"same": 4, "other": 4}
    assert (one.cache.lookup(keys), other.cache.lookup(keys)) == (0, 0)
    until(lambda: index_of(service.server.pools[0].cache).stale_blocks == 0)
    with pytest.raises(AskError, match=r"no pool has the fingerprint 'none'; allowed: same"):
        clear_pools(service.root, "none")


def test_a_store_that_began_before_a_clear_is_not_published(
    service: Service, attach: Attach
) -> None:
    one = attach(service)
    keys = keys_of("a", 3)
    transfer = one.cache.store(keys, range(3))
    assert transfer is not None
    clear_pools(service.root, None)
    one.copy(transfer)
    one.settle()
    assert one.cache.lookup(keys) == 0
    until(service.accounted)
    until(lambda: one.store(keys) and one.load(keys), one.cache.poll)


def test_blocks_that_are_loaded_keep_their_bytes_over_a_clear(
    service: Service, attach: Attach
) -> None:
    one, other = attach(service), attach(service)
    keys = keys_of("a", 5)
    one.store(keys)
    transfer = other.cache.load(keys)
    assert transfer is not None
    clear_pools(service.root, None)
    for number in range(60):
        one.store(keys_of(f"b {number}", 1))
    other.copy(transfer)  # compares the bytes
    other.settle()
    until(service.accounted)


def test_a_clear_reaches_the_disk_and_later_blocks_outlast_the_service(
    tmp_path: Path, make_service: Callable[..., Service], attach: Attach
) -> None:
    disk = {"ssd_cache_dir": (str(tmp_path / "disk"),), "ssd_cache_gb": 0.01}
    first = make_service(16, **disk)
    one = attach(first, step_blocks=4)
    keys, later = keys_of("a", 4), keys_of("b", 3)

    def leave(keys: Sequence[bytes], name: str) -> None:
        """Until the blocks are on disk alone."""
        until(lambda: one.store(keys) and one.load(keys), one.cache.poll)
        fillers = (keys_of(f"{name} {number}", 1) for number in count())
        until(lambda: not one.cache.lookup(keys), lambda: one.store(next(fillers)))

    leave(keys, "first")
    clear_pools(first.root, None)
    until(lambda: pool_of(first).figures["blocks:disk"] == 0, one.cache.poll)
    leave(later, "second")
    one.close()
    first.close()
    second = make_service(16, **disk)
    two = attach(second, step_blocks=4)
    until(lambda: two.cache.presence(later) == [Presence.BELOW] * 3)
    assert two.cache.presence(keys) == [Presence.ABSENT] * 4
    fetch = two.cache.fetch(later)
    assert fetch is not None
    until(lambda: two.cache.fetch_state(fetch).arrived == 3, two.cache.poll)
    two.cache.end_fetch(fetch)
    assert two.load(later)


def test_the_door_is_of_this_user_and_ends_with_the_service(service: Service) -> None:
    assert is_service(service.root)
    sockets = list(Path(service.root).glob("*.sock"))
    assert [each.stat().st_mode & 0o777 for each in sockets] == [0o600, 0o600]
    service.close()
    assert not is_service(service.root)
    with pytest.raises(AskError, match=r"no service of FlexKV runs in '.*'"):
        state_of(service.root)


def test_a_service_finds_a_prompt_by_its_hashes(
    tmp_path: Path, make_service: Callable[..., Service], attach: Attach
) -> None:
    disk = {"ssd_cache_dir": (str(tmp_path / "disk"),), "ssd_cache_gb": 0.01}
    service = make_service(**disk)
    keys = [number.to_bytes(4, "big") for number in range(5)]
    attach(service).store(keys[:4])
    attach(service, about=OTHER).store(keys[:1])
    question = PromptQuestion(hashes=tuple(each.hex() for each in keys))

    def found(fingerprint: str | None = None) -> dict[str, tuple[int, list[int]]]:
        return {
            each.fingerprint: (each.found, [tier.blocks for tier in each.tiers])
            for each in find_prompt(service.root, question, fingerprint)
        }

    until(lambda: found() == {"same": (4, [4, 4]), "other": (1, [1, 1])})
    assert found("other") == {"other": (1, [1, 1])}
    (answer,) = find_prompt(service.root, question, "same")
    assert (answer.blocks, answer.block_tokens, answer.engine) == (5, None, "")
    with pytest.raises(AskError, match=r"no pool has the fingerprint 'none'; allowed: same"):
        found("none")
    with pytest.raises(AskError, match=r"a service knows no tokens"):
        find_prompt(service.root, PromptQuestion(tokens=(1,)), None)


def test_a_body_that_is_too_long_is_not_read(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "_MOST_BYTES", 20)
    with pytest.raises(AskError, match=r"has \d+ bytes; allowed: at most 20"):
        find_prompt(service.root, PromptQuestion(hashes=("00ff00ff",) * 10), None)


def test_a_clear_that_a_disk_refuses_is_exit_code_1(
    with_disk: Service,
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, keys = attach(with_disk), keys_of("a", 3)
    one.store(keys)
    until(lambda: all(with_disk.pool.cache.where(keys)[Medium.DISK]))
    with monkeypatch.context() as patch:
        refuse_writes(patch)
        assert cli.main(["clear", "service", "all", with_disk.root, "--yes"]) == 1
    assert "blocks on disk may be found again: the reset of " in capsys.readouterr().out
    assert cli.main(["clear", "service", "all", with_disk.root, "--yes"]) == 0


def test_no_engine_waits_for_a_clear_that_a_drive_delays(
    with_disk: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attach(with_disk)
    one.store(keys_of("a", 3))
    syncing, free, real = threading.Event(), threading.Event(), OsFiles.sync

    def sync(self: OsFiles, fd: int) -> None:
        syncing.set()
        assert free.wait(PATIENCE_SECONDS)
        real(self, fd)

    monkeypatch.setattr(OsFiles, "sync", sync)
    with ThreadPoolExecutor() as pool:
        cleared = pool.submit(clear_pools, with_disk.root, None)
        try:
            assert syncing.wait(PATIENCE_SECONDS)
            until(lambda: one.load(keys_of("b", 3)), lambda: one.store(keys_of("b", 3)))
            assert not cleared.done()
        finally:
            free.set()
        assert cleared.result(PATIENCE_SECONDS).reason == ""
