# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from flexkv.host.memory_lock import MemoryLock
from flexkv.types.errors import ArenaError

HOLDER = """
import sys
from flexkv.host.memory_lock import MemoryLock
lock = MemoryLock(int(sys.argv[1]), 3)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("locked")
    os.ftruncate(made, 1)
    yield made
    os.close(made)


def test_processes_share_a_byte_or_one_has_it_alone(fd: int) -> None:
    with closing(MemoryLock(fd, 3)) as one, closing(MemoryLock(fd, 3)) as other:
        assert one.is_locked(3)
        assert not one.is_locked(4)
        with pytest.raises(BlockingIOError):
            MemoryLock(fd, 3, alone=True)
        other.close()
        assert not one.is_locked(3), "its own lock is none of another"
        with closing(MemoryLock(fd, 0, alone=True)):
            assert one.is_locked(0)
            for alone in (False, True):
                with pytest.raises(BlockingIOError):
                    MemoryLock(fd, 0, alone=alone)
    before = len(os.listdir("/proc/self/fd"))
    with closing(MemoryLock(fd, 0, alone=True)), contextlib.suppress(BlockingIOError):
        MemoryLock(fd, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lock_ends_with_its_process(fd: int) -> None:
    """The test's own descriptor of the same open file does not end or keep the lock."""
    command = [sys.executable, "-c", HOLDER, str(fd)]
    pipe = subprocess.PIPE
    with (
        closing(MemoryLock(fd, 1)) as mine,
        subprocess.Popen(command, stdout=pipe, stdin=pipe, pass_fds=(fd,)) as holder,
    ):
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        holder.send_signal(signal.SIGSTOP)
        assert mine.is_locked(3)
        holder.kill()
        holder.wait()
        assert not mine.is_locked(3)


def test_no_descriptor_is_one_clear_error() -> None:
    with pytest.raises(ArenaError, match="cannot be opened again"):
        MemoryLock(1 << 20, 0)
