# SPDX-License-Identifier: Apache-2.0
"""The bounded queue in front of a link. It has no lock; the link has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from flexkv.tiers.job import Job, Outcome, Priority


class LinkQueue:
    """Jobs in the order of priority, then of arrival. Every call takes O(1) for each job.

    Args:
        limit: how many bytes may wait. Beyond it, the queue drops jobs of the lowest priority, the
            newest first. It never drops loads, because each needs a slot of the arena, which
            bounds them.

    Attributes:
        size: bytes of the jobs that wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[Priority, OrderedDict[Job, None]] = {p: OrderedDict() for p in Priority}
        self.size = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def waiting(self, priority: Priority) -> int:
        """The number of jobs of this priority."""
        return len(self._waiting[priority])

    def push(self, job: Job) -> list[Job]:
        """Add a job. Returns the jobs that are dropped for it, perhaps the job itself."""
        self._waiting[job.priority][job] = None
        self.size += job.size
        dropped = []
        while self.size > self._limit:
            victims = self._lowest()
            if victims is None:
                break
            victim, _ = victims.popitem(last=True)
            self.size -= victim.size
            dropped.append(victim)
        return dropped

    def pop(self, writes: bool) -> Job | None:
        """Remove and return the next job; None if there is none.

        Args:
            writes: whether jobs of priority WRITE may be taken.
        """
        for priority, jobs in self._waiting.items():
            if jobs and (writes or priority is not Priority.WRITE):
                job, _ = jobs.popitem(last=False)
                self.size -= job.size
                return job
        return None

    def remove(self, jobs: Iterable[Job]) -> list[Job]:
        """Remove those of `jobs` that wait, and return them."""
        removed = []
        for job in jobs:
            if job in self._waiting[job.priority]:
                del self._waiting[job.priority][job]
                self.size -= job.size
                removed.append(job)
        return removed

    def keep_only(self, priority: Priority | None) -> None:
        """Discard all jobs except those of `priority`; all of them if it is None. A discarded job
        is DROPPED, and keeps no buffer."""
        for other, jobs in self._waiting.items():
            if other is not priority:
                for job in jobs:
                    self.size -= job.size
                    job.end_as(Outcome.DROPPED)
                jobs.clear()

    def raise_to(self, jobs: Iterable[Job], priority: Priority) -> None:
        """Raise those of `jobs` that wait with a lower priority to `priority`."""
        for job in jobs:
            if priority < job.priority and job in self._waiting[job.priority]:
                del self._waiting[job.priority][job]
                job.priority = priority
                self._waiting[priority][job] = None

    def _lowest(self) -> OrderedDict[Job, None] | None:
        for priority in reversed(Priority):
            if priority is not Priority.LOAD and self._waiting[priority]:
                return self._waiting[priority]
        return None
