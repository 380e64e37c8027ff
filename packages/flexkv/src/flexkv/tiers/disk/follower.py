# SPDX-License-Identifier: Apache-2.0
"""A tier that only reads folders that other processes of this machine write. It is for ranks that
hold the same blocks as the rank that owns the folder."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from functools import partial

from flexkv.eviction import RequestContext
from flexkv.tiers.base import BlockResult, TierFigures, Traffic
from flexkv.tiers.disk import cache_directory
from flexkv.tiers.disk.drive import QUEUE_BYTES, THREADS
from flexkv.tiers.disk.files import Files, OsFiles, reason_of
from flexkv.tiers.disk.followed import FollowedFolder
from flexkv.tiers.disk.reader import Record
from flexkv.tiers.failures import FailureLog
from flexkv.tiers.job import Job, Outcome, Priority
from flexkv.tiers.link import Link

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""The least seconds between two looks at the owners' tables. Comparing a table of 100,000 blocks
takes 5 ms."""
CLOSE_SECONDS = 5.0
"""Seconds that `close` waits for reads to end. Not tuned."""


class FollowerTier:
    """Reads all folders with blocks of one fingerprint, whoever owns them. See `blocking.Blocks`.

    A block is found up to `LOOK_SECONDS` after its owner has written it. Every write is dropped.

    Args:
        roots: cache directories. Folders that appear in them later are read too.
        fingerprint: fingerprint of the blocks, hexadecimal.
        slot_bytes: bytes of a block.
        stall_seconds: a read that takes longer hangs. While half of the threads hang and no read
            ends, lookups find nothing.
        files: the system calls; the real ones if None.
    """

    def __init__(
        self,
        roots: Sequence[str],
        fingerprint: str,
        slot_bytes: int,
        *,
        stall_seconds: float,
        files: Files | None = None,
    ) -> None:
        self._roots = list(roots)
        self._fingerprint = fingerprint
        self._slot_bytes = slot_bytes
        self._files = files or OsFiles()
        self._link = Link("flexkv-follower", THREADS, 0, QUEUE_BYTES, stall_seconds)
        self._folders: dict[str, FollowedFolder] = {}
        self._refused: set[str] = set()
        self._next_look = 0.0
        self._looked: threading.Event | None = None  # set when the look under way has ended
        self._gone: set[str] = set()
        self._tickets = itertools.count(1)
        self._jobs: dict[Job, tuple[int, int, FollowedFolder, Record]] = {}
        self._results: list[BlockResult] = []
        self._traffic = Traffic()
        self._failures = FailureLog("folders of other ranks")

    @property
    def figures(self) -> TierFigures:
        blocks = sum(map(len, list(self._folders.values())))
        waiting = self._link.queued_bytes
        return TierFigures(blocks, blocks, 0, 0, len(self._jobs), waiting, {}, {}, 0, self._traffic)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self._link.stalled:
            return [False] * len(keys)
        found = [self._find(key) is not None for key in keys]
        if not all(found) and time.monotonic() >= self._next_look and self._look():
            found = [self._find(key) is not None for key in keys]
        return found

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview], priority: Priority) -> int:
        ticket = next(self._tickets)
        jobs = []
        for position, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            place = self._find(key)
            if place is None:
                self._results.append(BlockResult(ticket, position, Outcome.MISSING))
                continue
            folder, record = place
            job = Job(priority, len(buffer), partial(_read, folder, record, buffer))
            self._jobs[job] = (ticket, position, folder, record)
            jobs.append(job)
        self._link.submit(*jobs)
        return ticket

    def write(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        after: Sequence[bytes | None] | None = None,
    ) -> int:
        ticket = next(self._tickets)
        positions = range(len(keys))
        self._results += [BlockResult(ticket, each, Outcome.DROPPED) for each in positions]
        return ticket

    def began(self, keys: Sequence[bytes], context: RequestContext, now: float) -> None:
        """Do nothing; see `touch`."""

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        """Do nothing; see `touch`."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Do nothing: the owner of a folder knows the order of use."""

    def clear(self) -> None:
        """Do nothing: only the owner of a folder clears it."""

    def empty(self) -> None:
        """Do nothing, as `clear` does."""

    def cancel(self, ticket: int) -> None:
        self._link.cancel([job for job, (of, *_) in self._jobs.items() if of == ticket])

    def poll(self) -> list[BlockResult]:
        self._link.note_hung()
        for job in self._link.poll():
            if job not in self._jobs:  # a look
                continue
            ticket, position, folder, record = self._jobs.pop(job)
            (outcome,) = job.outcomes
            if outcome is Outcome.DONE:
                self._traffic.add(job.size, job.seconds, writes=False)
            elif outcome is not Outcome.DROPPED:
                self._failures.note("reads from", job.error)
                folder.drop(record)
            self._results.append(BlockResult(ticket, position, outcome))
        results, self._results = self._results, []
        return results

    def close(self, flush_seconds: float = 0.0) -> bool:
        ended = self._link.close(CLOSE_SECONDS)
        if ended:
            for folder in self._folders.values():
                folder.close()
        self._folders.clear()
        return ended

    def _find(self, key: bytes) -> tuple[FollowedFolder, Record] | None:
        for folder in list(self._folders.values()):  # a look may add one
            record = folder.find(key)
            if record is not None:
                return folder, record
        return None

    def _look(self) -> bool:
        """Bring the copies of all tables up to date, and open new folders. A thread of the link
        does that, because a mount may hang and others wait for the caller. Returns whether it has
        ended within the time of a read."""
        if self._looked is not None and not self._looked.is_set():
            return False
        looked = self._looked = threading.Event()

        def look() -> list[Outcome]:
            try:
                self._look_at_all()
            finally:
                looked.set()
            return [Outcome.DONE]

        self._link.submit(Job(Priority.LOAD, 0, look))
        ended = looked.wait(self._link.stall_seconds)
        for path in self._gone if ended and not self._jobs else ():
            self._folders.pop(path).close()
        self._next_look = time.monotonic() + LOOK_SECONDS
        return ended

    def _look_at_all(self) -> None:
        gone = set()
        for root in self._roots:
            for number in range(cache_directory.MAX_OWNERS):
                path = cache_directory.path_of(root, self._fingerprint, number)
                # Numbers may have gaps: a folder is removed when its owner has ended.
                is_there = path in self._folders or os.path.isdir(path)
                if is_there and not self._look_at(path) and path in self._folders:
                    gone.add(path)
        self._gone = gone

    def _look_at(self, path: str) -> bool:
        """Look at one folder. Returns False if it is gone or cannot be read."""
        try:
            if path not in self._folders:
                self._folders[path] = FollowedFolder(path, self._slot_bytes, self._files)
            return self._folders[path].look()
        except OSError as error:
            if path not in self._refused:
                reason = reason_of(error)
                logger.warning(
                    "cannot read %s: %s; its blocks are recomputed; check the owner and the mode "
                    "of the folder (logged once)",
                    path,
                    reason,
                )
            self._refused.add(path)
            return False


def _read(folder: FollowedFolder, record: Record, buffer: memoryview) -> list[Outcome]:
    return [folder.read(record, buffer)]
