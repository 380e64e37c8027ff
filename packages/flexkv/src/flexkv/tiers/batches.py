# SPDX-License-Identifier: Apache-2.0
"""The batches of a tier: the jobs that read and write their blocks, and the results."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from operator import itemgetter

from flexkv.tiers.base import BlockResult
from flexkv.tiers.job import Job, Outcome, Urgency
from flexkv.tiers.link import Link


class Batches:
    """The reads and writes of a tier that have not ended, and the results that nobody has taken.
    Single-threaded; nothing waits. `queued_blocks`: see `TierFigures`."""

    def __init__(self) -> None:
        self.queued_blocks = 0
        self._tickets = itertools.count(1)
        self._jobs: dict[int, dict[Job, Link]] = {}
        self._results: list[BlockResult] = []

    def new_ticket(self) -> int:
        return next(self._tickets)

    def add(self, ticket: int, job: Job, link: Link) -> None:
        """A job of `link` reads or writes some blocks of a batch."""
        job.ticket = ticket
        self._jobs.setdefault(ticket, {})[job] = link
        self.queued_blocks += len(job.positions)

    def end(self, job: Job) -> None:
        """Forget a job that has ended."""
        jobs = self._jobs[job.ticket]
        del jobs[job]
        if not jobs:
            del self._jobs[job.ticket]
        self.queued_blocks -= len(job.positions)

    def report(self, ticket: int, positions: Iterable[int], outcomes: Iterable[Outcome]) -> None:
        """Add results, which `take_results` returns."""
        self._results += map(BlockResult, itertools.repeat(ticket), positions, outcomes)

    def take_results(self) -> list[BlockResult]:
        results, self._results = self._results, []
        return results

    def cancel(self, ticket: int) -> None:
        """See `LowerTier.cancel`."""
        for link, jobs in self._by_link(ticket):
            link.cancel(jobs)

    def raise_priority(self, ticket: int, urgency: Urgency) -> None:
        """See `LowerTier.raise_priority`."""
        for link, jobs in self._by_link(ticket):
            link.raise_priority(jobs, urgency)

    def hung(self, ticket: int) -> Collection[int]:
        """See `LowerTier.hung`."""
        hung = (job.positions for job in self._jobs.get(ticket, ()) if job.hangs)
        return set(itertools.chain.from_iterable(hung))

    def jobs(self) -> Iterable[Job]:
        """Those without a result."""
        return itertools.chain.from_iterable(self._jobs.values())

    def _by_link(self, ticket: int) -> Iterator[tuple[Link, Iterable[Job]]]:
        """The jobs of a batch, which has those of each link in a row."""
        for link, jobs in itertools.groupby(self._jobs.get(ticket, {}).items(), itemgetter(1)):
            yield link, [job for job, _ in jobs]

    def clear(self) -> None:
        """Forget all."""
        self._jobs.clear()
        self._results.clear()
        self.queued_blocks = 0
