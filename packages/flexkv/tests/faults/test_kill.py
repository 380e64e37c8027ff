# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any moment: what the next process finds is right, and nearly all of it is there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import disk_blocks
import pytest
from disk_blocks import names, opened
from faults.victim import BATCH, KEYS

from flexkv.tiers.job import Outcome

SLOTS = 200
KILLS = 100  # in each test


class Victims:
    """The processes of `victim.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self, seed: int, wait: bool) -> int:
        """Start one; returns its id, at once or when its tier is open."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        number = int(self._line())
        if wait:
            assert self._line() == "working"
        return number

    def kill(self, number: int) -> None:
        """Kill it, and wait until it is gone."""
        os.kill(number, signal.SIGKILL)
        while self._line() != "gone":
            pass

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the victims ended by themselves"
        return line.strip()


@contextmanager
def victims(root: Path) -> Iterator[Victims]:
    command = [sys.executable, str(Path(__file__).with_name("victim.py")), str(root), str(SLOTS)]
    tests = Path(disk_blocks.__file__).parent
    paths = [str(tests), str(tests.parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True
    )
    with process:
        try:
            yield Victims(process)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # it may wait for a victim that lives
            raise
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 0


@pytest.mark.parametrize("moment", ["at work", "at start"])
def test_nothing_wrong_is_read_after_a_kill(
    tmp_path: Path, faults: Callable[[int], None], moment: str
) -> None:
    chance = random.Random(moment)
    outcomes: Counter[Outcome] = Counter()
    with victims(tmp_path) as pool:
        for kill in range(KILLS):
            number = pool.begin(kill, wait=moment == "at work")
            time.sleep(chance.uniform(0, 0.02))
            pool.kill(number)
            with opened(tmp_path, slots=SLOTS) as client:
                found = client.found(names(KEYS))
                after = Counter(client.read(found))
                if not found:  # no victim has come to its first write: give the next one some
                    client.write(names(BATCH))
            # Torn is at most what was being written.
            assert after[Outcome.DAMAGED] <= BATCH
            assert after.total() == after[Outcome.DONE] + after[Outcome.DAMAGED]
            outcomes += after
    assert outcomes[Outcome.DONE] > KILLS
    faults(KILLS)
