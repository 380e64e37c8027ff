# SPDX-License-Identifier: Apache-2.0
"""The health of devices: circuit breakers disable a failing or slow device and try it again, and
the log says so, alike in every tier.

A circuit is closed while jobs succeed. Consecutive jobs that fail, or take longer than their
budget, open it. The device then gets no jobs for a pause. After the pause the circuit is probing:
one caller may try the device. A success closes the circuit; a failure opens it for another pause.
"""

from __future__ import annotations

import enum
import logging
import math
import re
import time

from flexkv.tiers.job import Job, Outcome, Priority

logger = logging.getLogger(__name__)

FAILURES = 16
"""Consecutive failures that open a circuit. They are more than the jobs that run at once, so one
fault that hits all running jobs does not open the circuit. Not tuned."""

PAUSE_SECONDS = 30.0
"""Seconds that a circuit stays open, unless its owner gives another time. Not tuned."""

_KINDS = 16
"""Most kinds of errors of a device that are logged. A store makes up the texts."""

_NAMES = re.compile(r"[0-9a-f]{8,}|\d+\.\d+")
"""Names of blocks and times, in which errors of one kind differ."""


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
    however many blocks it moves. Single-threaded.

    Args:
        budget_seconds: a job that runs longer counts as failed.

    Attributes:
        openings: how often the circuit has opened; failed probes do not count.
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

    def shown(self, stalled: bool) -> CircuitState:
        """The state for people. A device whose link is stalled gets no jobs either."""
        return CircuitState.OPEN if stalled else self.state

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


class Health:
    """The circuits of a device's reads and writes, and its errors in the log: the first of each
    kind, and the one that opens a circuit. Single-threaded.

    Args:
        device: its name in the log.
        limits: the time limits, for the log.
        check: what a user checks when a circuit opens.
    """

    def __init__(
        self, device: str, budget_seconds: float, pause_seconds: float, limits: str, check: str
    ) -> None:
        self.reads = Circuit(budget_seconds, pause_seconds)
        self.writes = Circuit(budget_seconds, pause_seconds)
        self._device = device
        self._pause_seconds = pause_seconds
        self._limits = limits
        self._check = check
        self._kinds: set[tuple[str, str]] = set()

    @property
    def openings(self) -> int:
        return self.reads.openings + self.writes.openings

    def drop_all(self) -> None:
        """See `Circuit.drop_all`."""
        self.reads.drop_all()
        self.writes.drop_all()

    def note_end(self, job: Job) -> bool:
        """Note that a read or write has ended, failed if none of its blocks succeeded: a single bad
        place on a disk costs one block and says nothing about the others. Returns whether this
        opened a closed circuit."""
        if Outcome.DROPPED in job.outcomes:
            (self.writes if job.priority is Priority.WRITE else self.reads).drop()
        elif not job.hangs:  # a job that hung has failed already
            return self.note_job(job, job.outcomes.count(Outcome.FAILED) == len(job.outcomes))
        return False

    def note_job(self, job: Job, failed: bool) -> bool:
        """As `note_end`, for a job that has failed or not, and that may still run."""
        writes = job.priority is Priority.WRITE
        device, what = (self.writes, "writes to") if writes else (self.reads, "reads from")
        return self.note(device, what, failed, job.error, job.seconds)

    def note(self, device: Circuit, what: str, failed: bool, error: str, seconds: float) -> bool:
        """Note the end of a call of a kind, such as "reads from", to one of the circuits. The text
        of an error is empty for none. Returns what `Circuit.end` does."""
        self._log_kind(what, error)
        opened = device.end(failed, seconds)
        if opened:
            logger.error(
                "%d consecutive %s %s failed or took longer than %s, the last: %s; FlexKV makes "
                "none for %g s, then tries one; check %s",
                FAILURES,
                what,
                self._device,
                self._limits,
                error or f"no error, but {seconds:.3g} s",
                self._pause_seconds,
                self._check,
            )
        return opened

    def _log_kind(self, what: str, error: str) -> None:
        kind = what, _NAMES.sub("", error)
        if not error or kind in self._kinds or len(self._kinds) == _KINDS:
            return
        self._kinds.add(kind)
        logger.warning(
            "%s %s failed: %s; FlexKV skips these blocks and goes on (each error is logged once)",
            what,
            self._device,
            error,
        )
