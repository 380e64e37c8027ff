# SPDX-License-Identifier: Apache-2.0
"""Movers of several processes over one shared memory, forks, and the end of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flexkv_kernels import CpuMover, Direction, Status
from flexkv_kernels._library import LIBRARY
from kernels.tests.worlds import Memory, World, endless_world, in_order

ROOT = Path(__file__).resolve().parents[2]
PAGE, BLOCKS, PLANES = 5000, 32, 3
BLOCK_BYTES = PAGE * PLANES
FLAG_OFFSET = BLOCK_BYTES * BLOCKS + (-BLOCK_BYTES * BLOCKS) % 4

READER = """
import sys, time
from kernels.tests.worlds import Memory
from kernels.tests.test_processes import BLOCK_BYTES, BLOCKS, FLAG_OFFSET, world_over
from flexkv_kernels import Direction, Status

arena = Memory(FLAG_OFFSET + 4, fd=int(sys.argv[1]))
world = world_over(arena, seed=99)
mover = world.mover(threads=2)
print("ready", flush=True)
while arena[FLAG_OFFSET:] == bytes(4):
    time.sleep(0.001)
offsets = range(0, BLOCKS * BLOCK_BYTES, BLOCK_BYTES)
ticket = mover.submit(Direction.LOAD, range(BLOCKS), offsets)
assert mover.wait(ticket, 60) is Status.DONE
sys.stdout.flush()
sys.stdout.buffer.write(world.pages[:])
"""

EXITS_WHILE_COPYING = """
from kernels.tests.worlds import ENDLESS, endless_world
from flexkv_kernels import Direction

world = endless_world()
mover = world.mover(threads=2)
mover.submit(Direction.STORE, [0] * ENDLESS, [0] * ENDLESS)
print("leaving")
"""


def world_over(arena: Memory, seed: int) -> World:
    planes = in_order((i * PAGE * BLOCKS, PAGE, PAGE) for i in range(PLANES))
    return World(planes, BLOCKS, Memory(PAGE * BLOCKS * PLANES, seed=seed), arena)


def start(script: str, *args: str, fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        stdout=subprocess.PIPE,
        pass_fds=fds,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is a Linux facility")
def test_one_process_stores_and_two_others_load() -> None:
    fd = os.memfd_create("flexkv-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, FLAG_OFFSET + 4)
    arena = Memory(FLAG_OFFSET + 4, fd=fd)
    world = world_over(arena, seed=5)
    mover = world.mover(threads=2)
    readers = [start(READER, str(fd), fds=(fd,)) for _ in range(2)]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"ready\n"
        offsets = range(0, BLOCKS * BLOCK_BYTES, BLOCK_BYTES)
        ticket = mover.submit(
            Direction.STORE, range(BLOCKS), offsets, flag_address=arena.address + FLAG_OFFSET
        )
        assert mover.wait(ticket, 60) is Status.DONE
        for reader in readers:
            out, _ = reader.communicate(timeout=60)
            assert out == world.pages[:]
            assert reader.returncode == 0
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
        mover.close()
        os.close(fd)


def test_a_process_may_end_while_it_copies() -> None:
    process = start(EXITS_WHILE_COPYING)
    out, _ = process.communicate(timeout=60)
    assert out == b"leaving\n"
    assert process.returncode == 0


def test_in_a_fork_the_mover_is_closed() -> None:
    # pytest's own process may have become too large to be forked.
    process = start("from kernels.tests.test_processes import fork; fork()")
    process.communicate(timeout=60)
    assert process.returncode == 0


def fork() -> None:
    """Use a mover in a forked process, and then in this one."""
    world = endless_world()
    mover = world.mover(threads=2)
    ticket = mover.submit(Direction.STORE, [0], [0])
    assert mover.wait(ticket, 60) is Status.DONE
    child = os.fork()
    if child == 0:
        os._exit(_use_forked(mover, ticket))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mover.wait(mover.submit(Direction.STORE, [0], [0]), 60) is Status.DONE
    mover.close()


def _use_forked(mover: CpuMover, ticket: int) -> int:
    """The number of things in a forked child that did not go as documented."""
    wrong = 0
    calls: list[Callable[[], int]] = [
        lambda: mover.submit(Direction.STORE, [0], [0]),
        lambda: mover.poll(ticket),
        lambda: mover.wait(ticket, 60),
    ]
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            wrong += "fork" not in str(error)
        else:
            wrong += 1
    mover.close()
    LIBRARY.waiting.fkv_mover_destroy(mover._handle)
    return wrong
