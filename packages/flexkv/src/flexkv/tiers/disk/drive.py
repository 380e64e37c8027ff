# SPDX-License-Identifier: Apache-2.0
"""One cache directory at run time: its store, its link, and the bookkeeping between them."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from flexkv.index.ages import UNKNOWN
from flexkv.index.slot_index import SlotIndex, drain_changes
from flexkv.tiers import circuit, device
from flexkv.tiers.device import BlockDevice, close_seconds
from flexkv.tiers.disk.descriptions import DescribedSlots
from flexkv.tiers.disk.disk_store import DiskStore, new_epoch
from flexkv.tiers.disk.runs import (
    READ_RUN_BYTES,
    WRITE_RUN_BYTES,
    blocks_per_run,
    find_runs,
)
from flexkv.tiers.disk.slabs import slots_per_slab
from flexkv.tiers.disk.table import encode_record
from flexkv.tiers.disk.upkeep import Upkeep
from flexkv.tiers.job import Job, Outcome, Priority, Result, Urgency
from flexkv.tiers.link import Link
from flexkv.types.backlog import share_of

logger = logging.getLogger(__name__)

THREADS = 8
"""Jobs at once on one directory. On a virtual drive of 4 GB/s, 12 and 16 read blocks of 1 MiB at
most 3 % faster and wrote them 13 % slower."""

WRITE_BYTES = 8 << 20
"""No further write begins while as many bytes are being written. That is all that a read waits
for, as none begins while a read waits or runs."""

QUEUE_BYTES = 1 << 30
"""The most bytes that wait for one directory. A drive of 4 GB/s writes them in a quarter of a
second. Blocks that waited longer would be held in host memory for too long. Not tuned."""

_RATE_WEIGHT = 0.1
"""Weight of the last write in the average rate: if a drive becomes slow, blocks go to others within
about ten writes. Not tuned."""

_FIRST_RATE = 1e9
"""Assumed bytes per second of a drive that has written nothing yet. Only ratios between drives
count."""

_TRUST_SECONDS = 60.0
"""A drive that has written nothing for this time gets the next block, whatever its rate was. At low
load the fastest drive takes all blocks, and a drive that was once slow would never be measured
again. Not tuned."""

_ENDED_BLOCKS = 16
"""The least number of written blocks that one call returns, or one job if it has more. The engine's
step takes about 0.005 ms for the result of each."""

_REMOVED_BLOCKS = 256
"""Blocks that are removed at once because of their age: about a millisecond. Not tuned."""

_SEARCHED_SLOTS = 1 << 20
"""Slots that are searched at once for blocks that are too old: about a millisecond."""

_HANGS_AT_CLOSE = "%s hangs: FlexKV leaves its files open until the process ends; check the drive"


class EndedJobs:
    """The ended jobs of a drive. During one step of the engine a drive may end more writes than the
    step has time for, so `take` returns some of them. Single-threaded."""

    def __init__(self) -> None:
        self._writes: deque[Job] = deque()
        self._blocks = 0

    def take(self, ended: Iterable[Job], all_writes: bool) -> list[Job]:
        """Of these jobs and those of earlier calls all reads, because requests wait for them, and
        the oldest writes or all. The next calls return the others."""
        taken: list[Job] = []
        for job in ended:
            if job.writes:
                self._writes.append(job)
                self._blocks += len(job.positions)
            else:
                taken.append(job)
        if not self._writes:
            return taken
        most = self._blocks if all_writes else share_of(self._blocks, _ENDED_BLOCKS)
        while self._writes and most > 0:
            job = self._writes.popleft()
            self._blocks -= len(job.positions)
            most -= len(job.positions)
            taken.append(job)
        return taken


class Drive:
    """Reads and writes of blocks in one directory. For one thread; nothing waits but `close`.

    Owns the opened store and the link. Writes up to `day_bytes` in 24 hours; None for no limit.
    `expired_blocks`: see `TierFigures`.
    """

    def __init__(self, store: DiskStore, link: Link, day_bytes: int | None) -> None:
        self.link = link
        self.index: SlotIndex = store.index
        self.slot_bytes = store.slot_bytes
        self.device = BlockDevice(
            store.path,
            link,
            store.slot_bytes,
            pause_seconds=circuit.PAUSE_SECONDS,
            check="the drive",
        )
        self._store = store
        self._day_bytes = day_bytes
        self._seal = store.seal
        self._is_private = False
        self._is_lost = False
        self._generation = store.generation
        # Slots, and for a write the checksums of the blocks that are done.
        self._running: dict[Job, tuple[Sequence[int], Sequence[bytes | None]]] = {}
        self._ended = EndedJobs()
        self._upkeep = Upkeep(f"{link.name}-upkeep", store)
        self._described = DescribedSlots(None, self.index.num_slots)
        self._ages = store.ages
        self.expired_blocks = store.old_blocks
        store.ledger.circuits = {"reads": self.device.reads, "writes": self.device.writes}
        if store.ledger.open_until or store.ledger.problem:  # of the owner before
            self._upkeep.count()
        self._write_rate = _FIRST_RATE
        self._last_write = time.monotonic()
        self._measures = False
        self._reported_damage = False

    @property
    def path(self) -> str:
        return self._store.path

    @property
    def readable(self) -> bool:
        return self.device.can_read and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether the files were removed, and are not open again yet."""
        return self._is_lost or bool(self._upkeep.lost)

    @property
    def room(self) -> int:
        """The number of blocks that may be written now, bounded by the queue, the write budget and
        the slots that are not in use. 0 if the circuit is open, the link is stalled, or the
        files are lost."""
        if not self.device.can_write or self.is_lost:
            return 0
        queue_bytes = max(0, self.link.queue_bytes - self.link.queued_bytes)
        left_bytes = min(queue_bytes, self._store.ledger.left(self._day_bytes))
        return min(int(left_bytes // self.slot_bytes), self.index.usable_slots)

    @property
    def is_outdated(self) -> bool:
        """Whether the rate of writes was measured too long ago."""
        return time.monotonic() - self._last_write > _TRUST_SECONDS

    def write_seconds(self, blocks: int) -> float:
        """Expected seconds until a write of so many blocks is done, to compare drives: waiting
        bytes and these at the measured rate."""
        return (self.link.queued_bytes + blocks * self.slot_bytes) / self._write_rate

    def read(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], urgency: Urgency
    ) -> list[Job]:
        """Begin to read blocks that the index has. The jobs' positions are those in `keys`."""
        slots = [slot for slot in self.index.lease_all(keys) if slot is not None]
        assert len(slots) == len(keys)
        if self._ages is not None:
            self._ages.note(keys, self.index.times(slots))
        jobs = [
            self._reading(
                run,
                [slots[i] for i in run],
                [keys[i] for i in run],
                [buffers[i] for i in run],
                urgency,
            )
            for run in self._runs(slots, READ_RUN_BYTES)
        ]
        self.device.begin(*jobs)
        return jobs

    def write(
        self, slots: Sequence[int], keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[Job]:
        """Begin to write blocks to slots that the index has reserved for them, at most `room`; as
        `read`. Their order is that of a prefix: the last counts as used longest ago, after a
        restart, too."""
        self._measures |= self.is_outdated
        self._last_write = time.monotonic()
        self._store.ledger.book_write(len(slots) * self._store.slot_bytes)
        self._upkeep.count()
        self._generation += len(slots)
        latest = self._generation
        times = [UNKNOWN] * len(keys) if self._ages is None else self._ages.of(keys)
        self.index.set_times(slots, times)
        jobs = [
            self._writing(
                run,
                [slots[i] for i in run],
                [keys[i] for i in run],
                [latest - i for i in run],
                [buffers[i] for i in run],
                stored=[times[i] for i in run],
            )
            for run in self._runs(slots, WRITE_RUN_BYTES)
        ]
        self.device.begin(*jobs)
        return jobs

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count the blocks of a prefix that are here as used, over restarts too."""
        index = self.index
        slots = index.touch(keys)
        fields = zip(slots, index.checksums(slots), index.times(slots), strict=True)
        for slot, checksum, stored in fields:
            key = index.key_of(slot)
            assert key is not None
            index.lease(key)
            self._generation += 1
            record = encode_record(slot, self._seal, key, checksum, self._generation, stored=stored)
            self._upkeep.renew(slot, record)

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `IndexedTier.remove`. Returns the number of removed blocks."""
        leased = self.index.lease_all(list(dict.fromkeys(keys)))
        slots = [slot for slot in leased if slot is not None]
        for slot in slots:
            self._erase(slot)
        return len(slots)

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether its block is here and not too old."""
        return self.index.present(keys, 0 if self._ages is None else self._ages.oldest)

    def remove_old(self) -> None:
        """Remove some of the blocks that are too old."""
        if self._ages is None:
            return
        old = self.index.take_old(self._ages.oldest, _REMOVED_BLOCKS, _SEARCHED_SLOTS)
        self.expired_blocks += len(old)
        for slot in old:
            self._erase(slot)

    def watch(self) -> None:
        """See `IndexedTier.watch`. The blocks of a slot are changes once their descriptions are
        read."""
        self.index.watch()
        self._described = self._upkeep.read_descriptions(self._seal)

    @property
    def has_changes(self) -> bool:
        """See `IndexedTier.has_changes`."""
        return self.index.has_changes_before(self._described.stop_slot)

    def drain_changes(self, limit: int) -> dict[bytes, bool]:
        """See `IndexedTier.drain_changes`. Blocks with descriptions come in small numbers."""
        described = self._described
        described.forget(self.index.noted_slots)
        self._upkeep.resume()
        return drain_changes(self.index, described.limit(limit), described.stop_slot)

    def describe(self, described: Mapping[bytes, bytes]) -> None:
        """See `IndexedTier.describe`."""
        for key, slot in zip(described, self.index.ready_slots(described), strict=True):
            if slot is not None:
                self._upkeep.describe(slot, self._seal, key, described[key])

    def take_descriptions(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """See `IndexedTier.take_descriptions`."""
        return self._described.take(keys)

    def clear(self) -> None:
        """Remove all blocks; see `LowerTier.clear`."""
        self._is_private = True
        self.empty()

    def empty(self) -> None:
        """Remove all blocks; see `LowerTier.empty`."""
        self._forget()
        epoch = new_epoch()
        # No table has the seal of blocks whose keys have another meaning in this process. A restart
        # finds none of them.
        self._seal = new_epoch() if self._is_private else self._store.seal_of(epoch)
        self._upkeep.reset(epoch)

    def _forget(self) -> None:
        self.index.clear()
        self._upkeep.stop_reading()
        self._described = DescribedSlots(None, self.index.num_slots)

    def sync(self) -> Future[str]:
        """Begin to make all removals so far durable; see `Upkeep.sync`."""
        return self._upkeep.sync()

    def poll(self, *, all_writes: bool = False) -> list[Job]:
        """Jobs of `read` and `write` that have ended. Returns all reads, because requests wait for
        them, and some or all of the writes. The next calls return the other writes."""
        for slot in self._upkeep.poll():
            self.index.release(slot)
        if self.is_lost:
            self._open_again()
        ended = self._ended.take(self.device.poll(), all_writes)
        for job in ended:
            slots, checksums = self._running.pop(job)
            if job.writes:
                self._note_rate(job)
                for each in zip(slots, job.outcomes, checksums, strict=True):
                    self._complete_write(*each)
            else:
                for slot, outcome in zip(slots, job.outcomes, strict=True):
                    self._complete_read(slot, outcome)
        if ended:
            # Requested earlier, the save could miss the counts of these jobs.
            self._upkeep.count()
        return ended

    def _open_again(self) -> None:
        """Forget the blocks of lost files. Open the files once no job uses them."""
        if not self._is_lost:
            self._is_lost = True
            self._forget()
        elif not self._upkeep.lost:
            self._is_lost = False
            self.empty()  # no table has had the epoch
        elif not self._running:
            self._upkeep.reopen()

    def drain(self) -> bool:
        """See `LowerTier.drain`. Blocks that were being written are forgotten."""
        if not self.device.drain():
            return False
        self._ended = EndedJobs()
        self._running.clear()
        for slot in self.index.end_uses(self._upkeep.slots):
            self._upkeep.erase(slot)
        return True

    def begin_close(self, flush_seconds: float = 0.0) -> None:
        """See `LowerTier.begin_close`. `close` waits for the writes that begin. Idempotent."""
        self.device.begin_close(flush_seconds)

    def close(self, waited: float = 0.0, flush_seconds: float = 0.0) -> bool:
        """End the link, then close the store. False if jobs hang; their files stay open. `waited`:
        seconds since `begin_close`, which had the same `flush_seconds`."""
        if not self.link.close(max(0.0, close_seconds(flush_seconds) - waited)):
            logger.warning(_HANGS_AT_CLOSE, self.path)
            return False
        self.poll(all_writes=True)
        # Blocks of dropped writes must not return after a restart.
        writes = (slots for job, (slots, _) in self._running.items() if job.writes)
        for slot in itertools.chain.from_iterable(writes):
            self._upkeep.erase(slot)
        self._upkeep.count()
        if not self._upkeep.close(device.CLOSE_SECONDS):
            logger.warning(_HANGS_AT_CLOSE, self.path)
            return False
        self._running.clear()  # dropped jobs hold buffers
        self._store.close()
        return True

    def _runs(self, slots: Sequence[int], run_bytes: int) -> list[list[int]]:
        """The positions of a batch's blocks, grouped by job; see `find_runs`."""
        size = self._store.slot_bytes
        # A full queue drops whole jobs: each is a small part of it.
        run_bytes = min(run_bytes, self.link.queue_bytes // THREADS)
        most = blocks_per_run(len(slots), size, run_bytes, THREADS)
        return find_runs(slots, most, slots_per_slab(size))

    def _reading(
        self,
        run: list[int],
        slots: list[int],
        keys: list[bytes],
        buffers: list[memoryview],
        urgency: Urgency,
    ) -> Job:
        """A job that reads adjacent slots."""
        checksums = self.index.checksums(slots)
        work = partial(self._store.read, slots[0], keys, checksums, self._seal, buffers)
        size = len(slots) * self._store.slot_bytes
        job = Job(urgency.priority, size, work, run, urgency.turn)
        self._running[job] = slots, ()
        return job

    def _writing(
        self,
        run: list[int],
        slots: list[int],
        keys: list[bytes],
        generations: list[int],
        buffers: list[memoryview],
        *,
        stored: list[int],
    ) -> Job:
        """A job that writes adjacent slots."""
        checksums: list[bytes | None] = [None] * len(slots)
        whole = slots[0], keys, generations, self._seal, buffers
        write = partial(self._store.write, *whole, stored=stored)

        def work() -> list[Result]:
            written = write()
            checksums[:] = [None if isinstance(each, OSError) else each for each in written]
            return [each if isinstance(each, OSError) else Outcome.DONE for each in written]

        job = Job(Priority.WRITE, len(slots) * self._store.slot_bytes, work, run)
        self._running[job] = slots, checksums
        return job

    def _note_rate(self, job: Job) -> None:
        if job.outcomes.count(Outcome.DONE) == len(job.outcomes):
            rate = job.size / max(job.seconds, 1e-6)
            weight = 1.0 if self._measures else _RATE_WEIGHT
            self._write_rate += weight * (rate - self._write_rate)
            self._measures = False

    def _complete_write(self, slot: int, outcome: Outcome, checksum: bytes | None) -> None:
        ledger = self._store.ledger
        if outcome is Outcome.DONE:
            ledger.written_blocks += 1
        # Else the record is erased, which may be that of the block that was here before.
        if checksum is None or not self.index.publish(slot, checksum):
            self._erase(slot)
        if outcome is Outcome.DROPPED:
            ledger.book_write(-self._store.slot_bytes)

    def _complete_read(self, slot: int, outcome: Outcome) -> None:
        ledger = self._store.ledger
        ledger.hit_blocks += outcome is Outcome.DONE
        if outcome is Outcome.DAMAGED:
            ledger.damaged_blocks += 1
            if not self._reported_damage:
                logger.warning(
                    "the checksum of a block in %s is wrong; it is a miss (logged once)", self.path
                )
            self._reported_damage = True
        if outcome in (Outcome.DAMAGED, Outcome.FAILED):
            self._erase(slot)
        else:
            self.index.release(slot)

    def _erase(self, slot: int) -> None:
        """Discard the block of a slot in use, erase its record, then end that use.

        The table then names no discarded block: records of free slots are erased, and records of
        evicted blocks are overwritten.
        """
        self.index.discard(slot)
        self._upkeep.erase(slot)
