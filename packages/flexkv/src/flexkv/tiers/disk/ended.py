# SPDX-License-Identifier: Apache-2.0
"""The ended jobs of a drive, whose results are taken by and by.

A drive may end more writes during one step of the engine than the step has time for.
"""

from __future__ import annotations

from collections import deque

from flexkv.tiers.job import Job, Priority
from flexkv.tiers.link import Link

_BLOCKS = 16
"""The least number of written blocks that one call returns, or one job if it has more. The engine's
step takes about 0.005 ms for the result of each."""

_BACKLOG_SHARE = 64
"""A call returns a 64th of the written blocks if that is more, which bounds the backlog. Not
tuned."""


class EndedJobs:
    """Single-threaded.

    Args:
        link: runs the jobs; borrowed.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._writes: deque[Job] = deque()
        self._blocks = 0

    def take(self, all_writes: bool) -> list[Job]:
        """Jobs that have ended: all reads, because requests wait for them, and the oldest writes.

        Args:
            all_writes: whether to return all writes. Else the next calls return the others.
        """
        taken: list[Job] = []
        for job in self._link.poll():
            if job.priority is Priority.WRITE:
                self._writes.append(job)
                self._blocks += job.blocks
            else:
                taken.append(job)
        most = self._blocks if all_writes else max(_BLOCKS, self._blocks // _BACKLOG_SHARE)
        while self._writes and most > 0:
            job = self._writes.popleft()
            self._blocks -= job.blocks
            most -= job.blocks
            taken.append(job)
        return taken
