# SPDX-License-Identifier: Apache-2.0
"""Circuit breakers, which disable a failing or slow device and try it again.

A circuit is closed while jobs succeed. Consecutive jobs that fail, or take longer than their
budget, open it. The device then gets no jobs for a pause. After the pause the circuit is probing:
one caller may try the device. A success closes the circuit; a failure opens it for another pause.
"""

from __future__ import annotations

import enum
import math
import time

FAILURES = 16
"""Consecutive failures that open a circuit. They are more than the jobs that run at once, so one
fault that hits all running jobs does not open the circuit. Not tuned."""

PAUSE_SECONDS = 30.0
"""Seconds that a circuit stays open, unless its owner gives another time. Not tuned."""


class CircuitState(enum.Enum):
    """Whether a device gets jobs."""

    CLOSED = "closed"
    """The device gets jobs."""
    PROBING = "probing"
    """One caller may try the device."""
    OPEN = "open"
    """The device gets no jobs."""
    CONNECTING = "connecting"
    """The device gets no jobs, because it was not reached since the start. Retried."""


_WORDS = {CircuitState.CLOSED.value: "ok", CircuitState.OPEN.value: "off"}


def word_of(state: str) -> str:
    """A circuit's state as commands show it. The field's words are easily misread: a closed circuit
    is well, and an open one lets nothing through."""
    return _WORDS.get(state, state)


class Circuit:
    """Counts the jobs of one kind on one device, such as the reads of a drive. A job counts once,
    however many blocks it moves. Single-threaded. `budget_seconds`: a job that runs longer counts
    as failed. `openings`: how often the circuit has opened; failed probes do not count."""

    def __init__(
        self, budget_seconds: float = math.inf, pause_seconds: float = PAUSE_SECONDS
    ) -> None:
        self.openings = 0
        self._budget_seconds = budget_seconds
        self._pause_seconds = pause_seconds
        self._failed = 0
        self._open_until = 0.0
        self._probes = 0

    @property
    def state(self) -> CircuitState:
        if self._open_until == 0.0:
            return CircuitState.CLOSED
        if self._probes or time.monotonic() >= self._open_until:
            return CircuitState.PROBING
        return CircuitState.OPEN

    @property
    def opens_again(self) -> float | None:
        """Seconds until a caller may try the device, 0 or less if one may now; None if the circuit
        is closed."""
        return None if self._open_until == 0.0 else self._open_until - time.monotonic()

    @property
    def allows(self) -> bool:
        """Whether the device may be given a job now."""
        if self._open_until == 0.0:
            return True
        return not self._probes and time.monotonic() >= self._open_until

    def begin(self, jobs: int = 1) -> None:
        """Note that the device was given `jobs` jobs. Each ends by `end` or `drop`."""
        if self._open_until != 0.0:
            self._probes += jobs

    def drop(self) -> None:
        """Note that a job was taken back, which says nothing about the device."""
        self._probes = max(0, self._probes - 1)

    def drop_all(self) -> None:
        """Note that the device has no job any more."""
        self._probes = 0

    def end(self, failed: bool, seconds: float = 0.0) -> bool:
        """Note that a job has ended, failed if the device has done no part of it. Returns whether
        this opened a closed circuit."""
        if not failed and seconds <= self._budget_seconds:
            self._failed = self._probes = 0
            self._open_until = 0.0
            return False
        if self._open_until != 0.0:
            if self._probes:
                self._probes = 0
                self._open_until = time.monotonic() + self._pause_seconds
            return False
        self._failed += 1
        if self._failed < FAILURES:
            return False
        self._failed = 0
        self._open_until = time.monotonic() + self._pause_seconds
        self.openings += 1
        return True
