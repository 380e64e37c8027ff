# SPDX-License-Identifier: Apache-2.0
"""Tells a shared store of a reset, off the scheduler's path, until the store has taken it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.05
_LONGEST_RETRY_SECONDS = 5.0
"""Between two tries to renew the store's epoch; twice as long after each."""


class Renewal:
    """Renews the epoch of a store, and tries again until it is done.

    Args:
        name: of the thread.
        renew: does it; blocks, and raises if it cannot.
    """

    def __init__(self, name: str, renew: Callable[[], None]) -> None:
        self._name = f"{name}-renewal"
        self._renew = renew
        self._work = threading.Condition()
        self._wanted = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Renew it, once more if it is being renewed."""
        with self._work:
            self._wanted = True
            if self._thread is None:
                # A daemon: a thread that hangs must not keep the process from ending.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._work.notify()

    def begin_close(self) -> None:
        """What is wanted is tried at once, for the last time."""
        with self._work:
            self._closing = True
            self._work.notify()

    def close(self, timeout: float) -> bool:
        """Whether the thread has ended within so many seconds."""
        self.begin_close()
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        failures = 0
        while True:
            with self._work:
                if failures and not self._closing:
                    pause = min(_RETRY_SECONDS * 2.0**failures, _LONGEST_RETRY_SECONDS)
                    self._work.wait(pause)
                while not (self._wanted or self._closing):
                    self._work.wait()
                if not self._wanted:
                    return
                self._wanted, last = False, self._closing
            try:
                self._renew()
                failures = 0
            except Exception as error:  # noqa: BLE001
                # Whatever it is: later processes would find what a reset was to forget.
                self._wanted = not last
                failures += 1
                if failures == 1 or last:
                    logger.error(
                        "%s: a reset cannot be told to the store (%s), retried until it can; if "
                        "this process ends before, engines that start find blocks of before it",
                        self._name,
                        error,
                    )
