# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.harness import processes

SLEEPS = "import time; time.sleep(600)"
FIRST_THREAD_ENDS = f"""
import ctypes, platform, threading
def sleep():
    print("begun", flush=True)
    {SLEEPS}
threading.Thread(target=sleep).start()
exit_of_one_thread = {{"x86_64": 60, "aarch64": 93}}[platform.machine()]
ctypes.CDLL(None).syscall(exit_of_one_thread, 0)
"""


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Callable[[str], subprocess.Popen[bytes]]:
    def start(script: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", script]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
        request.addfinalizer(process.wait)
        request.addfinalizer(process.kill)
        return process

    return start


def test_a_process_lives_as_long_as_one_of_its_threads(
    started: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    process = started(FIRST_THREAD_ENDS)
    assert process.stdout is not None
    process.stdout.readline()
    deadline = time.monotonic() + 60
    while "Z (zombie)" not in Path(f"/proc/{process.pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert processes.group_pids(process.pid) == [process.pid]
    assert processes.kill_group(process.pid) == [process.pid]
    assert processes.group_pids(process.pid) == []


def test_a_process_that_nobody_has_waited_for_is_not_alive(
    started: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    process = started(SLEEPS)
    assert processes.group_pids(process.pid) == [process.pid]
    process.kill()
    assert processes.wait_until_gone(process.pid, 60) == []
    assert "Z (zombie)" in Path(f"/proc/{process.pid}/status").read_text()


def test_no_process_runs_on_when_the_first_is_killed(
    started: Callable[[str], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started(f"import os; os.fork(); os.fork(); print(flush=True); {SLEEPS}")
    assert process.stdout is not None
    for _ in range(4):
        process.stdout.readline()
    states_at_kills: list[set[str]] = []
    kill = os.kill

    def watched(pid: int, number: int) -> None:
        if number == signal.SIGKILL and not states_at_kills:
            deadline = time.monotonic() + 60
            while (states := _states(process.pid)) != {"T"} and time.monotonic() < deadline:
                time.sleep(0.01)
            states_at_kills.append(states)
        kill(pid, number)

    monkeypatch.setattr(os, "kill", watched)
    assert len(processes.kill_group(process.pid)) == 4
    assert states_at_kills == [{"T"}]


def _states(group: int) -> set[str]:
    """The states of a group's processes, as /proc has them; T is stopped."""
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in processes.group_pids(group)]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}
