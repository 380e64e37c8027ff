# SPDX-License-Identifier: Apache-2.0
"""Limits the number of threads that do something at once, first come, first served."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """A context manager like `threading.Semaphore`, but first come, first served.

    A semaphore wakes the thread that has waited longest. Until that thread runs, any other thread
    can take its place, even the thread that has just left, because it is awake already.

    Args:
        count: the most threads inside at once.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()

    @property
    def waiting(self) -> int:
        """The number of threads that wait."""
        return len(self._waiting)

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()  # until a thread that leaves releases it

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
