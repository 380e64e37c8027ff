# SPDX-License-Identifier: Apache-2.0
"""The results of a drive's jobs, of which one step takes some."""

from __future__ import annotations

import pytest

from flexkv.tiers.disk.drive import _ENDED_BLOCKS, EndedJobs
from flexkv.tiers.job import Job, Priority
from flexkv.types.backlog import BACKLOG_SHARE


def done(priority: Priority, blocks: int = 1) -> Job:
    return Job(priority, 1, list, range(blocks))


def test_some_of_the_writes_are_taken_and_the_others_by_the_next_calls() -> None:
    writes = [done(Priority.WRITE) for _ in range(2 * _ENDED_BLOCKS + 1)]
    ended = EndedJobs()
    assert ended.take(writes, all_writes=False) == writes[:_ENDED_BLOCKS]
    assert ended.take([], all_writes=False) == writes[_ENDED_BLOCKS : 2 * _ENDED_BLOCKS]
    assert ended.take([], all_writes=False) == writes[2 * _ENDED_BLOCKS :]
    assert ended.take([], all_writes=False) == []


def test_all_reads_are_taken_at_once() -> None:
    reads = [done(Priority.LOAD) for _ in range(2 * _ENDED_BLOCKS)]
    writes = [done(Priority.WRITE) for _ in range(2 * _ENDED_BLOCKS)]
    taken = EndedJobs().take([*writes, *reads], all_writes=False)
    assert taken == [*reads, *writes[:_ENDED_BLOCKS]]


def test_all_writes_are_taken_on_demand() -> None:
    writes = [done(Priority.WRITE) for _ in range(2 * _ENDED_BLOCKS)]
    assert EndedJobs().take(writes, all_writes=True) == writes


@pytest.mark.parametrize("blocks", [1, 3])
def test_more_of_a_long_backlog_are_taken(blocks: int) -> None:
    """As many jobs as have so many blocks."""
    writes = [done(Priority.WRITE, blocks) for _ in range(2 * BACKLOG_SHARE * _ENDED_BLOCKS)]
    share = blocks * len(writes) // BACKLOG_SHARE
    assert EndedJobs().take(writes, all_writes=False) == writes[: -(-share // blocks)]
