# SPDX-License-Identifier: Apache-2.0
"""Makes calls that may hang, for callers that must not hang.

A hung mount or drive blocks the thread that asks it, perhaps for ever, and no signal ends that.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

from flexkv.types.errors import DiskError

Result = TypeVar("Result")

ANSWER_SECONDS = 15.0
"""Seconds that a directory may take for its first answer. A drive or a server that is slower is of
no use."""

HANGS = "the drive, the network or the driver behind it hangs; see the kernel's log (dmesg)"

_LOOK_SECONDS = 1.0
"""Seconds between two questions whether the directory of a running call still answers. The first
is asked after as long."""


class HungError(DiskError):
    """A directory does not answer any more."""


def call_within(calls: Mapping[str, Callable[[], Result]], seconds: float) -> dict[str, Result]:
    """Make calls side by side, each in a thread of its own. Returns the results of those that ended
    within `seconds`, by name and in the order of `calls`.

    The first error of a call that ended in time is raised, whatever its type. Calls that do not end
    in time are left behind in their threads, which do not keep the process. Their errors are lost.
    """
    started = {name: _start(call) for name, call in calls.items()}
    done: set[Future[Result]] = set()
    try:
        done |= wait(started.values(), seconds).done
        ended = {name: started[name].result() for name in started if started[name] in done}
    finally:
        # A raised error would be in a cycle with this frame, and keep its callers' buffers.
        started.clear()
        done.clear()
    return ended


def _start(call: Callable[[], Result]) -> Future[Result]:
    ended: Future[Result] = Future()
    threading.Thread(target=_run, args=(call, ended), daemon=True).start()
    return ended


def _run(call: Callable[[], Result], ended: Future[Result]) -> None:
    try:
        ended.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
        ended.set_exception(error)
    del ended  # the error would be in a cycle with this frame


def call_beside(path: str, call: Callable[[], Result], seconds: float = ANSWER_SECONDS) -> Result:
    """Make a call that works in a directory, for as long as its file system answers.

    The call may take any time: the limit is for statvfs(2), which the server of a network file
    system and the daemon of a FUSE file system answer themselves. Ctrl-C ends the wait. The
    call runs in a thread of its own, which does not keep the process. Its error is raised, whatever
    its type, and HungError if the file system does not answer.
    """

    def ask() -> None:
        # An error is an answer, too.
        with contextlib.suppress(OSError):
            os.statvfs(path)

    ended = _start(call)
    while not wait([ended], _LOOK_SECONDS).done:
        if not call_within({path: ask}, seconds) and not ended.done():
            raise HungError(f"{path} has not answered for {seconds:g} s: {HANGS}")
    try:
        return ended.result()
    finally:
        del ended  # as in `call_within`
