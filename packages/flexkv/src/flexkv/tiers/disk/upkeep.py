# SPDX-License-Identifier: Apache-2.0
"""Upkeep of a cache directory's files, beside reads and writes of blocks.

One thread a directory does the upkeep. No caller waits for it, it does not make the drive look
stalled, and it continues while the engine is idle and does not poll.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

from flexkv.system.retries import Failures
from flexkv.tiers.disk import table
from flexkv.tiers.disk.descriptions import DescribedSlots
from flexkv.tiers.disk.disk_store import DiskStore

logger = logging.getLogger(__name__)

SAVE_SECONDS = 1.0
"""Seconds between two saves of the counters, each a write of a few hundred bytes. A kill loses the
counts since the last save. Not tuned."""


LOOK_SECONDS = 1.0
"""Seconds between two looks whether a cleaner has removed the files. Not tuned."""

_WAITING_DESCRIPTIONS = 8192
"""The most descriptions that wait to be written: about 8 MB. Not tuned."""


class _Task:
    """A task that runs when it is wanted and due, and again until it succeeds; then it pauses for
    some seconds. Its action waits for the disk. `due`: by time.monotonic()."""

    def __init__(self, action: Callable[[], None], pause: float, failure: str) -> None:
        self.wanted = False
        self.running = False
        self.due = 0.0
        self._action = action
        self._pause = pause
        self._failure = failure
        self._failures = Failures()

    @property
    def failure(self) -> str:
        """The text of the last failure; empty after a success."""
        return self._failures.text

    def run(self, path: str, last: bool) -> None:
        """Run the task. If it fails and this is not the last run, it stays wanted."""
        self.running = True
        self.wanted = False  # who wants it from now on wants it done once more
        try:
            self._action()
        except Exception as error:  # noqa: BLE001
            # Whatever it is: the thread has more to do, and this would never be done.
            self.wanted = not last
            is_new = self._failures.note(error)
            self.due = time.monotonic() + self._failures.pause
            if is_new or last:
                with contextlib.suppress(Exception):  # there may be no memory for it either
                    logger.error(self._failure, path, error)
        else:
            self._failures.end()
            self.due = time.monotonic() + self._pause
        self.running = False


class Upkeep:
    """Makes resets durable, writes single records, reads and writes descriptions, and saves
    counters, in this order. All methods are for one thread, and none waits but `close`. The store
    is borrowed until `close` returned True. `lost`: why the files are not those of the folder any
    more; empty if they are. The caller calls `reopen` once no job uses them."""

    def __init__(self, name: str, store: DiskStore) -> None:
        self._store = store
        self._work = threading.Condition()
        self._epoch = 0
        self._reset = _Task(
            self._invalidate,
            0.0,
            "the reset of %s cannot be written to its table (%s); FlexKV retries until it can. If "
            "the process ends while nothing on disk records it, remove that folder before the next "
            "start: it has blocks from before the reset",
        )
        self._save = _Task(
            self._save_ledger,
            SAVE_SECONDS,
            "the counters of %s cannot be written (%s); FlexKV retries",
        )
        self._erasures = _Task(
            self._erase_left,
            0.0,
            "the records of removed blocks in %s cannot be erased (%s); FlexKV retries until they "
            "can. If the process ends before, the next start finds these blocks",
        )
        self.lost = ""
        self._looks = _Task(
            self._look,
            LOOK_SECONDS,
            "FlexKV cannot check the files of %s (%s), and retries; check the drive",
        )
        self._looks.wanted, self._looks.due = True, time.monotonic() + LOOK_SECONDS
        self._reopening = _Task(
            self._reopen,
            0.0,
            "%s cannot be opened again (%s); FlexKV goes on without it and retries",
        )
        self._records: deque[tuple[int, bytes] | Future[str]] = deque()
        self._left: list[int] = []  # slots whose erasure has failed
        self._written: deque[int] = deque()
        self._unsynced = ""  # the error of the last sync
        self._described: deque[tuple[int, int, bytes, bytes]] = deque()
        self._read: DescribedSlots | None = None
        self._description_failures = Failures()
        self._closing = False
        # A daemon: a thread that hangs in its device must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def reset(self, epoch: int) -> None:
        """Make the next process find no block of before in this folder; see
        `DiskStore.invalidate`."""
        with self._work:
            self._epoch = epoch
            self._reset.wanted, self._reset.due = True, 0.0
            self._work.notify()

    def erase(self, slot: int) -> None:
        """Erase the record of a slot, again until that succeeds. `poll` returns the slot
        afterwards."""
        self._write(slot, table.EMPTY_RECORD)

    def renew(self, slot: int, record: bytes) -> None:
        """Write the record of a slot again, before any later erasure. `poll` returns the slot
        afterwards."""
        self._write(slot, record)

    def reopen(self) -> None:
        """Open the files again, which are `lost`; see `DiskStore.reopen`. Idempotent."""
        if not (self._reopening.wanted or self._reopening.running):
            with self._work:
                self._reopening.wanted = True
                self._work.notify()

    def sync(self) -> Future[str]:
        """Have the drive keep all resets and erasures so far over a power failure. The result says
        what may return; it is empty if nothing does."""
        asked: Future[str] = Future()
        with self._work:
            self._records.append(asked)
            self._work.notify()
        return asked

    def count(self) -> None:
        """Save the ledger, which has changed, when it is due."""
        if not self._save.wanted:
            with self._work:
                self._save.wanted = True
                self._work.notify()

    def describe(self, slot: int, seal: int, key: bytes, text: bytes) -> None:
        """Write the description of a block. It is lost if too many wait to be written."""
        if len(self._described) >= _WAITING_DESCRIPTIONS:
            return
        with self._work:
            self._described.append((slot, seal, key, text))
            self._work.notify()

    def read_descriptions(self, seal: int) -> DescribedSlots:
        """Begin to read the descriptions that are in the folder, a part at a time. The caller gets
        what the thread reads into, and calls `resume` when it has taken some."""
        descriptions = self._store.descriptions
        parts = descriptions.read(seal) if descriptions and descriptions.exists else None
        with self._work:
            self._read = DescribedSlots(parts, self._store.index.num_slots)
            self._work.notify()
            return self._read

    def stop_reading(self) -> None:
        """Read no more descriptions."""
        self._read = None

    def resume(self) -> None:
        """Read the next descriptions, if there is room for them."""
        if self._reads:
            with self._work:
                self._work.notify()

    @property
    def slots(self) -> list[int]:
        """The slots that `poll` has not returned yet, once for each time that it will."""
        with self._work:
            # The record that is being written is the first of these until it is in `_written`.
            records = [each[0] for each in self._records if not isinstance(each, Future)]
            return [*self._written, *self._left, *records]

    def poll(self) -> list[int]:
        """Slots whose records were written since the last call."""
        written = self._written
        return [written.popleft() for _ in range(len(written))]

    def close(self, timeout: float) -> bool:
        """Run all wanted tasks once, for up to `timeout` seconds. Idempotent.

        Returns whether the thread has ended; if not, the device hangs.
        """
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (step := self._next()) is not None:
            step()

    def _next(self) -> Callable[[], None] | None:
        """Wait until a step is due, and return it; None once the upkeep ends."""
        with self._work:
            while True:
                now = math.inf if self._closing else time.monotonic()  # at the end all is due
                soonest = math.inf
                for due, step in self._wanted():
                    if due <= now:
                        return step
                    soonest = min(soonest, due)
                if self._closing:
                    return None
                self._work.wait(None if soonest == math.inf else soonest - now)

    def _wanted(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """The wanted steps in their order, each with the time when it is due."""
        if self.lost and not self._closing:
            yield from self._run_of(self._reopening)
            return
        if not self._closing:
            yield from self._run_of(self._looks)
        yield from self._run_of(self._reset)
        if self._records:
            yield 0.0, self._do_next
        yield from self._run_of(self._erasures)
        if self._described:
            yield 0.0, self._describe_next
        if self._reads:
            yield 0.0, self._read_part
        yield from self._run_of(self._save)

    def _run_of(self, task: _Task) -> Iterator[tuple[float, Callable[[], None]]]:
        if task.wanted:
            yield task.due, partial(task.run, self._store.path, self._closing)

    def _write(self, slot: int, record: bytes) -> None:
        with self._work:
            self._records.append((slot, record))
            self._work.notify()

    def _do_next(self) -> None:
        """Write the first record, or answer the first `sync`."""
        first = self._records[0]
        if isinstance(first, Future):
            first.set_result(self._sync())
            self._records.popleft()
            return
        slot, record = first
        done = self._try_write(slot, record) is None or record != table.EMPTY_RECORD
        with self._work:
            self._records.popleft()
            (self._written if done else self._left).append(slot)
            self._erasures.wanted |= not done

    def _try_write(self, slot: int, record: bytes) -> Exception | None:
        try:
            self._store.write_record(slot, record)
        except Exception as error:  # noqa: BLE001 - whatever it is: the thread has more to do
            return error
        return None

    def _erase_left(self) -> None:
        """Erase the records again whose erasure has failed. Raises the last error if one stays."""
        error = None
        left: list[int] = []
        written: list[int] = []
        for slot in self._left:
            failure = self._try_write(slot, table.EMPTY_RECORD)
            (written if failure is None else left).append(slot)
            error = failure or error
        with self._work:
            self._written += written
            self._left = left
        if error is not None:
            raise error

    def _sync(self) -> str:
        """See `sync`."""
        path = self._store.path
        for task in (self._reset, self._erasures):
            if task.wanted:
                task.run(path, self._closing)
        try:
            self._store.sync()
        except Exception as error:  # noqa: BLE001 - whatever it is: the caller is told
            self._unsynced = str(error) or repr(error)
        reasons = []
        if self._reset.failure:
            reasons.append(f"the reset of {path} cannot be written ({self._reset.failure})")
        if self._left:
            reasons.append(
                f"{len(self._left)} records in {path} cannot be erased ({self._erasures.failure})"
            )
        if self._unsynced:
            reasons.append(f"a power failure may undo removals in {path} ({self._unsynced})")
        return "; ".join(reasons)

    @property
    def _reads(self) -> bool:
        read = self._read
        return read is not None and read.is_wanted and not self._closing

    def _read_part(self) -> None:
        read = self._read
        if read is None:
            return
        try:
            read.read_part()
        except Exception as error:  # noqa: BLE001 - events do without, and must not wait for ever
            read.stop()
            self._note_descriptions("read", error)

    def _describe_next(self) -> None:
        assert self._store.descriptions is not None
        try:
            self._store.descriptions.write(*self._described.popleft())
        except Exception as error:  # noqa: BLE001 - whatever it is: the thread has more to do
            self._note_descriptions("written", error)

    def _note_descriptions(self, what: str, error: Exception) -> None:
        if self._description_failures.note(error):
            with contextlib.suppress(Exception):
                logger.warning(
                    "the descriptions of blocks in %s cannot be %s (%s); after a restart, events "
                    "report these blocks without tokens",
                    self._store.path,
                    what,
                    error,
                )

    def _invalidate(self) -> None:
        self._store.invalidate(self._epoch)
        self._unsynced = ""

    def _look(self) -> None:
        lost = self._store.lost()
        if lost:
            logger.error(
                "%s is not used any more, and its blocks are lost: %s; FlexKV opens it again; let "
                "no other program remove files there while an engine runs",
                self._store.path,
                lost,
            )
            self.lost = lost
        else:
            self._looks.wanted = True

    def _reopen(self) -> None:
        self._store.reopen()
        logger.warning("%s is open again, without blocks", self._store.path)
        self.lost = ""
        self._looks.wanted = True
        self._save.wanted = True

    def _save_ledger(self) -> None:
        if self.lost:
            return
        try:
            self._store.save_ledger(self._store.ledger.dump())
        except FileNotFoundError:
            self._look()  # the folder was removed, which says more than the error of one file
            if not self.lost:
                raise
