# SPDX-License-Identifier: Apache-2.0
"""Links with real threads; jobs wait for events that the test sets."""

from __future__ import annotations

import errno
import mmap
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from flexkv.tiers.job import Job, Outcome, Priority, Urgency
from flexkv.tiers.link import Link, most_jobs
from packages.conftest import PATIENCE_SECONDS, Clock
from packages.inside_tiers import assert_no_job_counts, free_threads, is_drained, living_threads
from packages.patience import wait_until

PATIENCE = 60.0
"""Seconds after which what should come counts as lost."""


class Gate:
    """Work that says when it began, and ends when the test lets it."""

    def __init__(self, outcome: Outcome = Outcome.DONE) -> None:
        self.began = threading.Event()
        self.go = threading.Event()
        self.outcome = outcome

    def __call__(self) -> list[Outcome]:
        self.began.set()
        assert self.go.wait(PATIENCE)
        return [self.outcome]


def gated(priority: Priority, size: int = 1) -> tuple[Job, Gate]:
    gate = Gate()
    return Job(priority, size, gate), gate


@contextmanager
def running(
    threads: int = 4, write_bytes: int = 2, queue_bytes: int = 1000, stall_seconds: float = 60.0
) -> Iterator[Link]:
    link = Link("test", threads, write_bytes, queue_bytes, stall_seconds)
    yield link
    assert link.close(PATIENCE)


def ended(link: Link, count: int) -> list[Job]:
    """The next `count` jobs that end."""
    jobs: list[Job] = []
    wait_until(lambda: len(jobs) >= count, lambda: jobs.extend(link.poll()))
    assert len(jobs) == count
    return jobs


@pytest.mark.parametrize("outcome", Outcome)
def test_a_job_ends_as_its_work_says(outcome: Outcome) -> None:
    with running() as link:
        job = Job(Priority.LOAD, 1, lambda: [outcome, Outcome.DONE], positions=range(2))
        link.submit(job)
        assert ended(link, 1) == [job]
        assert job.outcomes == [outcome, Outcome.DONE]
        assert link.poll() == []
        assert is_drained(link)


def test_an_error_of_the_system_is_a_failed_job_and_the_next_one_runs() -> None:
    def fail() -> list[Outcome]:
        raise OSError("no such device")

    with running(threads=1) as link:
        for _ in range(3):
            link.submit(Job(Priority.LOAD, 1, fail, positions=range(2)))
        link.submit(Job(Priority.LOAD, 1, lambda: [Outcome.DONE]))
        outcomes = [job.outcomes for job in ended(link, 4)]
        assert outcomes == [[Outcome.FAILED] * 2] * 3 + [[Outcome.DONE]]


@pytest.mark.parametrize(
    "error", [MemoryError(), struct.error("out of range"), AssertionError(), KeyError(3)], ids=repr
)
def test_whatever_a_job_raises_it_is_failed_and_the_thread_lives(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> list[Outcome]:
        raise error

    with running(threads=1) as link:
        for _ in range(3):
            link.submit(Job(Priority.WRITE, 1, fail, positions=range(2)))
        link.submit(Job(Priority.WRITE, 1, lambda: [Outcome.DONE]))
        outcomes = [job.outcomes for job in ended(link, 4)]
        assert outcomes == [[Outcome.FAILED] * 2] * 3 + [[Outcome.DONE]]
        assert not link.stalled
        assert link.queued_bytes == 0
    (record,) = caplog.records
    assert repr(error) in record.getMessage()
    assert record.exc_info is not None


def test_as_many_jobs_run_at_once_as_there_are_threads() -> None:
    with running(threads=3) as link:
        jobs = [gated(Priority.LOAD) for _ in range(4)]
        for job, _ in jobs:
            link.submit(job)
        for _, gate in jobs[:3]:
            assert gate.began.wait(PATIENCE)
        assert not jobs[3][1].began.is_set()
        jobs[0][1].go.set()
        assert jobs[3][1].began.wait(PATIENCE)
        for _, gate in jobs:
            gate.go.set()
        ended(link, 4)


@pytest.mark.parametrize("priority", [Priority.PREFETCH, Priority.WRITE])
def test_jobs_that_come_at_once_run_at_once(priority: Priority) -> None:
    with running(threads=3, write_bytes=3) as link:
        jobs = [gated(priority) for _ in range(3)]
        link.submit(*[job for job, _ in jobs])
        for _, gate in jobs:
            assert gate.began.wait(PATIENCE)
        for _, gate in jobs:
            gate.go.set()
        ended(link, 3)


def test_no_write_begins_while_a_read_runs() -> None:
    with running() as link:
        (read, reading), (write, writing) = gated(Priority.PREFETCH), gated(Priority.WRITE)
        link.submit(read)
        assert reading.began.wait(PATIENCE)
        link.submit(write)
        other = Job(Priority.LOAD, 1, lambda: [Outcome.DONE])
        link.submit(other)
        assert ended(link, 1) == [other]
        assert not writing.began.is_set()
        assert link.queued_bytes == write.size
        reading.go.set()
        assert writing.began.wait(PATIENCE)
        writing.go.set()
        ended(link, 2)


def test_as_many_writes_begin_after_a_read_as_there_may_be() -> None:
    with running(threads=4, write_bytes=2) as link:
        read, reading = gated(Priority.LOAD)
        link.submit(read)
        assert reading.began.wait(PATIENCE)
        writes = [gated(Priority.WRITE) for _ in range(2)]
        for job, _ in writes:
            link.submit(job)
        time.sleep(0.05)  # time for the threads that these woke to wait again
        reading.go.set()
        for _, gate in writes:
            assert gate.began.wait(PATIENCE)
        for _, gate in writes:
            gate.go.set()
        ended(link, 3)


def test_reads_do_not_wait_for_the_writes_behind_one_that_runs() -> None:
    with running(threads=4, write_bytes=2) as link:
        writes = [gated(Priority.WRITE) for _ in range(4)]
        for job, _ in writes:
            link.submit(job)
        for _, gate in writes[:2]:
            assert gate.began.wait(PATIENCE)
        read = Job(Priority.LOAD, 1, lambda: [Outcome.DONE])
        link.submit(read)
        assert ended(link, 1) == [read]
        assert not any(gate.began.is_set() for _, gate in writes[2:])
        for _, gate in writes:
            gate.go.set()
        assert len(ended(link, 4)) == 4


def test_a_write_larger_than_the_bound_is_written_alone() -> None:
    with running(write_bytes=2) as link:
        (large, gate), (small, other) = gated(Priority.WRITE, 100), gated(Priority.WRITE, 1)
        link.submit(large)
        assert gate.began.wait(PATIENCE)
        link.submit(small)
        gate.go.set()
        assert other.began.wait(PATIENCE)
        other.go.set()
        assert ended(link, 2) == [large, small]


def test_a_cancelled_job_does_not_run_and_one_that_runs_goes_on() -> None:
    with running(threads=1) as link:
        (first, gate), (second, other) = gated(Priority.LOAD), gated(Priority.LOAD)
        link.submit(first)
        assert gate.began.wait(PATIENCE)
        link.submit(second)
        link.cancel([first, second, second])
        assert ended(link, 1) == [second]
        assert second.outcomes == [Outcome.DROPPED]
        gate.go.set()
        assert ended(link, 1) == [first]
        assert first.outcomes == [Outcome.DONE]
        assert not other.began.is_set()
        link.cancel([first, second])
        assert link.poll() == []


def test_a_cancelled_read_does_not_hold_up_writes() -> None:
    with running(threads=1) as link:
        (first, gate), (read, _), (write, writing) = (
            gated(Priority.WRITE),
            gated(Priority.LOAD),
            gated(Priority.WRITE),
        )
        link.submit(first)
        assert gate.began.wait(PATIENCE)
        link.submit(read)
        link.submit(write)
        link.cancel([read])
        gate.go.set()
        assert writing.began.wait(PATIENCE)
        writing.go.set()
        ended(link, 3)


def test_a_hastened_job_overtakes_and_runs_though_writes_may_not() -> None:
    with running(threads=2) as link:
        (read, gate), (write, writing) = gated(Priority.LOAD), gated(Priority.WRITE)
        link.submit(read)
        assert gate.began.wait(PATIENCE)
        link.submit(write)
        link.raise_priority([write, read], Urgency(Priority.PREFETCH))
        assert writing.began.wait(PATIENCE)
        writing.go.set()
        gate.go.set()
        ended(link, 2)
        assert read.priority is Priority.LOAD


def test_a_full_queue_drops_writes_and_keeps_loads() -> None:
    with running(threads=1, queue_bytes=2) as link:
        first, gate = gated(Priority.LOAD)
        link.submit(first)
        assert gate.began.wait(PATIENCE)
        writes = [
            Job(Priority.WRITE, 1, lambda: [Outcome.DONE], positions=range(2)) for _ in range(3)
        ]
        loads = [Job(Priority.LOAD, 1, lambda: [Outcome.DONE]) for _ in range(3)]
        for job in [*writes, *loads]:
            link.submit(job)
        assert link.poll() == [writes[2], writes[1], writes[0]]
        gate.go.set()
        assert ended(link, 4) == [first, *loads]
        assert [job.outcomes for job in writes] == [[Outcome.DROPPED] * 2] * 3


def hang(link: Link, clock: Clock, count: int, priority: Priority = Priority.LOAD) -> list[Gate]:
    """Have so many jobs hang, and the link note it."""
    jobs = [gated(priority) for _ in range(count)]
    for job, gate in jobs:
        link.submit(job)
        assert gate.began.wait(PATIENCE)
    clock.skip(2 * PATIENCE)
    assert link.note_hung() == [job for job, _ in jobs]
    assert link.note_hung() == []
    return [gate for _, gate in jobs]


def end_hung(link: Link, gates: list[Gate]) -> None:
    for gate in gates:
        gate.go.set()
    jobs = ended(link, len(gates))
    assert all(job.hangs and job.outcomes == [Outcome.DONE] for job in jobs)


def work(link: Link) -> None:
    """One job passes."""
    job = Job(Priority.LOAD, 1, lambda: [Outcome.DONE])
    link.submit(job)
    assert ended(link, 1) == [job]
    assert not job.hangs


def test_a_job_that_hangs_takes_its_own_thread_alone(clock: Clock) -> None:
    with running(threads=4) as link:
        gates = hang(link, clock, 1)
        assert not link.stalled
        jobs = [gated(Priority.LOAD) for _ in range(4)]  # as many as before run at once
        link.submit(*[job for job, _ in jobs])
        for _, gate in jobs:
            assert gate.began.wait(PATIENCE)
        for _, gate in jobs:
            gate.go.set()
        ended(link, 4)
        end_hung(link, gates)
        work(link)


def test_a_link_is_stalled_while_half_of_its_threads_hang_and_no_job_ends(clock: Clock) -> None:
    with running(threads=4) as link:
        first = hang(link, clock, 1)
        assert not link.stalled
        second = hang(link, clock, 1)
        assert link.stalled
        end_hung(link, first)
        assert not link.stalled
        end_hung(link, second)
        assert is_drained(link)


def test_the_first_hang_and_a_stall_are_logged(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with running(threads=8) as link:
        gates = [gate for _ in range(5) for gate in hang(link, clock, 1)]
        first, second = (record.getMessage() for record in caplog.records)
        assert first.startswith("test: 1 call(s) have not ended within 60 s;")
        assert " and goes on with other threads; " in first
        assert second.startswith("test: 4 call(s)")
        assert f" and skips it, and tries it every {PATIENCE_SECONDS:g} s; " in second
        end_hung(link, gates)


def test_jobs_that_end_keep_a_link_from_stalling(clock: Clock) -> None:
    with running(threads=4) as link:
        gates = []
        for _ in range(3):
            gates += hang(link, clock, 1)
            work(link)
            assert not link.stalled
        end_hung(link, gates)


def test_hung_threads_are_replaced_within_a_bound(clock: Clock) -> None:
    with running(threads=2) as link:
        gates = []
        for _ in range(most_jobs(2) - 1):
            gates += hang(link, clock, 1)
            clock.skip(PATIENCE_SECONDS)
            link.note_hung()
            assert not link.stalled
            work(link)
        gates += hang(link, clock, 1)
        clock.skip(PATIENCE_SECONDS)
        link.note_hung()
        assert link.stalled  # no thread is left
        assert living_threads(link) == most_jobs(2)
        waiting = Job(Priority.LOAD, 1, lambda: [Outcome.DONE])
        link.submit(waiting)
        gates[0].go.set()
        assert ended(link, 2)[1] is waiting
        end_hung(link, gates[1:])
        work(link)
        # Those that replaced others, and are more than the link needs, have ended.
        wait_until(lambda: living_threads(link) <= 2)


def test_a_stalled_link_is_tried_by_one_submission_at_a_time(clock: Clock) -> None:
    with running(threads=4) as link:
        gates = hang(link, clock, 4)
        assert link.stalled
        assert free_threads(link) == 0  # no thread more hangs before the next try
        clock.skip(PATIENCE_SECONDS)
        link.note_hung()
        assert not link.stalled
        assert free_threads(link) == 1
        job, gate = gated(Priority.LOAD)
        link.submit(job)
        assert link.stalled
        gate.go.set()
        ended(link, 1)
        assert not link.stalled
        link.note_hung()
        assert free_threads(link) == 4
        end_hung(link, gates)


@pytest.mark.parametrize("priority", [Priority.LOAD, Priority.WRITE])
def test_a_job_that_hangs_does_not_keep_writes_waiting(clock: Clock, priority: Priority) -> None:
    with running(threads=4, write_bytes=1) as link:
        gates = hang(link, clock, 1, priority)
        write = Job(Priority.WRITE, 1, lambda: [Outcome.DONE])
        link.submit(write)
        assert ended(link, 1) == [write]
        end_hung(link, gates)
        assert_no_job_counts(link)


def test_without_a_thread_to_be_had_a_link_goes_on_with_those_it_has(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(threads=4) as link:
        with monkeypatch.context() as patch:

            def refuse(_: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", refuse)
            gates = hang(link, clock, 1)
        assert free_threads(link) == 3
        work(link)
        end_hung(link, gates)
        assert free_threads(link) == 4


def test_close_lets_what_runs_end_and_drops_what_waits() -> None:
    link = Link("test", 1, 1, 100, 60.0)
    (first, gate), (second, other) = gated(Priority.LOAD), gated(Priority.LOAD)
    link.submit(first)
    assert gate.began.wait(PATIENCE)
    link.submit(second)
    assert not link.close(0.0)
    gate.go.set()
    assert link.close(PATIENCE)
    assert link.close(PATIENCE)
    assert link.poll() == [first]
    assert not other.began.is_set()
    link.submit(Job(Priority.LOAD, 1, other))
    assert link.poll() == []


def test_every_job_of_a_crowd_ends_once() -> None:
    """No wake-up is lost: all sizes and priorities at once, raised and cancelled meanwhile."""
    with running(threads=6, write_bytes=4, queue_bytes=1 << 20) as link:
        lock, begun = threading.Lock(), []

        def work() -> list[Outcome]:
            with lock:
                begun.append(None)
            return [Outcome.DONE]

        jobs = [Job(list(Priority)[i % len(Priority)], i % 7, work) for i in range(4000)]
        seen: list[Job] = []
        for i, job in enumerate(jobs):
            link.submit(job)
            if i % 10 == 0:
                link.raise_priority(jobs[i - 20 : i], Urgency(Priority.PREFETCH))
            if i % 15 == 0:
                link.cancel(jobs[max(0, i - 5) : i])
            seen += link.poll()
        seen += ended(link, len(jobs) - len(seen))
        assert set(seen) == set(jobs)
        assert sum(job.outcomes == [Outcome.DONE] for job in jobs) == len(begun)
        assert is_drained(link)
        assert link.queued_bytes == 0


def test_links_do_not_keep_each_other_waiting() -> None:
    with running(threads=1) as one, running(threads=1) as other:
        job, gate = gated(Priority.LOAD)
        one.submit(job)
        assert gate.began.wait(PATIENCE)
        other.submit(Job(Priority.LOAD, 1, lambda: [Outcome.DONE]))
        ended(other, 1)
        gate.go.set()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(ended, one, 1).result() == [job]


def test_close_writes_what_waits_to_be_written() -> None:
    link = Link("test", 1, 1, 100, 60.0)
    (first, gate), writes = gated(Priority.WRITE), [gated(Priority.WRITE) for _ in range(3)]
    link.submit(first)
    assert gate.began.wait(PATIENCE)
    for job, other in writes:
        other.go.set()
        link.submit(job)
    gate.go.set()
    assert link.close(PATIENCE)
    assert link.poll() == [first, *(job for job, _ in writes)]
    assert all(job.outcomes == [Outcome.DONE] for job, _ in writes)


def test_writes_that_do_not_end_in_time_are_dropped_at_the_end() -> None:
    link = Link("test", 1, 1, 100, 60.0)
    first, gate = gated(Priority.WRITE)
    later = Job(Priority.WRITE, 1, lambda: [Outcome.DONE])
    link.submit(first, later)
    assert gate.began.wait(PATIENCE)
    assert not link.close(0.0)
    gate.go.set()
    assert link.close(PATIENCE)
    assert link.poll() == [first]
    assert later.outcomes == [Outcome.DROPPED]


@pytest.mark.parametrize(
    ("error", "text"),
    [(None, ""), (OSError(errno.EIO, "Input/output error"), "Input/output error (EIO)")],
    ids=["done", "failed"],
)
def test_a_job_that_has_run_keeps_no_buffer(error: OSError | None, text: str) -> None:
    with running(threads=1) as link:
        memory = mmap.mmap(-1, 4096)

        def work(buffer: memoryview) -> list[Outcome]:
            if error is not None:
                raise error
            return [Outcome.DONE]

        job = Job(Priority.LOAD, 1, partial(work, memoryview(memory)))
        link.submit(job)
        assert ended(link, 1) == [job]
        if error is not None:
            error.__traceback__ = None  # the test keeps the error, the job only its text
        memory.close()  # raises if a view lives on
        assert job.error == text


@pytest.mark.parametrize("how", ["cancelled", "queue full", "discarded at the end"])
def test_a_job_that_does_not_run_keeps_no_buffer(how: str) -> None:
    link = Link("test", 1, 1, 1, 60.0)
    busy, gate = gated(Priority.WRITE)
    link.submit(busy)
    assert gate.began.wait(PATIENCE)
    memory = mmap.mmap(-1, 4096)
    size = 2 if how == "queue full" else 1
    job = Job(Priority.PREFETCH, size, partial(list, memoryview(memory)))
    link.submit(job)
    if how == "cancelled":
        link.cancel([job])
    link.begin_close(0.0)
    memory.close()  # raises if a view lives on
    assert job.outcomes == [Outcome.DROPPED]
    gate.go.set()
    assert link.close(PATIENCE)
