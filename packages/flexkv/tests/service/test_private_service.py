# SPDX-License-Identifier: Apache-2.0
"""Services that end with the process that has started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv.service.pool_sizes import PoolSize
from flexkv.service.private_service import PrivateService, start_private
from flexkv.service.state import is_service, state_of
from flexkv.settings import CacheConfig
from flexkv.types.errors import ArenaError
from packages.flexkv.tests.service.served import FORMAT, Scheduler, Service, keys_of, until

SIZES = {"toy": PoolSize(32 * FORMAT.slot_bytes / (1 << 30))}

STARTER = """
import os, sys
from packages.flexkv.tests.service.test_private_service import SIZES, start
service = start(sys.argv[1])
if sys.argv[2] == "forks" and os.fork() == 0:
    os.close(1)
    import time; time.sleep(600)
print("started", flush=True)
sys.stdin.read()
"""


def start(root: str) -> PrivateService | None:
    return start_private(root, CacheConfig(runtime_dir=f"{root}.run"), SIZES)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    root = str(tmp_path / "private")
    yield root
    for entry in Path("/proc").iterdir():  # no failed test leaves a service behind
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and root.encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


@pytest.fixture
def starter(root: str, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, root, getattr(request, "param", "")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its child, too
    process.wait()


def test_one_process_starts_it_and_the_others_find_it(root: str) -> None:
    made: list[PrivateService | None] = []
    threads = [threading.Thread(target=lambda: made.append(start(root))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (service,) = (each for each in made if each is not None)
    assert len(made) == 4
    engine = Scheduler(root)
    engine.store(keys_of("a", 3))
    assert engine.load(keys_of("a", 3))
    (pool,) = state_of(root).pools
    assert (pool.model, pool.slots) == ("toy", 32)
    service.close()
    service.close()
    assert not os.path.exists(root)
    assert engine.load(keys_of("a", 3)), "host hits go on"
    engine.close()


def test_it_starts_again_in_the_same_place(root: str) -> None:
    for _ in range(2):
        service = start(root)
        assert service is not None
        assert is_service(root)
        service.close()


@pytest.mark.parametrize("starter", ["", "forks"], indirect=True)
def test_it_ends_when_its_starter_is_killed(root: str, starter: subprocess.Popen[str]) -> None:
    assert is_service(root)
    starter.kill()
    starter.wait()
    until(lambda: not os.path.exists(root))


def test_a_service_that_is_killed_starts_again(root: str) -> None:
    service = start(root)
    assert service is not None
    engine = Scheduler(root)
    engine.store(keys_of("a", 3))
    (number,) = (each for each in children() if "private_service" in each[1])
    os.kill(number[0], signal.SIGKILL)
    until(lambda: engine.store(keys_of("b", 2)) and engine.cache.lookup(keys_of("b", 2)) == 2)
    other = Scheduler(root)
    assert other.load(keys_of("a", 3))
    other.close()
    engine.close()
    service.close()
    assert not os.path.exists(root)


def children() -> list[tuple[int, str]]:
    """Processes that this one has started, with their command lines."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for number in map(int, (task / "children").read_text().split()):
            line = Path(f"/proc/{number}/cmdline").read_text(errors="replace")
            found.append((number, line))
    return found


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    service = Service(tmp_path)
    os.rename(tmp_path / "service", tmp_path / "private")  # its socket answers there, too
    assert start(str(tmp_path / "private")) is None
    service.close()
    with pytest.raises(ArenaError, match=r"runtime_dir .* cannot be used"):
        start("/proc/none")


def test_settings_that_the_service_refuses_are_named(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flexkv.service.private_service._written", lambda _: {"pin_seconds": "ever"}
    )
    with pytest.raises(ArenaError, match=r"own service did not start: 'ever'.*pin_seconds"):
        start(root)
