# SPDX-License-Identifier: Apache-2.0
"""The service as an operator runs it, and the commands that ask it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from flexkv.host.arena import ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.session.wire import SessionInfo
from flexkv.types.errors import ArenaError
from packages.flexkv.tests.cli.stores import Cache, Flexkv
from packages.flexkv.tests.service.served import OTHER, Scheduler, keys_of


class Node(NamedTuple):
    root: str
    port: int
    process: subprocess.Popen[str]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environ = os.environ | {
        "FLEXKV_CPU_CACHE_GB": "0.001",
        "FLEXKV_RUNTIME_DIR": str(folder / "runtime"),
    }
    command = [sys.executable, "-m", "flexkv", "serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            assert "listens" in process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    root, port = str(tmp_path / "service"), free_port()
    with running(tmp_path, root, "--http", str(port)) as process:
        yield Node(root, port, process)


@pytest.fixture
def engine(node: Node) -> Iterator[Scheduler]:
    """An engine with three blocks."""
    with contextlib.closing(Scheduler(node.root)) as one:
        one.store(keys_of("a", 3))
        yield one


def test_stat_prints_pools_and_engines(flexkv: Flexkv, node: Node, engine: Scheduler) -> None:
    with contextlib.closing(Scheduler(node.root, about=OTHER)) as other:
        other.store(keys_of("b", 2))
        ended = flexkv("stat", node.root)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"{node.root}\n")
    assert f"process {node.process.pid}\n" in ended.out
    assert re.findall(r"pool (\w+)\n", ended.out) == ["same", "other"]
    held = re.findall(r"host +(.*) of .* MiB, (\d) of \d+ blocks\n", ended.out)
    assert held == [("12.00 KiB", "3"), ("8.00 KiB", "2")]
    assert (
        len(re.findall(r"engine +toy: attached, \d+ blocks granted, 0 held, 0 fetches", ended.out))
        == 2
    )


def test_stat_prints_json_and_takes_the_service_of_the_settings(
    flexkv: Flexkv, node: Node, engine: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_SERVICE", node.root)
    ended = flexkv("stat", "--json")
    assert (ended.code, ended.err) == (0, "")
    (pool,) = json.loads(ended.out)["services"][node.root]["pools"]
    assert (pool["fingerprint"], pool["figures"]["blocks:host"]) == ("same", 3)


def test_a_file_names_the_size_of_each_pool(flexkv: Flexkv, tmp_path: Path) -> None:
    file, root = tmp_path / "service.yaml", str(tmp_path / "service")
    text = "pools: [{model: big, cpu_cache_gb: 0.002, tenant_shares: {team-a: 25}}]\n"
    file.write_text(text)
    with running(tmp_path, root, "--pools", str(file)):
        second = contextlib.closing(Scheduler(root, about=OTHER, model="other"))
        with contextlib.closing(Scheduler(root, model="big")) as first, second:
            first.store(keys_of("a", 3), "team-a")
            first.store(keys_of("b", 2), "team-b")
            ended = flexkv("stat", root)
            shown = flexkv("top", root, "--once")
    tenants = re.findall(r"tenant +(.*): (\d) blocks, share (\d+)\n", ended.out)
    assert tenants == [("team-a", "3", "131"), ("all others", "2", "393")]
    assert re.search(r"team-a +3 +131", shown.out)
    assert re.findall(r"model +(\w+)\n", ended.out) == ["other", "big"]
    assert re.findall(r"host .* of (\d)\.\d+ MiB", ended.out) == ["1", "2"]
    assert "service, big, other" in shown.out


def test_a_wrong_file_of_pools_is_one_error(flexkv: Flexkv, tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("pools: 4\n")
    ended = flexkv("serve", str(tmp_path / "service"), "--pools", str(file))
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert f"4 from pools in {file} is not allowed; allowed: a list of entries" in ended.err


def test_stat_takes_a_service_beside_a_cache(flexkv: Flexkv, node: Node, cache: Cache) -> None:
    cache.fill(5)
    ended = flexkv("stat", node.root, cache.root)
    assert ended.code == 0
    assert "no engine has attached yet" in ended.out
    assert "1 folder in total" in ended.out


def test_top_shows_the_service(flexkv: Flexkv, node: Node, engine: Scheduler) -> None:
    engine.cache.record(keys_of("a", 3), prompt=keys_of("a", 4))
    engine.settle()
    ended = flexkv("top", node.root, f"127.0.0.1:{node.port}", "--once")
    assert (ended.code, ended.err) == (0, "")
    shown = "engines 1   blocks of prompts found - now, 75.0 % since its start"
    assert ended.out.count(shown) == 2
    assert len(re.findall(r"12.00 KiB of \d.\d\d MiB", ended.out)) == 2


def test_the_port_serves_metrics_and_health(flexkv: Flexkv, node: Node, engine: Scheduler) -> None:
    at = f"http://127.0.0.1:{node.port}"
    with urllib.request.urlopen(f"{at}/health") as answer:
        assert answer.read() == b"ok\n"
    ended = flexkv("health", node.root)
    assert (ended.code, ended.out) == (0, f"{node.root}, pool same: ok\n")
    with urllib.request.urlopen(f"{at}/metrics") as answer:
        assert (
            b'service:flexkv_blocks{model_name="toy",pool="same",tier="host"} 3.0\n'
            in answer.read()
        )


@pytest.mark.parametrize("file", [None, "default: {%s}", "total: {%s}", "pools: [{model: a, %s}]"])
def test_more_memory_than_the_machine_has_is_refused_at_the_start(
    flexkv: Flexkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None
) -> None:
    options: list[object] = []
    if file is None:
        monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", "1000000")
    else:
        options = ["--pools", tmp_path / "service.yaml"]
        (tmp_path / "service.yaml").write_text(file % "cpu_cache_gb: 1000000")
    ended = flexkv("serve", tmp_path / "service", *options)
    assert ended.code == 2
    assert "cpu_cache_gb is 1000000 GiB; allowed: at most" in ended.err
    assert not (tmp_path / "service").exists()


def test_health_of_a_service_that_refused_an_engine_is_degraded(
    flexkv: Flexkv, tmp_path: Path
) -> None:
    """A block has more bytes than the pool."""
    about = SessionInfo("large", ArenaSpec(BlockFormat(1, (8 << 20,)), 0), True, ("model: big",))
    root = str(tmp_path / "service")
    with running(tmp_path, root):
        assert flexkv("health", root).code == 0
        with pytest.raises(ArenaError, match="less than one block"):
            Scheduler(root, about=about, model="big")
        ended = flexkv("health", root)
        said = "degraded: refused an engine of the model 'big', and let none in since: cpu_cache_gb"
        assert (ended.code, said in ended.out) == (3, True)
        assert "problem" in flexkv("stat", root).out
        Scheduler(root).close()
        assert flexkv("health", root).code == 3, "another model was let in"
        Scheduler(root, model="big").close()
        assert flexkv("health", root).code == 0


@pytest.mark.parametrize("address", ["0", "[::1]:0"])
def test_the_first_line_names_the_port_that_was_free(tmp_path: Path, address: str) -> None:
    environ = os.environ | {"FLEXKV_RUNTIME_DIR": str(tmp_path / "runtime")}
    command = [sys.executable, "-m", "flexkv", "serve", str(tmp_path / "s"), "--http", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"and at (http://\S+:\d+) for /metrics and /health", line)
            assert found, line
            with urllib.request.urlopen(f"{found[1]}/health") as answer:
                assert answer.read() == b"ok\n"
        finally:
            process.kill()


def test_clear_drops_what_the_service_has(flexkv: Flexkv, node: Node, engine: Scheduler) -> None:
    would = flexkv("clear", "service", "all", node.root, "--dry-run")
    assert (would.code, would.out) == (0, f"would clear {node.root}, fingerprint same\n")
    asked = flexkv("clear", "service", "all", node.root)
    assert (asked.code, "--yes is missing" in asked.err) == (2, True)
    for how in ("--yes", "--dry-run"):
        wrong = flexkv("clear", "service", "0" * 32, node.root, how)
        said = f"no pool of {node.root} has the fingerprint '{'0' * 32}'\n"
        assert (wrong.code, wrong.out) == (1, said)
    assert engine.cache.lookup(keys_of("a", 3)) == 3
    ended = flexkv("clear", "service", "all", node.root, "--yes")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"cleared {node.root}, fingerprint same, 3 blocks of host memory\n"
    assert engine.cache.lookup(keys_of("a", 3)) == 0


def test_a_service_without_engines_has_nothing_to_clear(flexkv: Flexkv, node: Node) -> None:
    ended = flexkv("clear", "service", "all", node.root, "--yes")
    said = f"nothing to clear in {node.root}: no engine has attached yet\n"
    assert (ended.code, ended.out) == (0, said)


def test_clear_takes_services_or_caches(flexkv: Flexkv, node: Node, cache: Cache) -> None:
    cache.fill(5)
    ended = flexkv("clear", "folders", node.root, cache.root, "--yes")
    assert (ended.code, "cache directories, or `flexkv clear service`" in ended.err) == (2, True)
    assert flexkv("stat", cache.root).out.count("5 used") == 2


def test_a_service_that_was_killed_or_hangs_is_named(
    flexkv: Flexkv, node: Node, engine: Scheduler
) -> None:
    node.process.send_signal(signal.SIGSTOP)
    ended = flexkv("clear", "service", "all", node.root, "--yes")
    assert (ended.code, "does not answer" in ended.err) == (1, True)
    node.process.kill()
    node.process.wait()
    for words, options in (
        (["stat"], []),
        (["clear", "service", "all"], ["--yes"]),
        (["top"], ["--once"]),
    ):
        ended = flexkv(*words, node.root, *options)
        assert ended.code == 1
        assert "no service of FlexKV runs in" in ended.err + ended.out


@pytest.mark.parametrize("address", ["", "65536", "x", "host.invalid:80", "127.0.0.1:", "-1"])
def test_a_wrong_address_is_named(flexkv: Flexkv, tmp_path: Path, address: str) -> None:
    ended = flexkv("serve", tmp_path / "service", f"--http={address}")
    assert ended.code == 2
    assert f"--http is {address!r} on the command line, which cannot be used" in ended.err


def test_a_port_of_another_process_is_named(flexkv: Flexkv, node: Node, tmp_path: Path) -> None:
    ended = flexkv("serve", tmp_path / "another", "--http", node.port)
    assert (ended.code, "Address already in use" in ended.err) == (2, True)
