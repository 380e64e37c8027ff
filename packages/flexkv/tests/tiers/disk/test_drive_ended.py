# SPDX-License-Identifier: Apache-2.0
"""The results of a drive's jobs, of which one step takes some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flexkv.tiers.disk.drive import _ENDED_BLOCKS, EndedJobs
from flexkv.tiers.job import Job, Outcome, Priority
from flexkv.tiers.link import Link
from flexkv.types.backlog import BACKLOG_SHARE
from packages.inside_tiers import ended_jobs
from packages.patience import wait_until

PATIENCE = 60.0
"""Seconds after which what should come counts as lost."""


@contextmanager
def after(jobs: list[Job]) -> Iterator[EndedJobs]:
    """What a link with one thread gives once it has run all of `jobs`."""
    link = Link("test", 1, 1, 1 << 20, PATIENCE)
    link.submit(*jobs)
    wait_until(lambda: ended_jobs(link) == len(jobs))
    yield EndedJobs(link)
    assert link.close(PATIENCE)


def done(priority: Priority, blocks: int = 1) -> Job:
    return Job(priority, 1, lambda: [Outcome.DONE] * blocks, blocks)


def test_some_of_the_writes_are_taken_and_the_others_by_the_next_calls() -> None:
    writes = [done(Priority.WRITE) for _ in range(2 * _ENDED_BLOCKS + 1)]
    with after(writes) as ended:
        assert ended.take(all_writes=False) == writes[:_ENDED_BLOCKS]
        assert ended.take(all_writes=False) == writes[_ENDED_BLOCKS : 2 * _ENDED_BLOCKS]
        assert ended.take(all_writes=False) == writes[2 * _ENDED_BLOCKS :]
        assert ended.take(all_writes=False) == []


def test_all_reads_are_taken_at_once() -> None:
    reads = [done(Priority.LOAD) for _ in range(2 * _ENDED_BLOCKS)]
    writes = [done(Priority.WRITE) for _ in range(2 * _ENDED_BLOCKS)]
    with after([*writes, *reads]) as ended:
        assert ended.take(all_writes=False) == [*reads, *writes[:_ENDED_BLOCKS]]


def test_all_writes_are_taken_on_demand() -> None:
    writes = [done(Priority.WRITE) for _ in range(2 * _ENDED_BLOCKS)]
    with after(writes) as ended:
        assert ended.take(all_writes=True) == writes


@pytest.mark.parametrize("blocks", [1, 3])
def test_more_of_a_long_backlog_are_taken(blocks: int) -> None:
    """As many jobs as have so many blocks."""
    writes = [done(Priority.WRITE, blocks) for _ in range(2 * BACKLOG_SHARE * _ENDED_BLOCKS)]
    with after(writes) as ended:
        share = blocks * len(writes) // BACKLOG_SHARE
        assert ended.take(all_writes=False) == writes[: -(-share // blocks)]
