# SPDX-License-Identifier: Apache-2.0
"""Calls that may hang, and callers that must not.

A mount or a drive that hangs blocks the thread that asks it, perhaps for ever, and no signal ends
that.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Result = TypeVar("Result")


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
