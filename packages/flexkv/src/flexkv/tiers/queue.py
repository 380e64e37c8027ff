# SPDX-License-Identifier: Apache-2.0
"""The bounded queue in front of a link. Pure; its owner locks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from flexkv.tiers.job import Job, Priority


class LinkQueue:
    """Jobs in order of priority, then of arrival; every call is O(1) per job.

    Args:
        limit: bytes that may wait. What exceeds it is dropped from the lowest priority, last come
            first, but loads are never dropped: their number is bounded by the slots that they
            need.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[Priority, OrderedDict[Job, None]] = {p: OrderedDict() for p in Priority}
        self.size = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def waiting(self, priority: Priority) -> int:
        """Jobs of this priority."""
        return len(self._waiting[priority])

    def push(self, job: Job) -> list[Job]:
        """Take a job in; returns the jobs that are dropped for it, itself perhaps among them."""
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
        """Take the next job out; None if there is none.

        Args:
            writes: whether it may be one of priority WRITE.
        """
        for priority, jobs in self._waiting.items():
            if jobs and (writes or priority is not Priority.WRITE):
                job, _ = jobs.popitem(last=False)
                self.size -= job.size
                return job
        return None

    def remove(self, jobs: Iterable[Job]) -> list[Job]:
        """Take jobs out that are waiting; returns those that were."""
        removed = []
        for job in jobs:
            if job in self._waiting[job.priority]:
                del self._waiting[job.priority][job]
                self.size -= job.size
                removed.append(job)
        return removed

    def keep_only(self, priority: Priority | None) -> None:
        """Drop all jobs but those of `priority`."""
        for other, jobs in self._waiting.items():
            if other is not priority:
                self.size -= sum(job.size for job in jobs)
                jobs.clear()

    def raise_to(self, jobs: Iterable[Job], priority: Priority) -> None:
        """Give waiting jobs a higher priority; those that have it or a higher one keep theirs."""
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
