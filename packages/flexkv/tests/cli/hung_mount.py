# SPDX-License-Identifier: Apache-2.0
"""A real mount that does not answer: a FUSE file system whose daemon never replies.

A command waits 15 s for such a mount. Under `hangs_at_once` it waits until only calls are left that
hang, however fast the machine is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Collection, Iterator
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import pytest

from flexkv.types import deadline

_MNT_DETACH = 2
_SLEEPS_IN = ("fuse", "request_wait_answer", "d_alloc_parallel")
"""Beginnings of the names of kernel functions: two for an answer of FUSE, one for another thread's
look at the same name."""


@contextlib.contextmanager
def hung(path: Path) -> Iterator[None]:
    """Hide the directory `path` behind a mount that hangs; skips the test where that is forbidden.

    In the end, calls that hang there fail with ENOTCONN, and the directory is back.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        daemon = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"FUSE is not there: {error}")
    options = f"fd={daemon},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"hung", os.fsencode(path), b"fuse", 0, options.encode()):
        os.close(daemon)
        pytest.skip(f"mounting is not allowed here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        # Also if this process is killed, the kernel ends the hang with the descriptor.
        os.close(daemon)
        libc.umount2(os.fsencode(path), _MNT_DETACH)


def hanging(pid: int) -> set[str]:
    """The threads of a process that sleep uninterruptibly in a call of a hung mount."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if (thread / "wchan").read_text(encoding="ascii").startswith(_SLEEPS_IN):
                found.add(thread.name)
    return found


@contextlib.contextmanager
def hangs_at_once() -> Iterator[None]:
    """Let `call_within` and `call_beside` end when all calls but those that hang have ended.

    A call hangs if it is seen in a mount twice in a row: a call that the mount's end wakes ends in
    between.
    """
    threads: dict[object, Thread] = {}

    def thread(target: Callable[..., None], args: tuple[object, object], daemon: bool) -> Thread:
        threads[args[1]] = Thread(target=target, args=args, daemon=daemon)
        return threads[args[1]]

    def wait(calls: Collection[Future[Any]], _: float) -> futures.DoneAndNotDoneFutures[Any]:
        seen: set[str] = set()
        while True:
            ended = futures.wait(calls, 0.05)
            now = hanging(os.getpid())
            if {str(threads[call].native_id) for call in ended.not_done} <= now & seen:
                return ended
            seen = now

    with (
        mock.patch.object(deadline, "wait", wait),
        mock.patch.object(deadline, "threading", mock.Mock(Thread=thread)),
    ):
        yield
