# SPDX-License-Identifier: Apache-2.0
"""The disk tier: the stores of all cache directories as one `LowerTier`."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from flexkv.eviction import (
    FOLLOWING,
    NO_GUARD,
    OTHERWISE,
    LRUPolicy,
    OnePolicy,
    RequestContext,
)
from flexkv.tiers.base import MAX_KEY_BYTES, BlockResult, TierFigures, Traffic
from flexkv.tiers.batches import Batches
from flexkv.tiers.circuit import CircuitState
from flexkv.tiers.disk.drive import Drive
from flexkv.tiers.disk.opening import Opening
from flexkv.tiers.disk.write_placement import WritePlacement
from flexkv.tiers.job import Job, Outcome, Priority, Urgency
from flexkv.types.changes import Medium, note

logger = logging.getLogger(__name__)

_LISTED = 2048
"""Slots of one part of `listed`: below a millisecond. Not tuned."""

_REPORTED_BLOCKS = 256
"""Blocks of a directory that opened late of which the policy learns in one step: about 1 ms. Not
tuned."""


class DiskTier:
    """Keeps each block on one of this machine's disks. See `IndexedTier`. Owns the openings of its
    directories, each of `num_slots`. `connecting` are those whose drives are not in use yet; a
    later poll adopts them. `policy` makes the eviction policy for a number of slots."""

    medium = Medium.DISK

    def __init__(
        self, openings: Sequence[Opening], policy: Callable[[int], OnePolicy], num_slots: int
    ) -> None:
        self.connecting = list(openings)
        self._drives: list[Drive] = []
        self._batches = Batches()
        self._closing = 0.0
        self._reported_long_key = self._watched = False
        chosen = policy(num_slots * len(openings))
        self._policy = None if isinstance(chosen, LRUPolicy) else chosen
        self._adopt()
        for drive in self._drives:
            if drive.index.is_reporting:
                drive.index.report_restored(num_slots)

    @property
    def drives(self) -> Sequence[Drive]:
        return self._drives

    @property
    def has_news(self) -> bool:
        connecting = self.connecting
        if connecting and any(each.drive is not None for each in connecting):
            return True
        for drive in self._drives if self._policy is not None else ():
            if drive.index.is_reporting:
                return True
        return False

    @property
    def figures(self) -> TierFigures:
        reads = Counter([CircuitState.CONNECTING] * len(self.connecting))
        writes = Counter(reads)
        traffic = Traffic()
        written = blocks = slots = evicted = expired = queued = openings = 0
        for drive in self._drives:
            device, index = drive.device, drive.index
            own = device.traffic
            traffic.read_bytes += own.read_bytes
            traffic.read_seconds += own.read_seconds
            traffic.written_bytes += own.written_bytes
            traffic.written_seconds += own.written_seconds
            written += own.written_bytes // drive.slot_bytes
            blocks += len(index)
            slots += index.num_slots
            evicted += index.evictions
            expired += drive.expired_blocks
            queued += device.link.queued_bytes
            lost = CircuitState.CONNECTING if drive.is_lost else None
            reads[lost or device.shown(device.reads)] += 1
            writes[lost or device.shown(device.writes)] += 1
            openings += device.openings
        return TierFigures(
            written_blocks=written,
            blocks=blocks,
            slots=slots,
            evicted_blocks=evicted,
            expired_blocks=expired,
            queued_blocks=self._batches.queued_blocks,
            queued_bytes=queued,
            reads=reads,
            writes=writes,
            openings=openings,
            traffic=traffic,
            policy=OTHERWISE if self._policy is None else FOLLOWING,
            guard=NO_GUARD if self._policy is None else self._policy.guard_state(),
        )

    def watch(self) -> None:
        self._watched = True
        for drive in self._drives:
            drive.watch()

    @property
    def has_changes(self) -> bool:
        return any(drive.has_changes for drive in self._drives)

    def drain_changes(self, limit: int) -> dict[bytes, bool]:
        changed: dict[bytes, bool] = {}
        for drive in self._drives:
            others = [other.index for other in self._drives if other is not drive]
            for key, ready in drive.drain_changes(limit).items():
                # Two drives have the same block if a directory was added or removed meanwhile.
                if not any(other.is_reported(key) for other in others):
                    note(changed, key, ready)
        return changed

    def listed(self) -> Iterator[list[bytes]]:
        for index in (drive.index for drive in self._drives):
            for start in range(0, index.num_slots, _LISTED):
                slots = range(start, min(start + _LISTED, index.num_slots))
                yield [key for key in map(index.key_of, slots) if key is not None]

    def describe(self, described: Mapping[bytes, bytes]) -> None:
        for drive in self._drives:
            drive.describe(described)

    def take_descriptions(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        taken: dict[bytes, bytes] = {}
        for drive in self._drives:
            taken |= drive.take_descriptions(keys)
        return taken

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        wanted = list(keys)
        answers = [drive.present(wanted) for drive in self._readable()]
        if len(answers) == 1:
            return answers[0]
        return [any(answer) for answer in zip(*answers, strict=True)] or [False] * len(wanted)

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        priority: Priority,
        turn: int = 0,
    ) -> int:
        self.touch(keys)
        ticket = self._batches.new_ticket()
        wanted: dict[Drive, list[int]] = {}
        left: Sequence[int] = range(len(keys))
        for drive in self._readable():
            has = drive.present([keys[i] for i in left])
            wanted[drive] = list(itertools.compress(left, has))
            left = [i for i, each in zip(left, has, strict=True) if not each]
        self._batches.report(ticket, left, [Outcome.MISSING] * len(left))
        for drive, positions in wanted.items():
            if not positions:
                continue
            jobs = drive.read(
                [keys[i] for i in positions],
                [buffers[i] for i in positions],
                Urgency(priority, turn),
            )
            self._track(ticket, positions, drive, jobs)
        return ticket

    def write(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        after: Sequence[bytes | None] | None = None,
    ) -> int:
        ticket = self._batches.new_ticket()
        wanted: dict[Drive, tuple[list[int], list[int]]] = {}  # positions and their slots
        answers = [drive.index.has_all(keys) for drive in self._drives]
        known = zip(*answers, strict=True) if answers else [()] * len(keys)
        placement = WritePlacement(self._drives, has_policy=self._policy is not None)
        begun: set[bytes] = set()
        lost: set[bytes] = set()
        refused = False
        for position, (key, has) in enumerate(zip(keys, known, strict=True)):
            if True in has or key in begun:
                self._batches.report(ticket, [position], [Outcome.DONE])
                continue
            refused = refused or self._is_too_long(key)
            before = None if after is None else after[position]
            drive = None if refused or before in lost else placement.next()
            slot = None
            if drive is not None:
                positions, slots = wanted.setdefault(drive, ([], []))
                slot = drive.index.reserve(key, before, slots[-1] if slots else None)
                if slot is None and not drive.index.usable_slots:
                    placement.leave_out(drive)
            if slot is None:
                lost.add(key)
                self._batches.report(ticket, [position], [Outcome.DROPPED])
                continue
            positions.append(position)
            slots.append(slot)
            begun.add(key)
        for drive, (positions, slots) in wanted.items():
            if positions:
                jobs = drive.write(
                    slots, [keys[i] for i in positions], [buffers[i] for i in positions]
                )
                self._track(ticket, positions, drive, jobs)
        return ticket

    def began(self, keys: Sequence[bytes], context: RequestContext, now: float) -> None:
        if self._policy is not None:
            self._policy.began(keys, context, now)

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        if self._policy is not None:
            self._policy.ended(request_id, output_tokens, now)

    def touch(self, keys: Sequence[bytes]) -> None:
        for drive in self._drives:
            drive.touch(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        for drive in self._drives:
            drive.remove(keys)

    def remove_old(self) -> None:
        for drive in self._drives:
            drive.remove_old()

    def clear(self) -> None:
        for opening in self.connecting:
            opening.cleared = True
        for drive in self._drives:
            drive.clear()

    def empty(self) -> None:
        for opening in self.connecting:
            opening.emptied = True
        for drive in self._drives:
            drive.empty()

    def sync(self) -> list[Future[str]]:
        unopened: Future[str] = Future()
        roots = ", ".join(opening.root for opening in self.connecting)
        unopened.set_result(f"{roots} cannot be reached now, and keeps its blocks" if roots else "")
        return [unopened, *(drive.sync() for drive in self._drives)]

    def cancel(self, ticket: int) -> None:
        self._batches.cancel(ticket)

    def raise_priority(self, ticket: int, urgency: Urgency) -> None:
        self._batches.raise_priority(ticket, urgency)

    def hung(self, ticket: int) -> Collection[int]:
        return self._batches.hung(ticket)

    def poll(self) -> list[BlockResult]:
        if self.connecting:
            self._adopt()
        for drive in self._drives:
            if drive.index.is_reporting:
                drive.index.report_restored(_REPORTED_BLOCKS)
            for job in drive.poll():
                self._batches.end(job)
                self._batches.report(job.ticket, job.positions, job.outcomes)
        return self._batches.take_results()

    def drain(self) -> bool:
        drained = [drive.drain() for drive in self._drives]
        if not all(drained):
            return False
        self._batches.clear()
        return True

    def begin_close(self, flush_seconds: float) -> None:
        # All drives at once, because the engine has few seconds, whatever their number.
        self._closing = self._closing or time.monotonic()
        for opening in self.connecting:
            opening.begin_close()
        for drive in self._drives:
            drive.begin_close(flush_seconds)

    def close(self, flush_seconds: float = 0.0) -> bool:
        self.begin_close(flush_seconds)
        ended = [
            drive.close(time.monotonic() - self._closing, flush_seconds) for drive in self._drives
        ]
        # They borrow no buffer, whether or not a try has ended.
        for opening in self.connecting:
            opening.close()
        self._batches.clear()
        return all(ended)

    def _adopt(self) -> None:
        """Take the drives into use that are open by now."""
        for opening in list(self.connecting):
            drive = opening.drive
            if drive is None:
                opening.look()
                continue
            opening.reset(drive)  # before anyone can find a block of before
            if self._watched:
                drive.watch()
            drive.index.follow(self._policy, *(each.index for each in self._drives[:1]))
            self.connecting.remove(opening)
            self._drives.append(drive)

    def _track(
        self, ticket: int, positions: Sequence[int], drive: Drive, jobs: Iterable[Job]
    ) -> None:
        """Record the batch of jobs that a drive has begun, and the positions of their blocks."""
        for job in jobs:
            job.positions = [positions[i] for i in job.positions]
            self._batches.add(ticket, job, drive.link)

    def _readable(self) -> list[Drive]:
        return [drive for drive in self._drives if drive.readable]

    def _is_too_long(self, key: bytes) -> bool:
        """Whether no record can hold `key`; logs it, once."""
        if len(key) <= MAX_KEY_BYTES:
            return False
        if not self._reported_long_key:
            logger.error(
                "a block's key has %d bytes; neither it nor the blocks behind it are written to "
                "disk (logged once); allowed: keys of up to %d bytes",
                len(key),
                MAX_KEY_BYTES,
            )
        self._reported_long_key = True
        return True
