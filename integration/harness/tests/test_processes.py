# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

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
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
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
    assert processes.session_pids(process.pid) == [process.pid]
    assert processes.kill_session(process.pid) == [process.pid]
    assert processes.session_pids(process.pid) == []


def test_a_process_that_nobody_has_waited_for_is_not_alive(
    started: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    process = started(SLEEPS)
    assert processes.session_pids(process.pid) == [process.pid]
    process.kill()
    assert processes.wait_until_gone(process.pid, 60) == []
    assert "Z (zombie)" in Path(f"/proc/{process.pid}/status").read_text()
