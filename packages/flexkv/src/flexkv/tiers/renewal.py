# SPDX-License-Identifier: Apache-2.0
"""Writes a reset to a shared store, by a thread of its own, until the store has accepted it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flexkv.tiers.retries import pause_after

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.05
_LONGEST_RETRY_SECONDS = 5.0
"""The shortest and the longest pause between two tries to renew the store's epoch; see
`pause_after`. Not tuned."""


class Renewal:
    """Renews the epoch of a store, and retries until that succeeds.

    Args:
        name: prefix of the thread's name.
        renew: renews the epoch; blocks, and raises if it fails.
    """

    def __init__(self, name: str, renew: Callable[[], None]) -> None:
        self._name = f"{name}-renewal"
        self._renew = renew
        self._work = threading.Condition()
        self._wanted = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Renew the epoch; if it is being renewed, renew it once more. Does not wait."""
        with self._work:
            self._wanted = True
            if self._thread is None:
                # A daemon: a thread that hangs must not keep the process from ending.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._work.notify()

    def begin_close(self) -> None:
        """Try a renewal that is due at once, for the last time. Does not wait."""
        with self._work:
            self._closing = True
            self._work.notify()

    def close(self, timeout: float) -> bool:
        """Wait for the thread.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Whether the thread has ended.
        """
        self.begin_close()
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        failures = 0
        while True:
            with self._work:
                if failures and not self._closing:
                    self._work.wait(pause_after(failures, _RETRY_SECONDS, _LONGEST_RETRY_SECONDS))
                while not (self._wanted or self._closing):
                    self._work.wait()
                if not self._wanted:
                    return
                self._wanted, last = False, self._closing
            try:
                self._renew()
                failures = 0
            except Exception as error:  # noqa: BLE001
                # Without a retry, later processes would find blocks from before the reset.
                self._wanted = not last
                failures += 1
                if failures == 1 or last:
                    logger.error(
                        "%s: a reset cannot be told to the store (%s), retried until it can; if "
                        "this process ends before, engines that start find blocks of before it",
                        self._name,
                        error,
                    )
