# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from integration.demo.load import Look, look, others_share

SECONDS = 0.5
BUSY = f"import time\nwhile time.process_time() < {SECONDS}: pass\nprint(flush=True)\ninput()"


@pytest.fixture
def idle() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def work() -> None:
    end = time.process_time() + SECONDS
    while time.process_time() < end:
        pass


def test_the_work_of_others_counts(idle: subprocess.Popen[bytes]) -> None:
    before = look(idle.pid)
    work()
    after = look(idle.pid)
    assert after.own - before.own < SECONDS / 2
    assert after.busy - before.busy > SECONDS / 2
    assert others_share(before, after) > 0


def test_the_work_of_descendants_is_ones_own() -> None:
    before = look()
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        after = look()
        process.kill()
    assert after.own - before.own > SECONDS / 2
    ended = look()
    assert ended.own > before.own


def test_a_share_is_one_of_the_cores_that_may_be_used() -> None:
    cores = len(os.sched_getaffinity(0))
    assert others_share(Look(0, 0, 0), Look(2, cores, 0)) == 0.5
    assert others_share(Look(0, 0, 0), Look(2, cores, cores)) == 0
    assert others_share(Look(0, 0, 0), Look(1, 9 * cores, 0)) == 1
    assert others_share(Look(1, 5, 0), Look(1, 5, 1)) == 0
