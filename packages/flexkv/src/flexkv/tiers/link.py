# SPDX-License-Identifier: Apache-2.0
"""A link to a device below host memory: a bounded queue, and threads that run its jobs.

Reads go before writes: while a read waits or runs, no write begins. The thread that submits jobs
polls for their results; the link's threads call nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable

from flexkv.tiers.job import Job, Outcome, Priority
from flexkv.tiers.queue import LinkQueue

logger = logging.getLogger(__name__)


class Link:
    """The queue and the threads of one device. One thread calls the methods; only `close` waits.

    Args:
        name: prefix of the threads' names.
        threads: how many jobs run at once.
        write_bytes: no further write begins while this many bytes are being written.
        queue_bytes: see `LinkQueue`.
        stall_seconds: a job that runs longer makes the link `stalled` until the job ends.

    Attributes:
        name: the name, as given.
        queue_bytes: the bound of the queue, as given.
        stall_seconds: the time after which the link is stalled, as given.
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
        self._running: dict[Job, None] = {}
        self._oldest = math.inf  # when the first of them began
        self._reads = 0
        self._writing = 0
        self._closing = False
        self._write_until = 0.0
        self._told_error = False
        self._work = threading.Condition()
        self._done: deque[Job] = deque()
        # Daemons: a thread that hangs in its device must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the jobs that wait."""
        return self._queue.size

    @property
    def stalled(self) -> bool:
        """Whether a job has run for longer than `stall_seconds`."""
        # Without the lock: a thread that holds it may wait for Python's own lock for a while.
        return time.monotonic() - self._oldest > self.stall_seconds

    def submit(self, *jobs: Job) -> None:
        """Queue jobs. If the queue is full, it drops jobs, which `poll` returns as DROPPED."""
        with self._work:
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

    def hasten(self, jobs: Iterable[Job], priority: Priority) -> None:
        """Raise those of `jobs` that have not begun to `priority`."""
        with self._work:
            self._queue.raise_to(jobs, priority)
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
            return not self._running

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
        for running jobs until `timeout` has passed. Idempotent.

        Args:
            timeout: seconds.

        Returns:
            Whether all threads have ended. If not, the device hangs.
        """
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
                job.end([error] * job.blocks)
            except Exception as error:  # noqa: BLE001
                # If the thread ended here, the job's buffers and slots would never be released,
                # and one by one all threads of the link would be gone.
                job.end([OSError(repr(error))] * job.blocks)
                self._report(error)
            job.seconds = time.monotonic() - job.begun
            job = self._exchange(job)

    def _report(self, error: Exception) -> None:
        if self._told_error:
            return
        self._told_error = True
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
                del self._running[done]
                self._oldest = next((job.begun for job in self._running), math.inf)
                self._account(done, -1)
                self._done.append(done)
                if self._closing:
                    self._work.notify_all()
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

    def _may_write(self) -> bool:
        return self._reads == 0 and self._writing < self._write_bytes

    def _account(self, job: Job, sign: int) -> None:
        # A job that runs keeps its priority: only waiting ones are hastened.
        if job.priority is Priority.WRITE:
            self._writing += sign * job.size
        else:
            self._reads += sign

    def _wake_next(self) -> None:
        """Wake a thread if a job can begin."""
        writes = self._queue.waiting(Priority.WRITE)
        if len(self._queue) > writes or (writes and self._may_write()):
            self._work.notify()
