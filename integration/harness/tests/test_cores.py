# SPDX-License-Identifier: Apache-2.0
"""Processes that stay on some cores."""

from __future__ import annotations

import os
import subprocess
import sys

from integration.harness.cores import keep_on

_PROGRAM = """
import sys, threading
end = threading.Event()
def begin():
    threading.Thread(target=end.wait).start()
    print("begun", flush=True)
for _ in range(3):
    begin()
sys.stdin.readline()
begin()
sys.stdin.read()
end.set()
"""


def cores_of(pid: int) -> list[set[int]]:
    """Of each thread."""
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]


def test_all_threads_of_a_process_stay_on_its_cores() -> None:
    cores = os.sched_getaffinity(0)
    one = {min(cores)}
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        keep_on([process.pid], one)
        assert cores_of(process.pid) == [one] * 4
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        assert cores_of(process.pid) == [one] * 5
        keep_on([process.pid], cores)
        assert cores_of(process.pid) == [cores] * 5
        process.stdin.close()


def test_a_process_that_has_ended_stays_nowhere() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    keep_on([process.pid], os.sched_getaffinity(0))
