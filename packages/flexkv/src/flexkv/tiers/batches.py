# SPDX-License-Identifier: Apache-2.0
"""The batches of a tier: the jobs that read and write their blocks, and the results."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from flexkv.tiers.base import BlockResult
from flexkv.tiers.job import Job, Outcome, Urgency
from flexkv.tiers.link import Link


class Batches:
    """The reads and writes of a tier that have not ended, and the results that nobody has taken.
    Single-threaded; nothing waits.

    Attributes:
        queued_blocks: see `TierFigures`.
    """

    def __init__(self) -> None:
        self.queued_blocks = 0
        self._tickets = itertools.count(1)
        self._jobs: dict[int, dict[Job, Link]] = {}
        self._places: dict[Job, tuple[int, Sequence[int]]] = {}
        self._results: list[BlockResult] = []

    def new_ticket(self) -> int:
        return next(self._tickets)

    def add(self, ticket: int, link: Link, job: Job, positions: Sequence[int]) -> None:
        """A job of `link` reads or writes the blocks at these positions of a batch."""
        self._jobs.setdefault(ticket, {})[job] = link
        self._places[job] = ticket, positions
        self.queued_blocks += len(positions)

    def end(self, job: Job) -> tuple[int, Sequence[int]]:
        """Forget a job that has ended. Returns its batch's ticket and the positions of its blocks,
        in the order of its outcomes."""
        ticket, positions = self._places.pop(job)
        del self._jobs[ticket][job]
        if not self._jobs[ticket]:
            del self._jobs[ticket]
        self.queued_blocks -= len(positions)
        return ticket, positions

    def report(self, ticket: int, positions: Iterable[int], outcomes: Iterable[Outcome]) -> None:
        """Add results, which `take_results` returns."""
        self._results += map(BlockResult, itertools.repeat(ticket), positions, outcomes)

    def take_results(self) -> list[BlockResult]:
        results, self._results = self._results, []
        return results

    def cancel(self, ticket: int) -> None:
        """See `LowerTier.cancel`."""
        for link, jobs in self._by_link(ticket).items():
            link.cancel(jobs)

    def raise_priority(self, ticket: int, urgency: Urgency) -> None:
        """See `LowerTier.raise_priority`."""
        for link, jobs in self._by_link(ticket).items():
            link.raise_priority(jobs, urgency)

    def hung(self, ticket: int) -> Collection[int]:
        """See `LowerTier.hung`."""
        hung = [job for job in self._jobs.get(ticket, ()) if job.hangs]
        return {position for job in hung for position in self._places[job][1]}

    def jobs(self) -> Collection[Job]:
        """Those without a result."""
        return self._places.keys()

    def clear(self) -> None:
        """Forget all."""
        for known in (self._jobs, self._places, self._results):
            known.clear()
        self.queued_blocks = 0

    def _by_link(self, ticket: int) -> dict[Link, list[Job]]:
        jobs: dict[Link, list[Job]] = {}
        for job, link in self._jobs.get(ticket, {}).items():
            jobs.setdefault(link, []).append(job)
        return jobs
