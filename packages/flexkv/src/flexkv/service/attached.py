# SPDX-License-Identifier: Apache-2.0
"""One engine as the service knows it: its processes, and the slots granted to it."""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from flexkv.host.board import CELLS, CompletionBoard
from flexkv.service import messages as wire
from flexkv.service.engine_requests import EngineFetches, EngineQueries, EngineUses
from flexkv.service.lobby import RefusalError
from flexkv.service.page import PUBLISHED, READ, SENT, EngineHolds, FetchRows
from flexkv.service.pool import SharedPool
from flexkv.service.pool_changes import joined
from flexkv.service.pool_keys import Announcements
from flexkv.service.state import EngineState
from flexkv.types.mover import Status
from flexkv.types.tenants import NO_TENANT

logger = logging.getLogger(__name__)

_SHARE = 4
"""Of a pool's slots, engines together are granted at most one of so many ahead. Not tuned."""

_IDLE_SECONDS = 2.0
"""An engine that has stored nothing for so long returns its slots, but for those that its next
prompt begins with: what has no slot then is not cached, nor is all that builds on it. Not tuned."""
_IDLE_SLOTS = 64
_IDLE_SHARE = 16
"""Engines at rest together keep one of so many slots of a pool, or `_IDLE_SLOTS` each if that is
more. Not tuned."""

_MANY = 64
"""With so many messages waiting, changes join others: after a start of the service, those of a disk
come a few blocks at a time."""

_MOST_WAITING = 2048
"""Messages that wait for an engine that does not read, nearly all of them changes of blocks. With
more, the service leaves it."""

_FIGURE_SECONDS = 0.25
"""Seconds between two messages of figures. Not tuned."""

_LAST_WRITES_SECONDS = 10.0
"""The kernel ends a process's lock on the memory shortly before the last copies of its GPU end.
Slots of a process of which the service has no more than this lock wait so long."""


@dataclass(slots=True, eq=False)
class Process:
    """A process of an engine that has the memory mapped. It owns its connection, and a pidfd by
    which its end shows."""

    connection: socket.socket
    pidfd: int

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, and its memory is unmapped."""
        if self.pidfd < 0:  # closed
            return True
        ends = select.poll()
        ends.register(self.pidfd, select.POLLIN)
        return bool(ends.poll(0))

    def close(self) -> None:
        """Close connection and descriptor. Idempotent."""
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class AttachedEngine:
    """One engine of a pool, by the number of its board and its page. Single-threaded.

    Slots that were granted to it stay out of use until it publishes or returns them, or all its
    processes have ended: an order to copy may still wait in a queue of theirs. An engine of a
    service that has ended has begun: it may attach again, and holds blocks meanwhile.

    Its processes show the `ticket`; of an engine that has begun, the first one brings it. Of such
    an engine, some living `processes` may not have attached again yet. An engine whose scheduler
    has left (`has_ended`) gets nothing more until that attaches again.
    """

    def __init__(self, name: str, pool: SharedPool, number: int, *, begun: bool = False) -> None:
        self.name = name
        self.pool = pool
        self.number = number
        self.tenant = NO_TENANT
        self.ticket: wire.Ticket | None = None
        if not begun:
            self.ticket = wire.Ticket(number, secrets.token_bytes(16))
        self.processes: set[Process] = set()
        self.has_ended = begun
        self._board: CompletionBoard = pool.arena.board_of(number)
        self._scheduler: Process | None = None
        self._reading: Process | None = None  # who holds slots, connected or not
        page = pool.page_of(number)
        if not begun:
            page.clear()
        self._bell = page.bell
        self._holds = EngineHolds(page, pool.num_slots, name)
        self._fetches = EngineFetches(pool.cache, self._holds, FetchRows(page.fetches))
        self._queries = EngineQueries(pool.cache)
        self._announced = Announcements(pool.announced, pool.num_slots)
        self._uses = EngineUses(pool, number, self._announced)
        self._granted = set(pool.cache.index.taken_by(number))
        self._claims: set[int] | None = None
        self._all_known = not begun
        self._unused_since: float | None = None
        self._target = self._idle_slots = 0
        self._stored_at = time.monotonic()
        self._is_recalled = False
        self._watches = False
        self._repeated: Iterator[Sequence[wire.ToEngine]] | None = None
        self._messages: list[wire.ToEngine] = []
        self._waiting: deque[bytes] = deque()
        self._figures_at = 0.0
        self._has_news = False
        self._step_blocks = 1
        # Last: only an engine that is known ends it.
        self._reader: int | None = pool.cache.index.add_reader(page.holds)

    @property
    def scheduler(self) -> Process | None:
        """The process of the scheduler, while it is connected."""
        return self._scheduler

    @property
    def is_watching(self) -> bool:
        """Whether it is told of changes."""
        return self._watches and not self.has_ended

    @property
    def busy(self) -> bool:
        """Whether it is to be told more soon."""
        if self._queries:
            return True
        return self._repeated is not None and self.is_served and self._has_read

    @property
    def is_served(self) -> bool:
        """Whether its scheduler is connected and, if it is again, has said what slots it has."""
        return self._scheduler is not None and self._claims is None

    @property
    def state(self) -> EngineState:
        """What operators see. Takes O(slots)."""
        held, granted = self._holds.slots, len(self._granted)
        is_attached, stalled = self._scheduler is not None, 0
        if not is_attached:
            stalled = held + granted
        elif self._holds.is_stalled(time.monotonic()):
            stalled = held
        return EngineState(
            self.name,
            self.number,
            is_attached,
            len(self.processes),
            granted,
            held,
            len(self._fetches),
            stalled,
        )

    @property
    def granted(self) -> int:
        """How many granted slots the engine has neither published nor returned."""
        return len(self._granted)

    def schedule(self, process: Process, greeting: wire.Schedule, engines: int) -> list[int]:
        """The scheduler begins, in a pool of so many engines. Returns descriptors of the memory
        that it reads, borrowed. Raises RefusalError if the engine has a scheduler."""
        if self._scheduler is not None or self.has_ended:
            raise RefusalError(
                f"engine {self.name!r} has had a scheduler; allowed: one in its life"
            )
        self._begin(process, greeting, engines)
        pool = self.pool
        return [pool.index_fd, pool.pages_fd, pool.below.fd, pool.announced.fd]

    def resume(self, process: Process, greeting: wire.Resume, engines: int) -> Process | None:
        """The scheduler goes on, in a pool of so many engines, and says next what slots it has.
        Returns the same process as it was known before, which the caller closes and discards; None
        if it was not. Raises RefusalError if the engine has a scheduler, or none that it could
        be."""
        is_it = self.ticket is None or secrets.compare_digest(
            self.ticket.token, greeting.ticket.token
        )
        if not is_it or (self._scheduler is None and not self.has_ended):
            raise RefusalError(f"engine {self.name!r} is not the one of the ticket")
        if self._scheduler is not None:
            raise RefusalError(f"engine {self.name!r} has a scheduler; allowed: one")
        self._end_work()
        # An error may have lost some.
        self._granted = set(self.pool.cache.index.taken_by(self.number))
        self.name, self.ticket = greeting.engine, greeting.ticket
        self._bell[SENT] = self._bell[READ] = self._bell[PUBLISHED] = 0
        self._claims = set()
        self.has_ended = self._watches = False
        self._repeated = None
        known = self._reading
        self._begin(process, greeting, engines)
        return known

    def _begin(self, process: Process, greeting: wire.Schedule | wire.Resume, engines: int) -> None:
        self._scheduler = self._reading = process
        self.tenant = greeting.tenant
        self._stored_at = time.monotonic()  # the model may have been read for minutes
        self.share(greeting.step_blocks, engines)

    def share(self, step_blocks: int | None, engines: int) -> None:
        """Set how many slots are granted ahead, for so many engines; those of stores under way are
        among them."""
        most = max(1, self.pool.num_slots // (_SHARE * max(1, engines)))
        if step_blocks is not None:
            self._step_blocks = max(1, step_blocks)
        self._target = min(self._step_blocks, most)
        self._idle_slots = max(_IDLE_SLOTS, self.pool.num_slots // (_IDLE_SHARE * max(1, engines)))
        self._holds.limit(engines)

    def look(self, now: float) -> None:
        """Look at what it holds, and whether it reads. Ends what an error has left of its work."""
        if self._scheduler is None:
            self._end_work()
        self._holds.look(now, is_short=self.pool.is_short)
        self._fetches.look(now, has_read=self._has_read)
        self._announced.end_old(now)

    # Messages.

    def handle(self, message: wire.ToService) -> None:
        """Do what a message of the scheduler says. Raises RefusalError if it is against the rules,
        by a fault or by intent; ValueError or IndexError if parts of it do not fit each other."""
        # Figures that an engine has not read yet would delay what it waits for.
        self._has_news = self._has_news or not isinstance(message, wire.Announce | wire.Retract)
        match message:
            case wire.Publish():
                self._publish(message)
            case wire.Announce():
                self._announced.begin(message.cell, message.keys)
            case wire.Retract(None):
                self._announced.end_requests()
            case wire.Retract(int(cell)):
                self._announced.end(cell)
            case wire.Return():
                self._take_back(message.slots)
            case (
                wire.RecordUse()
                | wire.Touch()
                | wire.Demote()
                | wire.RequestEnded()
                | wire.HoldBlocks()
                | wire.UnholdBlocks()
            ):
                self._uses.handle(message, self.tenant)
            case wire.Fetch() | wire.ExtendFetch() | wire.EndFetch():
                self._fetches.handle(message, self.tenant)
            case wire.Query():
                self._queries.handle(message)
            case wire.Watch():
                self._watches = True
                end: Sequence[wire.ToEngine] = [wire.Repeated(message.number)]
                self._repeated = chain(self.pool.descriptions.again(), [end])
            case wire.Describe():
                self.pool.descriptions.add(dict(zip(message.keys, message.texts, strict=True)))
            case wire.Claim():
                self._claim(message)
            case _:
                raise RefusalError(f"{type(message).__name__} comes after the greeting")

    def _claim(self, message: wire.Claim) -> None:
        claims = self._claims
        if claims is None:
            raise RefusalError("an engine claims slots only when it has attached again")
        self._check(message.slots)
        claims.update(message.slots)
        if message.last:
            self._claims = None
            self._take_back(sorted(self._granted - claims))
            if not self.pool.cache.are_current(sorted(claims)):
                self.cleared()

    def cleared(self) -> None:
        """The pool was cleared: stores to slots that were granted before are not published. The
        engine returns those that it does not store to, and gets others."""
        self._has_news = True
        self.tell(wire.Recall(len(self._granted)))

    def _publish(self, message: wire.Publish) -> None:
        if not 0 <= message.cell < CELLS:
            raise RefusalError(f"cell {message.cell} is none of the board")
        self._check(message.slots)
        if not len(message.slots) == len(message.keys) == len(message.before):
            raise RefusalError(f"{len(message.slots)} slots for {len(message.keys)} blocks")
        if len(message.tenants) not in (0, len(message.keys)):
            raise RefusalError(f"{len(message.tenants)} tenants for {len(message.keys)} blocks")
        if self._board.status(message.cell) is not Status.DONE:
            raise RefusalError(f"not all ranks have reported the store of cell {message.cell}")
        self._stored_at = time.monotonic()
        self._is_recalled = False
        self._granted.difference_update(message.slots)
        try:
            if self.pool.cache.are_current(message.slots):
                keys, positions, starts = _prefixes(message)
                tenants = [self.tenant] * len(keys)
                for position, tenant in zip(positions, message.tenants, strict=False):
                    tenants[position] = tenant
                self.pool.cache.adopt(keys, positions, starts, message.slots, tenants)
            else:
                self.pool.cache.index.give_back(message.slots)
        except BaseException:
            # Others have blocks, or are free: they may be granted to another engine at once.
            self._granted.update(filter(self.pool.cache.index.is_taken, message.slots))
            raise
        self._announced.published(message.keys)
        if message.last:
            self._announced.end(message.cell)
            self._bell[PUBLISHED] = (self._bell[PUBLISHED] + 1) % (1 << 32)

    def _take_back(self, slots: Sequence[int]) -> None:
        self._check(slots)
        self._granted.difference_update(slots)
        self.pool.cache.index.give_back(slots)

    def _check(self, slots: Sequence[int]) -> None:
        if len(set(slots)) < len(slots) or not self._granted.issuperset(slots):
            raise RefusalError("a slot was not granted to this engine, or is named twice")

    # What it is told.

    def tell(self, message: wire.ToEngine) -> None:
        """Send a message with the next `send`."""
        waiting = self._messages
        if len(waiting) > _MANY and isinstance(message, wire.Changed):
            last = waiting[-1]
            both = joined(last, message) if isinstance(last, wire.Changed) else None
            if both is not None:
                waiting[-1] = both
                return
        waiting.append(message)

    def serve(self, now: float) -> None:
        """Grant slots, and tell what is new. Figures are told once the engine has read all before:
        a slow engine gets the latest, not each."""
        if not self.is_served:
            return
        self._grant(now)
        self._fetches.tell()
        self._messages += self._queries.answers(now)
        if not self._has_read:
            return
        if self._repeated is not None and not self._messages:
            self._repeat(self._repeated)
        # An engine at rest gets none. One that waits for a fetch sees by them that the service
        # lives, however long a read takes.
        if (self._has_news or self._fetches) and now - self._figures_at > _FIGURE_SECONDS:
            self._figures_at, self._has_news = now, False
            cache = self.pool.cache
            shared = {name: float(value) for name, value in cache.figures().shared.items()}
            self.tell(wire.NodeFigures(shared, cache.status.disabled))

    def _repeat(self, repeated: Iterator[Sequence[wire.ToEngine]]) -> None:
        """Tell some of the blocks that were there before. The engine has read all others."""
        for some in repeated:
            self._messages += some
            return
        self._repeated = None

    def _grant(self, now: float) -> None:
        if self._holds.is_over:
            return
        target = self._target
        if now - self._stored_at > _IDLE_SECONDS:
            target = min(self._idle_slots, target)
            spare = len(self._granted) - target
            if spare > 0 and not self._is_recalled:
                self._is_recalled = True
                self.tell(wire.Recall(spare))
        if 4 * len(self._granted) > 3 * target:
            return
        wanted = target - len(self._granted)
        slots = self.pool.cache.index.take_slots(wanted, self.number, self.tenant or None)
        if slots:
            self._granted.update(slots)
            for part in wire.parts(slots):
                self.tell(wire.Granted(part))

    def send(self) -> None:
        """Send what waits, as far as the engine reads. Raises OSError if it has left; RefusalError
        if too much waits."""
        process = self._scheduler
        if self._messages and not self._waiting and self._has_read:
            self._waiting += wire.packets(self._messages)
            self._messages.clear()
        while self._waiting and process is not None:
            try:
                process.connection.send(self._waiting[0])
            except BlockingIOError:
                break
            self._bell[SENT] = (self._bell[SENT] + 1) % (1 << 32)
            self._waiting.popleft()
        if len(self._messages) > _MOST_WAITING:
            raise RefusalError(f"it does not read, and {len(self._messages)} messages wait")

    @property
    def _has_read(self) -> bool:
        """Whether the engine has read all that was sent."""
        return self._bell[READ] == self._bell[SENT]

    # Its end.

    def leave(self, process: Process) -> None:
        """A process is not connected any more. If it was the scheduler, nothing more is published.
        What it holds stays: it may live, and goes on to load what is in host memory."""
        if process is not self._scheduler:
            return
        self._scheduler = None
        self.has_ended = True
        self._waiting.clear()
        self._messages.clear()
        self._end_work()

    def _end_work(self) -> None:
        """End what its requests do in the pool, each kind whatever becomes of the others.
        Idempotent."""
        with ExitStack() as ends:
            ends.callback(self._uses.clear)
            ends.callback(self._fetches.clear)
            ends.callback(self._queries.clear)
            ends.callback(self._announced.clear)

    def joined(self, process: Process) -> None:
        """A process has attached, for the first time or again."""
        self.processes.add(process)
        if len(self.processes) > self.pool.arena.spec.ranks:  # the scheduler is no rank
            self._all_known = True

    def ended(self, process: Process) -> None:
        """A process has ended, and is closed. What the scheduler held may leave: no token can come
        of it. After an error, this is called again."""
        if process is self._reading:
            self._let_go()
        self.leave(process)
        process.close()
        self.processes.discard(process)

    def is_gone(self, now: float) -> bool:
        """Whether all its processes have ended, so that nobody writes to its slots any more."""
        if self.processes or self.pool.is_used_by(self.number):
            self._unused_since = None
            return False
        if self._all_known:
            return True
        if self._unused_since is None:
            self._unused_since = now
        return now - self._unused_since >= _LAST_WRITES_SECONDS

    def free(self) -> None:
        """All processes have ended. Idempotent, as long as no other engine has its number."""
        self._end_work()
        self.close()
        self._let_go()
        self.pool.cache.index.give_back(self.pool.cache.index.taken_by(self.number))
        self._granted.clear()

    def _let_go(self) -> None:
        if self._reader is not None:
            self.pool.cache.index.remove_reader(self._reader)
            self._reader = None

    def close(self) -> None:
        """The service ends, and the engine goes on without it. Idempotent."""
        self._board.release()
        for process in self.processes:
            process.close()


def _prefixes(message: wire.Publish) -> tuple[list[bytes], list[int], list[int]]:
    """Keys, positions of the blocks and of the beginnings of prefixes, as `SharedCache.adopt` takes
    them."""
    keys: list[bytes] = []
    positions: list[int] = []
    starts: list[int] = []
    for key, before in zip(message.keys, message.before, strict=True):
        if before is None:
            starts.append(len(keys))
        elif before:
            keys.append(before)
        elif not keys:
            raise RefusalError("the first block has none before it")
        positions.append(len(keys))
        keys.append(key)
    return keys, positions, starts
