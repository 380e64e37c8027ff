# SPDX-License-Identifier: Apache-2.0
"""A store that engines share over a network, as a lower tier.

A `BlockStore` has calls that block. `RemoteTier` makes a `QueriedTier` of it, with threads, a
bounded queue, circuits and figures, and handles resets.

Start: the tier opens its store in the background, and retries until that succeeds. Before, the tier
reads and writes nothing, because blocks of an unknown epoch are of no use to anybody.

Epochs: a block's name has a fingerprint, an epoch and a key. After a reset, keys mean something
else in this process, and may mean a third thing in processes that start later. So this process goes
on in a random epoch of its own, which no other process reads, and renews the store's epoch for
processes that start later. Other processes of the old epoch were not reset, and keys mean the same
in them as before. They go on sharing, in a generation that begins with the reset.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

from flexkv.system.retries import Retried
from flexkv.tiers.base import Answer, BlockResult, States, TierFigures
from flexkv.tiers.batches import Batches
from flexkv.tiers.circuit import Circuit, CircuitState
from flexkv.tiers.device import BlockDevice, close_seconds
from flexkv.tiers.epochs import EpochRecord, Epochs
from flexkv.tiers.job import Job, Outcome, Priority, Result, Urgency
from flexkv.tiers.link import Link
from flexkv.tiers.questions import Found, Question, Questions
from flexkv.types.changes import Medium

logger = logging.getLogger(__name__)

OPEN_SECONDS = 15.0
"""Longest wait for the first try to open the store, at an engine's start. Not tuned."""

PAUSE_SECONDS = 5.0
"""Seconds that a circuit stays open. A probe costs one question of a few milliseconds. Not
tuned."""

FIRST_SHARE = 4
"""The first call of a read has a quarter of the bytes of later calls: requests stop waiting for a
tier of unknown pace that gives no block within 20 ms (`flexkv.engine.choice.chooser`). Not
tuned."""

NamedQuestion: TypeAlias = tuple[Sequence[str], Sequence[str]]
"""A `Question` by the names of blocks in place of their keys."""


class BlockStore(Protocol):
    """Keeps blocks for several engines, each under a name that no other block has. All methods
    block, and several threads call them at once. A method that raises OSError has read or written
    no block.

    The store keeps a checksum over name and bytes with each block, and verifies it; see
    `flexkv.tiers.envelope`. A block whose name or bytes do not match is DAMAGED, and the store
    removes it. A buffer holds a block. Its address is `address_of(buffer)`, within the registered
    memory. `prefix`: the beginning of the names of all blocks.
    """

    prefix: str

    def register(self, address: int, size: int) -> None:
        """See `QueriedTier.register`. Called before any other method but `open`."""
        ...

    def open(self) -> None:
        """Reach the store. Called by one thread, until it has succeeded and the epoch is read, and
        before `find`, `get` and `put`. Raises OSError if the store cannot be used now."""
        ...

    def find(
        self, questions: Sequence[NamedQuestion], answer: Callable[[int, Found], None]
    ) -> None:
        """Ask for each name of each question whether the store has its complete block; see
        `QueriedTier.query`. A store asks for all questions together if it can. `answer`: called
        with the number of each question and its answers, as soon as they are known, by any thread
        and before this call returns. If the method raises, the questions without an answer fail."""
        ...

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Result]:
        """Read blocks into `buffers`. Returns for each DONE, MISSING, DAMAGED, or the error of its
        read, without traceback."""
        ...

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Result]:
        """Write blocks that the store lacks. Returns for each DONE, also if the store has the
        complete block already, DROPPED if the store has no room, or the error of its write, without
        traceback."""
        ...

    def close(self) -> None:
        """Close the store. Called while no other method runs but perhaps `open`. That then ends
        with any error, and leaves nothing open."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """Bounds of a remote tier.

    Attributes:
        timeout_seconds: a call that takes longer hangs. It counts as a failure for the circuit, and
            the tier is stalled while half of the threads hang and no call ends.
        threads: how many reads and writes run at once.
        batch_bytes: the most bytes of one call; a block that is larger has a call of its own.
        queue_bytes: how many bytes may wait; writes beyond it are dropped, and writes that run
            count like those that wait.
    """

    question_seconds: float
    timeout_seconds: float = 1.0
    threads: int = 8
    batch_bytes: int = 4 << 20
    queue_bytes: int = 1 << 30


class OpenStore(NamedTuple):
    """A store that a tier owns, the record of its epoch, the tier's bounds, and the store's name in
    the log."""

    blocks: BlockStore
    record: EpochRecord
    limits: RemoteLimits
    name: str


_Place: TypeAlias = tuple[int, int]
"""A block of a batch: the batch's ticket, and the position."""


class RemoteTier:
    """See `QueriedTier`.

    Args:
        opened: owned. The constructor waits until the store is open, at most until the first try to
            open it has ended or `OPEN_SECONDS` have passed.
        slot_bytes: bytes of a block.
        states: reports the states of the circuits to other processes; owned. None for no reports.
    """

    def __init__(
        self,
        medium: Medium,
        opened: OpenStore,
        fingerprint: str,
        slot_bytes: int,
        states: States | None = None,
    ) -> None:
        limits, name = opened.limits, f"flexkv-{medium.value}"
        self.medium = medium
        self.question_seconds = limits.question_seconds
        self._store = opened.blocks
        self._store_name = opened.name
        self._fingerprint = fingerprint
        self._epochs = Epochs(opened.record)
        self._epoch = ""  # until it is known
        self._slot_bytes = slot_bytes
        self._batch_blocks = max(1, limits.batch_bytes // slot_bytes)
        write_bytes = limits.threads * max(limits.batch_bytes, slot_bytes)
        stall_seconds = limits.timeout_seconds
        self._device = BlockDevice(
            medium.value,
            Link(name, limits.threads, write_bytes, limits.queue_bytes, stall_seconds),
            slot_bytes,
            pause_seconds=PAUSE_SECONDS,
            check="the store and the network",
            limits=f"{stall_seconds:g} s (questions: {limits.question_seconds:g} s)",
        )
        self._questions = Questions(
            f"{name}-ask", self._find, limits.question_seconds, stall_seconds, self._note_question
        )
        self._batches = Batches()
        self._keys: dict[Job, list[bytes]] = {}  # of the blocks that are written
        self._refused: list[Answer] = []
        self._writing: dict[bytes, _Place] = {}
        self._repeats: dict[_Place, list[_Place]] = {}
        self._writes_under_way = 0
        self._renewal = Retried(
            f"{name}-renewal",
            self._epochs.renew,
            partial(
                logger.error,
                "%s: the record of a reset cannot be written (%s); FlexKV retries until it can. If "
                "this process ends earlier, engines that start later find blocks from before the "
                "reset; check the store and the network",
                self._store_name,
            ),
            at_close=True,
        )
        self._opened: str | None = None  # set by the thread of `_opening`
        failed = partial(
            logger.error,
            "%s cannot be used (%s); FlexKV retries until it can, and meanwhile reads and writes "
            "no blocks there; check the store, the network and the settings",
            self._store_name,
        )
        self._opening = Retried(f"{name}-open", self._open, failed, at_close=False)
        self._opening.begin()
        self._states = states
        if states is not None:
            circuits = {"reads": self._device.reads, "writes": self._device.writes}
            states.begin(lambda: {what: self._shown(each).value for what, each in circuits.items()})
        if not self._opening.await_try(OPEN_SECONDS):
            failed(f"no answer within {OPEN_SECONDS:g} s")

    @property
    def figures(self) -> TierFigures:
        return TierFigures(
            blocks=0,
            slots=0,
            written_blocks=self._device.traffic.written_bytes // self._slot_bytes,
            evicted_blocks=0,
            queued_blocks=self._batches.queued_blocks,
            queued_bytes=self._device.link.queued_bytes,
            reads=Counter([self._shown(self._device.reads)]),
            writes=Counter([self._shown(self._device.writes)]),
            openings=self._device.openings,
            traffic=self._device.traffic,
        )

    @property
    def readable(self) -> bool:
        return self._is_open and self._device.can_read and not self._questions.stalled

    def register(self, address: int, size: int) -> None:
        self._store.register(address, size)

    def query(self, keys: Sequence[bytes], scattered: Sequence[bytes] = ()) -> int:
        ticket = self._batches.new_ticket()
        if not self._is_open:
            self._refused.append(Answer(ticket, None))
        elif self._questions.begin(ticket, self._epoch, Question(list(keys), list(scattered))):
            self._device.reads.begin()
        else:
            self._refused.append(Answer(ticket, None, late=True))
        return ticket

    def drain_answers(self) -> list[Answer]:
        answers, self._refused = self._refused, []
        for asked in self._questions.poll():
            # Blocks of another epoch are of no use.
            has = asked.has if asked.epoch == self._epoch else None
            answers.append(Answer(asked.ticket, has, asked.late))
        return answers

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        priority: Priority,
        turn: int = 0,
    ) -> int:
        ticket = self._batches.new_ticket()
        if self._is_open:
            self._begin(ticket, keys, buffers, range(len(keys)), Urgency(priority, turn))
        else:
            self._batches.report(ticket, range(len(keys)), [Outcome.DROPPED] * len(keys))
        return ticket

    def write(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        after: Sequence[bytes | None] | None = None,
    ) -> int:
        ticket = self._batches.new_ticket()
        wanted = []
        for i, key in enumerate(keys):
            if key in self._writing:
                self._repeats.setdefault(self._writing[key], []).append((ticket, i))
            else:
                self._writing[key] = ticket, i
                wanted.append(i)
        held = (self._writes_under_way + len(wanted)) * self._slot_bytes
        full = held > self._device.link.queue_bytes
        if full or not (self._is_open and self._device.can_write):
            for i in wanted:
                self._end_write(keys[i], (ticket, i), Outcome.DROPPED)
            return ticket
        self._begin(ticket, keys, buffers, wanted, Urgency(Priority.WRITE))
        return ticket

    def empty(self) -> None:
        """Do nothing: other processes share the blocks."""

    def clear(self) -> None:
        self._epoch = secrets.token_hex(16)
        self._writing.clear()
        self._renewal.begin()

    def cancel(self, ticket: int) -> None:
        self._batches.cancel(ticket)

    def raise_priority(self, ticket: int, urgency: Urgency) -> None:
        self._batches.raise_priority(ticket, urgency)

    def hung(self, ticket: int) -> Collection[int]:
        return self._batches.hung(ticket)

    def poll(self) -> list[BlockResult]:
        openings = self._device.writes.openings
        for job in self._device.poll():
            self._end(job)
        if self._device.writes.openings > openings:
            # The blocks of writes that wait cannot be evicted meanwhile.
            self._device.link.cancel([job for job in self._batches.jobs() if job.writes])
        return self._batches.take_results()

    def drain(self) -> bool:
        self._questions.drain()
        if not self._device.drain():
            return False
        self._batches.clear()
        for known in (self._keys, self._refused, self._writing, self._repeats):
            known.clear()
        self._writes_under_way = 0
        return True

    def begin_close(self, flush_seconds: float) -> None:
        self._device.begin_close(flush_seconds)
        self._questions.begin_close()
        self._renewal.begin_close()
        self._opening.begin_close()

    def close(self, flush_seconds: float = 0.0) -> bool:
        self.begin_close(flush_seconds)
        if self._states is not None:
            self._states.close()
        bound = close_seconds(flush_seconds)
        end = time.monotonic() + bound
        links = [self._device.link.close(bound)]
        links.append(self._questions.close(max(0.0, end - time.monotonic())))
        renewed = self._renewal.close(max(0.0, end - time.monotonic()))
        self.poll()
        if not all(links):
            logger.warning(
                "calls of %s hang: FlexKV leaves their threads and its connection until the "
                "process ends; check the store and the network",
                self._store_name,
            )
            return False
        if renewed:
            self._store.close()
        return True

    @property
    def _is_open(self) -> bool:
        """Whether the store is open. Takes over its epoch then, unless a reset has come before."""
        if self._opened is None:
            return False
        self._epoch = self._epoch or self._opened
        return True

    def _shown(self, circuit: Circuit) -> CircuitState:
        if self._opened is None:
            return CircuitState.CONNECTING
        asks = circuit is self._device.reads
        return self._device.shown(circuit, stalled=asks and self._questions.stalled)

    def _open(self) -> None:
        self._store.open()
        self._opened = self._epochs.open()
        logger.info("FlexKV shares blocks in %s", self._store_name)

    def _folder(self, epoch: str) -> str:
        """What the names of an epoch's blocks begin with now. Raises OSError if the store cannot be
        reached."""
        return f"{self._store.prefix}/{self._fingerprint}/{self._epochs.folder(epoch)}"

    def _find(
        self, epoch: str, questions: Sequence[Question], answer: Callable[[int, Found], None]
    ) -> None:
        """Put questions to the store; in a thread of `_questions`."""
        folder = self._folder(epoch)
        self._store.find(
            [(_names(folder, each.keys), _names(folder, each.scattered)) for each in questions],
            answer,
        )

    def _call(
        self, epoch: str, writes: bool, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Sequence[Result]:
        """Read or write blocks; in a thread of the link."""
        call = self._store.put if writes else self._store.get
        return call(_names(self._folder(epoch), keys), buffers)

    def _begin(
        self,
        ticket: int,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        positions: Sequence[int],
        urgency: Urgency,
    ) -> None:
        """Begin to read or write the blocks at `positions`."""
        if not positions:
            return
        priority, turn = urgency
        writes = priority is Priority.WRITE
        jobs = []
        for part in self._parts(positions, writes):
            named = [keys[i] for i in part]
            work = partial(self._call, self._epoch, writes, named, [buffers[i] for i in part])
            job = Job(priority, len(part) * self._slot_bytes, work, part, turn)
            self._batches.add(ticket, job, self._device.link)
            if writes:
                self._keys[job] = named
            jobs.append(job)
        self._writes_under_way += len(positions) * writes
        self._device.begin(*jobs)

    def _parts(self, positions: Sequence[int], writes: bool) -> Iterator[Sequence[int]]:
        """The positions of the blocks of each call."""
        size = self._batch_blocks if writes else max(1, self._batch_blocks // FIRST_SHARE)
        while positions:
            yield positions[:size]
            positions, size = positions[size:], self._batch_blocks

    def _end(self, job: Job) -> None:
        self._batches.end(job)
        if not job.writes:
            self._batches.report(job.ticket, job.positions, job.outcomes)
            return
        self._writes_under_way -= len(job.positions)
        for key, i, outcome in zip(self._keys.pop(job), job.positions, job.outcomes, strict=True):
            self._end_write(key, (job.ticket, i), outcome)

    def _end_write(self, key: bytes, place: _Place, outcome: Outcome) -> None:
        """Report the result of a block's write, also for the writes that repeated it meanwhile."""
        if self._writing.get(key) == place:  # not since a reset
            del self._writing[key]
        for ticket, i in (place, *self._repeats.pop(place, ())):
            self._batches.report(ticket, [i], [outcome])

    def _note_question(self, failed: bool, error: str, seconds: float) -> None:
        self._device.note(self._device.reads, "questions to", failed, error, seconds)


def _names(folder: str, keys: Sequence[bytes]) -> list[str]:
    return [f"{folder}/{key.hex()}" for key in keys]


def address_of(buffer: memoryview) -> int:
    """The address of a writable buffer; valid while its memory is mapped."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
