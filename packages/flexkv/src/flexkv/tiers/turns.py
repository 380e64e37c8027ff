# SPDX-License-Identifier: Apache-2.0
"""Limits the number of threads that do something at once, first come, first served."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from types import TracebackType


class Turns:
    """A context manager like `threading.Semaphore`, but first come, first served.

    A semaphore wakes the thread that has waited longest. Until that thread runs, any other thread
    can take its place, even the thread that has just left, because it is awake already.

    Args:
        count: the most threads inside at once, not counting those that hang.
        hang_seconds: a thread that stays longer hangs, and the next one may come.
    """

    def __init__(self, count: int, hang_seconds: float) -> None:
        self._free = count
        self._hang_seconds = hang_seconds
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._inside: dict[int, float] = {}  # by thread, when it hangs

    @property
    def waiting(self) -> int:
        """The number of threads that wait."""
        return len(self._waiting)

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                self._come()
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        # Until a thread that leaves releases it, or a thread that waits finds that one hangs.
        while not turn.acquire(timeout=self._until_hang()):
            self._pass_by_hung()
        with self._lock:
            self._come()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._inside.pop(threading.get_ident(), None) is not None:
                self._pass_on()

    def _come(self) -> None:
        self._inside[threading.get_ident()] = time.monotonic() + self._hang_seconds

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._free += 1

    def _until_hang(self) -> float:
        """Seconds until the first thread hangs; a thread that is about to come hangs later."""
        with self._lock:
            first = min(self._inside.values(), default=math.inf)
        return max(0.0, min(first - time.monotonic(), self._hang_seconds))

    def _pass_by_hung(self) -> None:
        with self._lock:
            now = time.monotonic()
            for thread in [thread for thread, hangs in self._inside.items() if hangs <= now]:
                del self._inside[thread]
                self._pass_on()
