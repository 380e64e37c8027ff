# SPDX-License-Identifier: Apache-2.0
"""Lets so many threads at once do something, in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """As `threading.Semaphore`, a context manager, but first come, first served.

    A semaphore wakes the thread that has waited longest. Until that thread runs, any other thread
    can take its place, also the one that has just left: it does not have to wake up first.

    Args:
        count: how many threads may be inside at once.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()

    @property
    def waiting(self) -> int:
        """How many threads wait."""
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
