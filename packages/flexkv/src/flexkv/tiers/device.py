# SPDX-License-Identifier: Apache-2.0
"""A device below host memory: it runs jobs, alike in every tier. A device that fails or is slow is
disabled and tried again, and the log says so."""

from __future__ import annotations

import logging
import re

from flexkv.tiers.base import Traffic
from flexkv.tiers.circuit import FAILURES, Circuit, CircuitState
from flexkv.tiers.job import Job, Outcome
from flexkv.tiers.link import Link

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""Seconds that a shutdown waits for running jobs: enough for 8 reads of 16 MiB at 25 MB/s. In the
first half, waiting writes still begin; in a longer time if the engine gives it. Not tuned."""

_KINDS = 16
"""Most kinds of errors of a device that are logged. A store makes up the texts."""

_NAMES = re.compile(r"[0-9a-f]{8,}|\d+\.\d+")
"""Names of blocks and times, in which errors of one kind differ."""


class BlockDevice:
    """A link, the circuits of its reads and writes, its traffic, and its errors in the log: the
    first of each kind, and the one that opens a circuit. Single-threaded; nothing waits. Owns the
    link, but does not close it.

    Args:
        name: its name in the log.
        link: a job that takes longer than its `stall_seconds` has failed.
        slot_bytes: bytes of a block.
        pause_seconds: for which a circuit stays open.
        check: what a user checks when a circuit opens.
        limits: the time limits, for the log; empty for that of the link.
    """

    def __init__(
        self,
        name: str,
        link: Link,
        slot_bytes: int,
        *,
        pause_seconds: float,
        check: str,
        limits: str = "",
    ) -> None:
        self.link = link
        self.reads = Circuit(link.stall_seconds, pause_seconds)
        self.writes = Circuit(link.stall_seconds, pause_seconds)
        self.traffic = Traffic()
        self._name = name
        self._slot_bytes = slot_bytes
        self._check = check
        self._pause_seconds = pause_seconds
        self._limits = limits or f"{link.stall_seconds:g} s"
        self._kinds: set[tuple[str, str]] = set()

    @property
    def can_read(self) -> bool:
        """Whether the circuit allows reads and the link is not stalled."""
        return self.reads.allows and not self.link.stalled

    @property
    def can_write(self) -> bool:
        return self.writes.allows and not self.link.stalled

    @property
    def openings(self) -> int:
        """How often its circuits have opened."""
        return self.reads.openings + self.writes.openings

    def shown(self, circuit: Circuit, *, stalled: bool = False) -> CircuitState:
        """The state of one of the circuits for people. A device that is stalled gets no jobs
        either."""
        return CircuitState.OPEN if stalled or self.link.stalled else circuit.state

    def begin(self, *jobs: Job) -> None:
        """Queue jobs, all reads or all writes; see `Link.submit`."""
        if jobs:
            self._circuit(jobs[0]).begin(len(jobs))
            self.link.submit(*jobs)

    def poll(self) -> list[Job]:
        """The jobs that have ended since the last call. Counts them, and those that hang."""
        for job in self.link.note_hung():
            self._note_job(job, failed=True)
        ended = self.link.poll()
        for job in ended:
            moved = job.outcomes.count(Outcome.DONE)
            if moved:
                self.traffic.add(moved * self._slot_bytes, job.seconds, job.writes)
            if Outcome.DROPPED in job.outcomes:
                self._circuit(job).drop()
            elif not job.hangs:  # a job that hung has failed already
                # A single bad place on a disk costs one block and says nothing about the others.
                self._note_job(job, failed=job.outcomes.count(Outcome.FAILED) == len(job.outcomes))
        return ended

    def drain(self) -> bool:
        """See `Link.drain`. If no job runs, the circuits have none either."""
        if not self.link.drain():
            return False
        self.reads.drop_all()
        self.writes.drop_all()
        return True

    def begin_close(self, flush_seconds: float) -> None:
        """See `LowerTier.begin_close`."""
        self.link.begin_close(max(flush_seconds, CLOSE_SECONDS / 2))

    def note(self, circuit: Circuit, what: str, failed: bool, error: str, seconds: float) -> None:
        """Note the end of a call of a kind, such as "reads from", to one of the circuits. The text
        of an error is empty for none."""
        self._log_kind(what, error)
        if circuit.end(failed, seconds):
            logger.error(
                "%d consecutive %s %s failed or took longer than %s, the last: %s; FlexKV makes "
                "none for %g s, then tries one; check %s",
                FAILURES,
                what,
                self._name,
                self._limits,
                error or f"no error, but {seconds:.3g} s",
                self._pause_seconds,
                self._check,
            )

    def _circuit(self, job: Job) -> Circuit:
        return self.writes if job.writes else self.reads

    def _note_job(self, job: Job, *, failed: bool) -> None:
        what = "writes to" if job.writes else "reads from"
        self.note(self._circuit(job), what, failed, job.error, job.seconds)

    def _log_kind(self, what: str, error: str) -> None:
        kind = what, _NAMES.sub("", error)
        if not error or kind in self._kinds or len(self._kinds) == _KINDS:
            return
        self._kinds.add(kind)
        logger.warning(
            "%s %s failed: %s; FlexKV skips these blocks and goes on (each error is logged once)",
            what,
            self._name,
            error,
        )


def close_seconds(flush_seconds: float) -> float:
    """The longest wait of a `LowerTier.close` for the jobs of its devices."""
    return CLOSE_SECONDS / 2 + max(flush_seconds, CLOSE_SECONDS / 2)
