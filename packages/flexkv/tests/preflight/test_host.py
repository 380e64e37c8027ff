# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from flexkv.engine.recorder import HEAD as KEY
from flexkv.preflight.findings import Level
from flexkv.preflight.host import (
    check_memory,
    check_runtime_dir,
    check_service,
    check_trace_file,
)
from flexkv.service.server import NodeServer
from flexkv.settings import CacheConfig
from flexkv.types.errors import ArenaError

HEAD = f'{{"{KEY}":1}}\n'


def traced(path: Path) -> tuple[Level, str]:
    (found,) = check_trace_file(CacheConfig(trace=str(path)))
    assert bool(found.change) is (found.level is not Level.OK)
    return found.level, found.text


def test_a_trace_that_can_be_recorded(tmp_path: Path) -> None:
    assert list(check_trace_file(CacheConfig())) == []
    path = tmp_path / "trace"
    assert traced(path) == (Level.OK, f"{path} does not exist: an engine creates it")
    assert not path.exists()
    path.write_text(HEAD + "{half a line")
    path.chmod(0o600)
    assert traced(path) == (Level.OK, f"{path} a recording to add to")
    assert path.read_text() == HEAD + "{half a line"


@pytest.mark.parametrize(
    "kind", ["a directory", "no directory above", "open to others", "a link", "a fifo", "a thesis"]
)
def test_a_trace_that_cannot_be_recorded_is_a_problem(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    match kind:
        case "a directory":
            path.mkdir()
        case "no directory above":
            path = path / "deep"
        case "open to others":
            path.write_text(HEAD)
            path.chmod(0o644)
        case "a link":
            path.symlink_to(tmp_path / "other")
        case "a fifo":
            os.mkfifo(path, 0o600)
        case "a thesis":
            path.write_text("my thesis")
            path.chmod(0o600)
    level, text = traced(path)
    assert level is Level.PROBLEM
    assert text.startswith(f"cannot record to {path}: ")


def test_a_trace_of_another_engine_is_advised_against(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(HEAD)
    path.chmod(0o600)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert traced(path) == (Level.ADVICE, f"{path}: another engine records to it")


@pytest.mark.parametrize("name", ["x" * 300, "none/" + "x" * 300, "y" * 200 + "/" + "x" * 256])
def test_a_name_that_is_too_long_is_an_error_of_the_start(tmp_path: Path, name: str) -> None:
    config = CacheConfig(runtime_dir=str(tmp_path / name))
    with pytest.raises(ArenaError, match=r"runtime_dir .* cannot be used: .*File name too long"):
        list(check_runtime_dir(config))


def test_a_path_longer_than_a_sockets_address_can_be_used(tmp_path: Path) -> None:
    config = CacheConfig(runtime_dir=str(tmp_path / ("x" * 200)))
    (found,) = check_runtime_dir(config)
    assert found.level is Level.OK
    assert "does not exist: an engine creates it" in found.text
    NodeServer(config.session_root, config).close(0)
    (found,) = check_runtime_dir(config)
    assert "belongs to this user alone" in found.text


def test_a_runtime_directory_below_a_file_is_an_error_of_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = CacheConfig(runtime_dir=str(tmp_path / "file" / "run"))
    with pytest.raises(ArenaError, match="Not a directory"):
        list(check_runtime_dir(config))


def test_a_service_that_listens_is_found_and_not_disturbed(tmp_path: Path) -> None:
    config = CacheConfig(service=str(tmp_path / "node"))
    (found,) = check_service(config)
    assert (found.level, found.change) == (
        Level.PROBLEM,
        f"start it first: flexkv serve {config.service}",
    )
    server = NodeServer(str(config.service), CacheConfig())
    try:
        (found,) = check_service(config)
        assert found.level is Level.OK
    finally:
        server.close(0)
    assert list(check_service(CacheConfig())) == []


@pytest.mark.parametrize(("gb", "small"), [(0.0019, True), (0.002, False)])
def test_less_memory_than_one_usual_block_is_a_problem(gb: float, small: bool) -> None:
    first = next(iter(check_memory(CacheConfig(cpu_cache_gb=gb))))
    assert first.level is (Level.PROBLEM if small else Level.OK)
    assert ("less than one usual block" in first.text) is small


@pytest.mark.parametrize("grows", [False, True])
def test_memory_that_may_still_come_is_no_problem(grows: bool) -> None:
    first = next(iter(check_memory(CacheConfig(cpu_cache_gb=1 << 19, memory_grows=grows))))
    assert first.level is (Level.ADVICE if grows else Level.PROBLEM)
