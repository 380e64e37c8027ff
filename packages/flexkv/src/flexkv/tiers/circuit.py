# SPDX-License-Identifier: Apache-2.0
"""When to leave a failing or slow device alone, and when to try it again: the same for every tier.

A circuit is closed while jobs succeed. Jobs in a row that fail, or take longer than their budget,
open it: then nothing is given to the device for a pause. After the pause it is probing: one caller
may try. A success closes the circuit, a failure opens it for another pause.
"""

from __future__ import annotations

import enum
import math
import time
from collections import Counter
from collections.abc import Iterable

FAILURES = 16
"""Jobs that failed in a row after which a circuit opens: more than run at once when a device
breaks, so that one fault that hits all of them is not yet a broken device."""

PAUSE_SECONDS = 30.0
"""How long a circuit stays open, unless its owner says otherwise."""


class CircuitState(enum.Enum):
    """Whether a device is given jobs."""

    CLOSED = "closed"
    """Yes."""
    PROBING = "probing"
    """One caller may try it."""
    OPEN = "open"
    """No."""


def count_states(circuits: Iterable[Circuit]) -> Counter[CircuitState]:
    """How many of `circuits` are in each state now."""
    return Counter(circuit.state for circuit in circuits)


class Circuit:
    """Counts the jobs of one kind on one device: reads of a drive, or questions to a store. A job
    counts once, however many blocks it moved. Single-threaded.

    Args:
        budget_seconds: a job that runs longer counts as failed.
        pause_seconds: for which it stays open.

    Attributes:
        openings: times that the circuit opened, failed probes left aside.
    """

    __slots__ = (
        "_budget_seconds",
        "_failed",
        "_open_until",
        "_pause_seconds",
        "_probes",
        "openings",
    )

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
        """Seconds until a caller may try, 0 or less if one may; None if it is closed."""
        return None if self._open_until == 0.0 else self._open_until - time.monotonic()

    @property
    def allows(self) -> bool:
        """Whether a job may be given to the device now."""
        if self._open_until == 0.0:
            return True
        return not self._probes and time.monotonic() >= self._open_until

    def begin(self, jobs: int = 1) -> None:
        """So many jobs were given to the device at once. Each ends by `end` or `drop`."""
        if self._open_until != 0.0:
            self._probes += jobs

    def drop(self) -> None:
        """A job was taken back: it says nothing of the device."""
        self._probes = max(0, self._probes - 1)

    def end(self, failed: bool, seconds: float = 0.0) -> bool:
        """A job has ended.

        Args:
            failed: whether the device got nothing of it done.
            seconds: how long it ran.

        Returns:
            Whether that opened the circuit, which was closed.
        """
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
