# SPDX-License-Identifier: Apache-2.0
"""As `inside.py`: private parts of the lower tiers, and of what writes blocks to them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flexkv.tiers.link import Link


def link_of(owner: Any) -> Link:
    """The threads that do a tier's jobs, or put its queries to a store."""
    link: Link = owner._device.link if hasattr(owner, "_device") else owner._link
    return link


def is_idle(link: Link) -> bool:
    """Whether no job runs or waits; those that hang do not count."""
    return not (link._running or link._queue)


def is_drained(link: Link) -> bool:
    """Whether nothing waits, runs, hangs or is to be polled."""
    with link._work:
        return not (link._queue or link._running or link._hung or link._done)


def is_closing(link: Link) -> bool:
    """Whether its close has begun, and the time is known until which writes begin."""
    with link._work:
        return link._closing


def running_jobs(link: Link) -> int:
    """Jobs that run; those that hang do not count."""
    return len(link._running)


def hung_jobs(link: Link) -> int:
    return len(link._hung)


def ended_jobs(link: Link) -> int:
    """Jobs that have ended and were not polled."""
    return len(link._done)


def free_threads(link: Link) -> int:
    """Threads without a job that hangs."""
    return link._free


def living_threads(link: Link) -> int:
    return sum(thread.is_alive() for thread in link._threads)


def assert_no_job_counts(link: Link) -> None:
    """No read keeps writes waiting, and no write another."""
    assert link._writing == link._reads == 0


def allow_one_write(link: Link) -> None:
    """From now on, a link begins a write once no other one runs."""
    link._write_bytes = 1


def threads_inside(turns: Any) -> int:
    """Threads that have a turn, those that hang included."""
    return len(turns._inside)


def hang_after(turns: Any, seconds: float) -> None:
    """From now on, a thread that comes hangs after so long."""
    turns._hang_seconds = seconds


def store_of(drive: Any) -> Any:
    """The file of a drive's blocks, or the store of a remote tier: tests replace its calls."""
    return drive._store


def is_kept_up(drive: Any) -> bool:
    """Whether every record is written, every reset was written, and every result was polled."""
    upkeep = drive._upkeep
    reset = upkeep._reset.wanted or upkeep._reset.running
    return not (reset or upkeep._records or upkeep._written or drive._ended._writes)


def split_runs(drive: Any) -> None:
    """From now on, a drive reads and writes each block in a call of its own."""
    drive._runs = lambda slots, run_bytes: [[i] for i in range(len(slots))]


def read_jobs(drive: Any) -> Any:
    """What makes the jobs of a drive's reads."""
    return type(drive)._reading.__get__(drive)


def set_read_jobs(drive: Any, make: Any) -> None:
    drive._reading = make


def erase_slot(drive: Any, slot: int) -> None:
    """As if a read had found a drive's block damaged."""
    drive._erase(slot)


def write_rate(drive: Any) -> float:
    """Bytes a second that a drive is believed to write."""
    rate: float = drive._write_rate
    return rate


def assume_write_rate(drive: Any, rate: float) -> None:
    """A drive is believed to write so many bytes a second, whatever was measured."""
    drive._write_rate = rate


def last_generation(drive: Any) -> int:
    """The number of a drive's newest record; each new record has the next one."""
    generation: int = drive._generation
    return generation


def why_unopened(drive: Any) -> str:
    """The error for which a drive is not open."""
    return str(drive._error)


def await_opening(owner: Any, seconds: float) -> bool:
    """Wait for the thread that opens a file, a drive or a store; whether it ended in time."""
    ended: bool = owner._opening.close(seconds)
    return ended


def assert_no_batch(disk: Any, remote: Any) -> None:
    """A disk and a store keep nothing of a batch, and each drive is done with its blocks."""
    for tier in (disk, remote):
        assert tier._batches._jobs == {}
    assert remote._keys == {}
    assert all(drive._running == {} for drive in disk.drives)


def epochs_of(tier: Any) -> Any:
    """The epochs of a remote tier's blocks."""
    return tier._epochs


def knows_record(tier: Any, record: Any) -> bool:
    """Whether a remote tier knows the epoch in this record."""
    return bool(tier._epochs._last.to_bytes() == record.read())


def epoch_record(epochs: Any) -> Any:
    """What a store keeps of its current epoch."""
    return epochs._record.read()


def requests_of(blocks: Any) -> Any:
    """Requests to an object store: tests replace its calls."""
    return blocks._requests


def questions_of(tier: Any) -> Any:
    """Queries of a remote tier."""
    return tier._questions


def waiting_questions(tier: Any) -> Collection[Any]:
    """Queries of a remote tier that have not begun."""
    waiting: Collection[Any] = tier._questions._waiting
    return waiting


def demoting(demoter: Any) -> Collection[bytes]:
    """Keys of the blocks that are being written to a tier, or wait for that."""
    held: Collection[bytes] = demoter._held
    return held


def waiting_writes(demoter: Any) -> Collection[Any]:
    """Blocks that wait to be written to a tier."""
    waiting: Collection[Any] = demoter._waiting
    return waiting


def assert_idle(demoter: Any) -> None:
    """Nothing waits for its write to a tier, or is written."""
    assert not any((demoter._held, demoter._writing, demoter.writes, demoter._waiting))
    assert not demoter._chain


def leaving_blocks(leaving: Any) -> Collection[Any]:
    """Blocks that tiers take before the arena gives their slots away, in that order."""
    blocks: Collection[Any] = leaving._leaving
    return blocks
