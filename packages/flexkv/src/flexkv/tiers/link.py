# SPDX-License-Identifier: Apache-2.0
"""A link to a device below host memory: a bounded queue, and threads that run its jobs.

Reads go before writes: while a read waits or runs, no write begins. The thread that submits jobs
polls for their results.

A call of a device may hang alone, or because the device hangs. While other jobs end, a hung call
costs the link nothing: another thread takes the place of its thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable

from flexkv.tiers.job import Job, Outcome, Priority, Urgency

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""Seconds between two tries of a stalled link. Each may hang another thread. Not tuned."""


def most_jobs(threads: int) -> int:
    """How many jobs a link with so many threads runs at once, those that hang included. Beyond
    that, hung threads are not replaced."""
    return 2 * threads


class LinkQueue:
    """The bounded queue of a link. It has no lock; the link has.

    Jobs are in the order of urgency, then of arrival. Every call takes O(1) for each job, and O(1)
    for each urgency that jobs wait with. `limit`: how many bytes may wait. Beyond it,
    the queue drops jobs of the lowest priority and the last turn, the newest first. It never drops
    loads, because each needs a slot of the arena, which bounds them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # No urgency is without a job, so mostly there are few.
        self._waiting: dict[Urgency, OrderedDict[Job, None]] = {}
        self.size = 0  # bytes of the jobs that wait

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def waiting(self, priority: Priority) -> int:
        return sum(len(jobs) for each, jobs in self._waiting.items() if each.priority is priority)

    def push(self, job: Job) -> list[Job]:
        """Add a job. Returns the jobs that are dropped for it, perhaps the job itself."""
        self._add(job)
        self.size += job.size
        dropped = []
        while self.size > self._limit:
            most = [each for each in self._waiting if each.priority is not Priority.LOAD]
            if not most:
                break
            dropped.append(self._take(max(most), last=True))
        return dropped

    def pop(self, writes: bool) -> Job | None:
        """Remove and return the next job, a write only if `writes`; None if there is none."""
        ready = [each for each in self._waiting if writes or each.priority is not Priority.WRITE]
        return self._take(min(ready), last=False) if ready else None

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
        for urgency in list(self._waiting):
            if urgency.priority is not priority:
                for job in self._waiting[urgency]:
                    self.size -= job.size
                    job.end_as(Outcome.DROPPED)
                del self._waiting[urgency]

    def raise_to(self, jobs: Iterable[Job], urgency: Urgency) -> None:
        """Raise those of `jobs` that wait with a lower urgency to `urgency`."""
        for job in jobs:
            if urgency < (job.priority, job.turn) and self._discard(job):
                job.priority, job.turn = urgency
                self._add(job)

    def _add(self, job: Job) -> None:
        self._waiting.setdefault(Urgency(job.priority, job.turn), OrderedDict())[job] = None

    def _discard(self, job: Job) -> bool:
        """Remove a job. Returns whether it waited."""
        urgency = Urgency(job.priority, job.turn)
        jobs = self._waiting.get(urgency)
        if jobs is None or job not in jobs:
            return False
        del jobs[job]
        if not jobs:
            del self._waiting[urgency]
        return True

    def _take(self, urgency: Urgency, *, last: bool) -> Job:
        """Remove and return the newest of such jobs, or the oldest."""
        jobs = self._waiting[urgency]
        job, _ = jobs.popitem(last=last)
        self.size -= job.size
        if not jobs:
            del self._waiting[urgency]
        return job


class Link:
    """The queue and the threads of one device. Only `close` waits. Any thread may call `submit`,
    one thread calls the other methods.

    Args:
        name: prefix of the threads' names.
        threads: how many jobs run at once.
        write_bytes: no further write begins while this many bytes are being written.
        queue_bytes: see `LinkQueue`.
        stall_seconds: a job that runs longer hangs, until it ends.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        write_bytes: int,
        queue_bytes: int,
        stall_seconds: float,
    ) -> None:
        self.name = name
        self.stall_seconds = stall_seconds
        self._write_bytes = write_bytes
        self.queue_bytes = queue_bytes
        self._queue = LinkQueue(queue_bytes)
        self._running: dict[Job, None] = {}  # those that do not hang
        self._oldest = math.inf  # when the first of them began
        self._hung: set[Job] = set()
        self._count = threads
        self._free = threads  # threads without a job that hangs
        self._stuck = 0  # jobs that began to hang since one has ended
        self._probe_at = 0.0
        self._reads = 0
        self._writing = 0
        self._closing = False
        self._write_until = 0.0
        self._reported_error = False
        self._numbers = itertools.count()
        self._work = threading.Condition()
        self._done: deque[Job] = deque()
        # Daemons: a thread that hangs in its device must not keep the process from ending.
        self._threads: list[threading.Thread] = []
        for _ in range(threads):
            self._start_thread()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the jobs that wait."""
        return self._queue.size

    @property
    def stalled(self) -> bool:
        """Whether half of the threads hang and no job has ended since, or all hang. Every
        `PROBE_SECONDS` the link is not stalled until the next jobs are submitted, which try the
        device."""
        # Without the lock: a thread that holds it may wait for Python's own lock for a while.
        half_hang = 2 * self._stuck >= self._count  # asked often: no call
        return not self._free or (half_hang and time.monotonic() < self._probe_at)

    def note_hung(self) -> list[Job]:
        """Note the jobs that hang, and replace their threads within the bound of `most_jobs`: all
        of them while other jobs end, one thread for each try of a stalled link. Called again and
        again while jobs run. Returns the jobs that hang and did not at the last call. They keep
        their buffers. `poll` returns them, too, when they end."""
        now = time.monotonic()
        begun_until = now - self.stall_seconds
        if self._oldest >= begun_until and self._free >= self._count:
            return []
        with self._work:
            hung = [job for job in self._running if job.begun < begun_until]
            for job in hung:
                job.hangs = True
                job.seconds = now - job.begun
                del self._running[job]
                self._hung.add(job)
                self._account(job, -1)
            if hung:
                self._find_oldest()
                self._free -= len(hung)
                stalled = self._half_hang
                self._stuck += len(hung)
                self._probe_at = now + PROBE_SECONDS
                self._wake_next()
                if len(hung) == len(self._hung) or (self._half_hang and not stalled):
                    self._log_hung()
            self._replace_threads(now)
        return hung

    def submit(self, *jobs: Job) -> None:
        """Queue jobs. If the queue is full, it drops jobs, which `poll` returns as DROPPED."""
        with self._work:
            if self._half_hang and time.monotonic() >= self._probe_at:
                self._probe_at = time.monotonic() + PROBE_SECONDS
            for job in jobs:
                for dropped in self._queue.push(job):
                    dropped.end_as(Outcome.DROPPED)
                    self._done.append(dropped)
            # Only one thread, which wakes the next: to wake a thread takes up to 0.5 ms of the
            # caller's time if the cores are busy.
            self._work.notify()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Drop those of `jobs` that have not begun."""
        with self._work:
            for job in self._queue.remove(jobs):
                job.end_as(Outcome.DROPPED)
                self._done.append(job)
            self._wake_next()

    def raise_priority(self, jobs: Iterable[Job], urgency: Urgency) -> None:
        """Raise those of `jobs` that have not begun to `urgency`."""
        with self._work:
            self._queue.raise_to(jobs, urgency)
            self._work.notify_all()

    def poll(self) -> list[Job]:
        """The jobs that have ended since the last call, each with its outcomes."""
        done = self._done
        return [done.popleft() for _ in range(len(done))]

    def drain(self) -> bool:
        """Discard the jobs that wait, and those that have ended. Returns whether none runs."""
        with self._work:
            self._queue.keep_only(None)
            self._done.clear()
            return not (self._running or self._hung)

    def begin_close(self, seconds: float) -> None:
        """Discard the reads that wait, and begin waiting writes for at most `seconds` more.
        Idempotent."""
        with self._work:
            if not self._closing:
                self._closing = True
                self._write_until = time.monotonic() + seconds
                self._queue.keep_only(Priority.WRITE)
            self._work.notify_all()

    def close(self, timeout: float) -> bool:
        """Run waiting writes for up to half of `timeout` seconds, discard all other jobs, and wait
        for running jobs until `timeout` has passed. Idempotent. Returns whether all threads have
        ended. If not, the device hangs."""
        end = time.monotonic() + timeout
        self.begin_close(timeout / 2)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        job = self._exchange(None)
        while job is not None:
            try:
                job.end(job.work())
            except OSError as error:
                job.end([error] * len(job.positions))
            except Exception as error:  # noqa: BLE001
                # If the thread ended here, the job's buffers and slots would never be released,
                # and one by one all threads of the link would be gone.
                job.end([OSError(repr(error))] * len(job.positions))
                self._report(error)
            job.seconds = time.monotonic() - job.begun
            job = self._exchange(job)

    def _report(self, error: Exception) -> None:
        if self._reported_error:
            return
        self._reported_error = True
        name = threading.current_thread().name
        with contextlib.suppress(Exception):  # there may be no memory for a message either
            logger.error(
                "a job of %s failed by an unexpected error: %r (logged once)",
                name,
                error,
                exc_info=error,
            )

    def _exchange(self, done: Job | None) -> Job | None:
        """Hand in a job that has ended, and wait for the next one; None once the link closes. It is
        one step under the lock, because with small blocks threads wait mostly for the lock."""
        with self._work:
            if done is not None:
                self._end(done)
                if self._free > self._count:  # another thread has taken this one's place
                    self._free -= 1
                    return None
            while self._queue or not self._closing:
                if self._closing and time.monotonic() > self._write_until:
                    self._queue.keep_only(None)
                    continue
                job = self._queue.pop(writes=self._may_write())
                if job is not None:
                    job.begun = time.monotonic()
                    self._running[job] = None
                    self._oldest = min(self._oldest, job.begun)
                    self._account(job, 1)
                    self._wake_next()
                    return job
                self._work.wait()
            return None

    def _end(self, job: Job) -> None:
        self._stuck = 0
        if job.hangs:
            self._hung.remove(job)
            self._free += 1
        else:
            del self._running[job]
            self._find_oldest()
            self._account(job, -1)
        self._done.append(job)
        if self._closing:
            self._work.notify_all()

    @property
    def _half_hang(self) -> bool:
        return 2 * self._stuck >= self._count

    def _log_hung(self) -> None:
        goes_on = f"skips it, and tries it every {PROBE_SECONDS:g} s"
        logger.warning(
            "%s: %d call(s) have not ended within %g s; FlexKV does not wait for them and %s; "
            "check the device and the way to it",
            self.name,
            len(self._hung),
            self.stall_seconds,
            goes_on if self._half_hang else "goes on with other threads",
        )

    def _find_oldest(self) -> None:
        self._oldest = next((job.begun for job in self._running), math.inf)

    def _replace_threads(self, now: float) -> None:
        probes = self._half_hang
        if self._closing or (probes and now < self._probe_at):
            return
        while self._free < (1 if probes else self._count):
            if self._free + len(self._hung) >= most_jobs(self._count):
                return
            try:
                self._start_thread()
            except RuntimeError:  # the system has no thread for us now
                return
            self._free += 1

    def _start_thread(self) -> None:
        self._threads = [each for each in self._threads if each.is_alive()]
        name = f"{self.name}-{next(self._numbers)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _may_write(self) -> bool:
        return self._reads == 0 and self._writing < self._write_bytes

    def _account(self, job: Job, sign: int) -> None:
        # A job that runs keeps its priority: only waiting ones are raised.
        if job.writes:
            self._writing += sign * job.size
        else:
            self._reads += sign

    def _wake_next(self) -> None:
        """Wake a thread if a job can begin."""
        writes = self._queue.waiting(Priority.WRITE)
        if len(self._queue) > writes or (writes and self._may_write()):
            self._work.notify()
