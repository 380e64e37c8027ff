# SPDX-License-Identifier: Apache-2.0
"""Calls that may hang, and callers that must not.

A mount or a drive that hangs blocks the thread that asks it, perhaps for ever, and no signal ends
that.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

from flexkv.errors import DiskError

Result = TypeVar("Result")

ANSWER_SECONDS = 15.0
"""How long a directory may take for its first answer. A drive or a server that is slower is of no
use. Not tuned."""

HANGS = "the drive, the network or the driver behind it hangs; see the kernel's log (dmesg)"

_LOOK_SECONDS = 1.0
"""A call that lasts longer has its directory asked whether it answers, and again as often."""


class HungError(DiskError):
    """A directory does not answer any more."""


def call_within(calls: Mapping[str, Callable[[], Result]], seconds: float) -> dict[str, Result]:
    """Make calls side by side, each in a thread of its own.

    Args:
        calls: by name. They raise nothing.
        seconds: that all of them together may take.

    Returns:
        The results of the calls that ended in time, by name. The other calls are left behind in
        their threads, which do not keep the process.
    """
    answers: queue.SimpleQueue[tuple[str, Result]] = queue.SimpleQueue()

    def run(name: str, call: Callable[[], Result]) -> None:
        answers.put((name, call()))

    for name, call in calls.items():
        threading.Thread(target=run, args=(name, call), daemon=True).start()
    ended: dict[str, Result] = {}
    deadline = time.monotonic() + seconds
    while len(ended) < len(calls):
        try:
            name, result = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        ended[name] = result
    return ended


def call_beside(path: str, call: Callable[[], Result], seconds: float = ANSWER_SECONDS) -> Result:
    """Make a call that works in a directory, for as long as its file system answers.

    The call may take any time: the limit is for statvfs(2), which the server of a network file
    system and the daemon of a FUSE file system answer themselves. Ctrl-C ends the wait.

    Args:
        path: of the directory.
        call: runs in a thread of its own, which does not keep the process.
        seconds: that statvfs(2) may take.

    Returns:
        What the call returns; what it raises is raised.

    Raises:
        HungError: the file system does not answer. The call is left behind in its thread.
    """
    ended: Future[Result] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
            ended.set_exception(error)

    def ask() -> None:
        # An error is an answer, too.
        with contextlib.suppress(OSError):
            os.statvfs(path)

    threading.Thread(target=run, daemon=True).start()
    while not wait([ended], _LOOK_SECONDS).done:
        if not call_within({path: ask}, seconds) and not ended.done():
            raise HungError(f"{path} has not answered for {seconds:g} s: {HANGS}")
    return ended.result()
