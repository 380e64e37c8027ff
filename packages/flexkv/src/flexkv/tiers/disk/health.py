# SPDX-License-Identifier: Apache-2.0
"""When to leave a failing device alone."""

from __future__ import annotations

import time

FAILURES = 16
"""Jobs that failed in a row after which a device is left alone: more than run at once when it
breaks, so that one fault that hits all of them is not yet a broken device."""

PAUSE_SECONDS = 30.0
"""For how long. A device that is broken costs one burst of failures in this time."""


class Health:
    """Counts the jobs of one kind on one device that failed in a row."""

    __slots__ = ("_failures", "_until")

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    @property
    def good(self) -> bool:
        """False during a pause."""
        return self._until == 0.0 or time.monotonic() >= self._until

    def note(self, failed: bool) -> bool:
        """Count one job. True if it began a pause."""
        if not failed:
            self._failures = 0
            self._until = 0.0
            return False
        self._failures += 1
        if self._failures < FAILURES:
            return False
        self._failures = 0
        self._until = time.monotonic() + PAUSE_SECONDS
        return True
