# SPDX-License-Identifier: Apache-2.0
"""The fork server with an engine of a few lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.harness import processes
from integration.harness.fork_server import ForkServer

ROOT = Path(__file__).parents[3]
ENGINE = """
import os, threading, time
prepared_in = None
def prepare():
    global prepared_in
    prepared_in = os.getpid()
    os.environ["SET_BY_ENGINE"] = "1"
    os.environ.setdefault("CHOSEN", "engine")
    if "THREAD" in os.environ:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
TELLS = """
import json, os, sys
import tiny_engine
print(json.dumps({
    "environment": dict(os.environ),
    "arguments": sys.argv[1:],
    "group": os.getpgrp(),
    "session": os.getsid(0),
    "prepared in": tiny_engine.prepared_in,
    "path": sys.path,
}))
"""
WRITES = "import os, sys\nos.write(int(sys.argv[2]), sys.argv[1].encode())\n"
Start = Callable[..., ForkServer]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, source in {"tiny_engine": ENGINE, "tells": TELLS, "writes": WRITES}.items():
        (tmp_path / f"{name}.py").write_text(source)
    return tmp_path


@pytest.fixture
def start(folder: Path, request: pytest.FixtureRequest) -> Start:
    def started(**env: str) -> ForkServer:
        path = os.pathsep.join((str(folder), str(ROOT)))
        environment = os.environ | {"PYTHONPATH": path} | env
        server = ForkServer(Path(sys.executable), "tiny_engine", environment)
        request.addfinalizer(server.close)
        return server

    return started


@pytest.fixture
def tell(folder: Path) -> Callable[..., dict[str, Any]]:
    def told(server: ForkServer, *arguments: str, **env: str) -> dict[str, Any]:
        path = folder / "log"
        with path.open("wb") as log:
            process = server.run("tells", env, log.fileno(), arguments)
        process.wait()
        found: dict[str, Any] = json.loads(path.read_text())
        assert found["group"] == process.pid
        return found

    return told


def test_the_engine_is_imported_once(start: Start, tell: Callable[..., dict[str, Any]]) -> None:
    server = start()
    first, second = tell(server, "--port", "1"), tell(server)
    assert first["prepared in"] == second["prepared in"] == server.pid
    assert first["group"] != second["group"]
    assert (first["arguments"], second["arguments"]) == (["--port", "1"], [])
    assert first["session"] == os.getsid(0)


def test_each_process_has_the_environment_that_it_would_have_if_it_were_started(
    start: Start, tell: Callable[..., dict[str, Any]]
) -> None:
    server = start(OF_THE_SERVER="1")
    assert tell(server, MINE="1")["environment"] == {
        "MINE": "1",
        "SET_BY_ENGINE": "1",
        "CHOSEN": "engine",
    }
    assert tell(server, CHOSEN="mine")["environment"] == {"SET_BY_ENGINE": "1", "CHOSEN": "mine"}


def test_a_process_imports_from_its_own_path_first(
    start: Start, tell: Callable[..., dict[str, Any]], folder: Path
) -> None:
    wanted = [str(folder / "a"), str(folder / "b")]
    server = start()
    assert tell(server, PYTHONPATH=os.pathsep.join(wanted))["path"][:2] == wanted
    again = tell(server, PYTHONPATH=str(folder))["path"]
    assert again.count(str(folder)) == 1


def test_a_process_gets_descriptors(start: Start, folder: Path) -> None:
    read, write = os.pipe()
    with (folder / "log").open("wb") as log, os.fdopen(read, "rb") as pipe:
        start().run("writes", {}, log.fileno(), ["text"], passed=[write])
        os.close(write)
        assert pipe.read() == b"text"


def test_an_engine_that_begins_threads_is_not_forked(start: Start, folder: Path) -> None:
    server = start(THREAD="1")
    with (
        (folder / "log").open("wb") as log,
        pytest.raises(RuntimeError, match="threads that the import has begun: 1"),
    ):
        server.run("tells", {}, log.fileno())


def test_the_server_ends_and_leaves_what_it_has_forked(start: Start, folder: Path) -> None:
    (folder / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    server = start()
    with (folder / "log").open("wb") as log:
        process = server.run("sleeps", {}, log.fileno())
    assert processes.group_pids(server.pid) == [server.pid]
    server.close()
    assert processes.group_pids(server.pid) == []
    assert process.poll() is None
    process.terminate()
    process.wait()
    assert processes.wait_until_gone(process.pid, 60) == []
