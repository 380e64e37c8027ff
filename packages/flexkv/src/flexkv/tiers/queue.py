# SPDX-License-Identifier: Apache-2.0
"""The bounded queue in front of a link. It has no lock; the link has."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable

from flexkv.tiers.job import Job, Outcome, Priority, Urgency


class LinkQueue:
    """Jobs in the order of priority, then of turn, then of arrival. Every call takes O(1) for each
    job, and O(1) for each turn that jobs wait with.

    Args:
        limit: how many bytes may wait. Beyond it, the queue drops jobs of the lowest priority
            and the last turn, the newest first. It never drops loads, because each needs a slot of
            the arena, which bounds them.

    Attributes:
        size: bytes of the jobs that wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # By priority and turn. No turn is without a job, so mostly there is one.
        self._waiting: dict[Priority, dict[int, OrderedDict[Job, None]]] = {p: {} for p in Priority}
        self.size = 0

    def __len__(self) -> int:
        return sum(map(self.waiting, Priority))

    def waiting(self, priority: Priority) -> int:
        """The number of jobs of this priority."""
        return sum(map(len, self._waiting[priority].values()))

    def push(self, job: Job) -> list[Job]:
        """Add a job. Returns the jobs that are dropped for it, perhaps the job itself."""
        self._add(job)
        self.size += job.size
        dropped = []
        while self.size > self._limit:
            turns = self._lowest()
            if turns is None:
                break
            dropped.append(self._take(turns, max(turns), last=True))
        return dropped

    def pop(self, writes: bool) -> Job | None:
        """Remove and return the next job; None if there is none.

        Args:
            writes: whether jobs of priority WRITE may be taken.
        """
        for priority, turns in self._waiting.items():
            if turns and (writes or priority is not Priority.WRITE):
                return self._take(turns, min(turns), last=False)
        return None

    def remove(self, jobs: Iterable[Job]) -> list[Job]:
        """Remove those of `jobs` that wait, and return them."""
        removed = []
        for job in jobs:
            if self._discard(job):
                self.size -= job.size
                removed.append(job)
        return removed

    def keep_only(self, priority: Priority | None) -> None:
        """Discard all jobs except those of `priority`; all of them if it is None. A discarded job
        is DROPPED, and keeps no buffer."""
        for other, turns in self._waiting.items():
            if other is not priority:
                for job in itertools.chain(*turns.values()):
                    self.size -= job.size
                    job.end_as(Outcome.DROPPED)
                turns.clear()

    def raise_to(self, jobs: Iterable[Job], urgency: Urgency) -> None:
        """Raise those of `jobs` that wait with a lower urgency to `urgency`."""
        for job in jobs:
            if urgency < (job.priority, job.turn) and self._discard(job):
                job.priority, job.turn = urgency
                self._add(job)

    def _add(self, job: Job) -> None:
        self._waiting[job.priority].setdefault(job.turn, OrderedDict())[job] = None

    def _discard(self, job: Job) -> bool:
        """Remove a job. Returns whether it waited."""
        turns = self._waiting[job.priority]
        jobs = turns.get(job.turn)
        if jobs is None or job not in jobs:
            return False
        del jobs[job]
        if not jobs:
            del turns[job.turn]
        return True

    def _take(self, turns: dict[int, OrderedDict[Job, None]], turn: int, *, last: bool) -> Job:
        """Remove and return the newest job of a turn, or the oldest."""
        jobs = turns[turn]
        job, _ = jobs.popitem(last=last)
        self.size -= job.size
        if not jobs:
            del turns[turn]
        return job

    def _lowest(self) -> dict[int, OrderedDict[Job, None]] | None:
        for priority in reversed(Priority):
            if priority is not Priority.LOAD and self._waiting[priority]:
                return self._waiting[priority]
        return None
