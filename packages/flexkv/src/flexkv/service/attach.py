# SPDX-License-Identifier: Apache-2.0
"""The processes of an engine attach to the node's service, and attach again if it was gone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import mmap
import os
import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from flexkv.host.arena import Arena, ArenaSpec
from flexkv.host.memory_file import check_seals
from flexkv.host.memory_lock import MemoryLock
from flexkv.index.key_set import KeySet, key_set
from flexkv.service import messages as wire
from flexkv.service.page import EnginePage
from flexkv.session import Session
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.session.wire import ServiceTicket, SessionInfo
from flexkv.system.forks import close_in_children
from flexkv.types.errors import ArenaError
from flexkv.types.tenants import NO_TENANT

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=wire.ToEngine)
Given = TypeVar("Given")

_FIRST_SECONDS, _MOST_SECONDS = 1.0, 5.0
"""Pauses before the first try and between later ones, each up to half of it more or less; each is
twice as long as the one before. A service waits longer for engines that live."""
_LASTS_SECONDS = 60.0
"""An attachment that has lasted so long ended by chance: the pauses begin anew."""


class Attachment(NamedTuple):
    """What a service has given to a scheduler: what the disks of the pool have, the blocks that
    engines of the pool are storing, and whether tenants have shares of the memory."""

    below: KeySet
    announced: KeySet
    has_shares: bool


class Reattachment(Generic[Given]):
    """Watches a connection, borrowed for the call, and attaches again in a thread whenever the
    service has closed it: that waits for the service, and an idle engine calls nobody. `attach`
    returns a connection, and what the service has given beside it. It may raise ArenaError and
    OSError. Failed tries are logged at `level`."""

    def __init__(
        self,
        connection: socket.socket,
        attach: Callable[[], tuple[socket.socket, Given]],
        level: int = logging.WARNING,
    ) -> None:
        self._attach = attach
        self._level = level
        self._stops = threading.Event()
        self._watched = connection.dup()
        # One at most; each call on it is atomic.
        self._made: deque[tuple[socket.socket, Given]] = deque()
        self._taken: socket.socket | None = None
        close_in_children(self)
        threading.Thread(target=self._stay, name="flexkv-reattachment", daemon=True).start()

    @property
    def has_made(self) -> bool:
        """Whether `take` gives an attachment: the one before it has ended."""
        return bool(self._made)

    def take(self) -> tuple[socket.socket, Given] | None:
        """The new attachment, which is the caller's; None if there is none yet."""
        with contextlib.suppress(IndexError):
            self._taken, given = self._made.popleft()
            return self._taken, given
        return None

    def reject(self) -> None:
        """What `take` has given last is of no use. Attaches again, unless that has ended before."""
        if self._taken is not None:
            with contextlib.suppress(OSError):
                self._taken.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Try no more, and end an attachment that nobody has taken. A thread that waits for the
        service ends after that. The caller shuts down a connection that it has. Idempotent."""
        self._stops.set()
        self._drop()

    def leave_to_parent(self) -> None:
        for connection in (self._watched, *(each for each, _ in self._made)):
            connection.close()

    def _drop(self) -> None:
        with contextlib.suppress(IndexError, OSError), self._made.popleft()[0] as connection:
            connection.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _stay(self) -> None:
        pause = _FIRST_SECONDS
        while True:
            since = time.monotonic()
            with self._watched as watched:
                ends = select.poll()
                ends.register(watched, 0)  # POLLHUP is always told
                ends.poll()
            if time.monotonic() - since > _LASTS_SECONDS:
                pause = _FIRST_SECONDS
            made, pause = self._try(pause)
            if made is None:
                return
            self._drop()  # an idle engine has seen several services end
            self._made.append(made)
            if self._stops.is_set():
                self._drop()

    def _try(self, pause: float) -> tuple[tuple[socket.socket, Given] | None, float]:
        """The attachment, whose connection is watched, or None after `close`; and the pause before
        the next try."""
        said = ""
        while not self._stops.wait(pause * random.uniform(0.5, 1.5)):
            pause = min(2 * pause, _MOST_SECONDS)
            try:
                made = self._attach()
                try:
                    self._watched = made[0].dup()
                except OSError:
                    made[0].close()
                    raise
                return made, pause
            except (ArenaError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    logger.log(self._level, "not attached to the service again yet: %s", error)
        return None, pause


class Membership:
    """The service knows of this process by its connection, owned, and a pidfd, and if another
    service comes, by a lock on the memory, until this process has greeted that one, too."""

    def __init__(self, ticket: ServiceTicket, arena: Arena, connection: socket.socket) -> None:
        self._connection = connection
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            self._lock = MemoryLock(arena.fd, ticket.client)
            undo.callback(self._lock.close)
            # Its scheduler logs why it is not attached.
            join = functools.partial(_join, ticket)
            self._reattachment = Reattachment(connection, join, logging.DEBUG)
            undo.pop_all()
        close_in_children(self)

    def close(self) -> None:
        """Leave the service. Idempotent."""
        self._reattachment.close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._lock.close()

    def leave_to_parent(self) -> None:
        self._connection.close()


_PATIENCE_SECONDS = 120.0
"""Seconds to wait for the answer to a greeting: the service fills the memory of a new pool first,
which takes about 5 s per 100 GiB."""

_START_SECONDS = 30.0
"""Seconds for which rank 0 waits for a service to listen. The other ranks wait for rank 0 then; see
`flexkv.session.meet.MEET_SECONDS`."""
_RETRY_SECONDS = 0.1
"""Pause between two looks."""


class Attached:
    """The scheduler's part. The arena is borrowed until `close`. For the tenant and the blocks of a
    step see `messages.Schedule`. Raises ArenaError if the service does not answer, or refuses the
    engine.

    Attributes:
        connection: to the service; the caller's. Calls on it do not wait.
        index: memory of the index, which this process cannot write to.
        below: what the disks of the pool have.
        page: what this engine writes for the service.
        answer: what the service says of the pool.
    """

    def __init__(
        self, info: SessionInfo, step_blocks: int, arena: Arena, tenant: int = NO_TENANT
    ) -> None:
        self._info = info
        self.tenant = tenant
        self._step_blocks = step_blocks
        self._arena = arena
        self._guard = threading.Lock()
        ticket = self._ticket
        greeting = wire.Schedule(wire.PROTOCOL, _shown(ticket), step_blocks, tenant)
        self.connection, self.answer, self._fds = _greet(
            ticket.root, greeting, wire.Scheduled, fds_wanted=4
        )
        with _closed_on_error(self.connection, self._fds), contextlib.ExitStack() as undo:
            self.connection.setblocking(False)
            self.announced, self.below = _map_keys(self._fds), _map_keys(self._fds)
            for fd in self._fds:
                check_seals(fd)
            index_fd, holds_fd = self._fds
            self.index = mmap.mmap(index_fd, 0, prot=mmap.PROT_READ)
            self.page = EnginePage(holds_fd, ticket.client, info.spec.num_slots)
            self._lock = MemoryLock(arena.fd, ticket.client)
            undo.callback(self._lock.close)
            with RuntimeDirectory(ticket.root) as directory:
                self._shows_life = directory.hold(wire.ENGINES)
            undo.pop_all()

    @property
    def _ticket(self) -> ServiceTicket:
        assert self._info.service is not None
        return self._info.service

    def resume(self) -> tuple[socket.socket, Attachment]:
        """Attach again, to the same service or to the next one. Waits; may be called in a thread of
        its own. The caller owns the attachment; `Claim` comes first on its connection, on which
        calls do not wait. Raises ArenaError if the service does not answer, or refuses the
        engine."""
        ticket = self._ticket
        greeting = wire.Resume(
            wire.PROTOCOL,
            _shown(ticket),
            ticket.engine,
            ticket.model,
            _blocks_of(self._info),
            self._info.spec.num_slots,
            self._step_blocks,
            self.tenant,
        )
        with self._guard:  # `close` comes in another thread
            if not self._fds:
                raise ArenaError("the engine has left the service")
            lent = [os.dup(fd) for fd in (self._arena.fd, *self._fds)]
        try:
            connection, answer, fds = _greet(
                ticket.root, greeting, wire.Resumed, fds_wanted=2, fds_sent=lent
            )
        finally:
            _close(lent)
        with _closed_on_error(connection, fds):
            announced, below = _map_keys(fds), _map_keys(fds)
            connection.setblocking(False)
        return connection, Attachment(below, announced, answer.has_shares)

    def close(self) -> None:
        """Close the memory of the index and of the holds. Idempotent."""
        with self._guard:
            self._lock.close()
            if self._fds:
                _close([*self._fds, self._shows_life])
            self._fds = []


def open_pool(root: str, model: str, engine: str, about: SessionInfo) -> Session:
    """Ask the service in a runtime directory for an arena, as rank 0 of an engine. Waits for a
    service that starts. Raises ArenaError if no service runs there, or it refuses the engine."""
    _await_service(root)
    model = model[: wire.MOST_NAME]
    greeting = wire.Open(wire.PROTOCOL, engine, model, _blocks_of(about))
    connection, answer, fds = _greet(root, greeting, wire.Opened, fds_wanted=1)
    given = answer.ticket
    with _closed_on_error(connection, fds):
        spec = ArenaSpec(about.spec.format, answer.slots, answer.boards, given.client)
        arena = Arena(fds.pop(), spec)
    ticket = ServiceTicket(root, given.client, given.token.hex(), engine, model)
    membership = Membership(ticket, arena, connection)
    return Session(dataclasses.replace(about, spec=spec, service=ticket), arena, membership)


def _await_service(root: str) -> None:
    """Wait until a service listens, for at most `_START_SECONDS`. It may start at the same time as
    the engine, or again."""
    end, is_logged = time.monotonic() + _START_SECONDS, False
    while time.monotonic() < end:
        try:
            with RuntimeDirectory(root) as directory:
                directory.connect(wire.SOCKET, _START_SECONDS, socket.SOCK_SEQPACKET).close()
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if not is_logged:
                is_logged = True
                logger.warning(
                    "no service of FlexKV listens in %r yet (%s); waiting for it, %g s at most",
                    root,
                    error.strerror,
                    _START_SECONDS,
                )
            time.sleep(_RETRY_SECONDS)
        except OSError:
            return  # the greeting fails with the same error
        else:
            return


def join_pool(ticket: ServiceTicket, arena: Arena) -> Membership:
    """Report to the service that this process, a rank of an engine, has the arena, which is
    borrowed. It knows so until the process ends, or the caller closes the membership. Raises
    ArenaError if the service does not answer, or refuses the process."""
    return Membership(ticket, arena, _join(ticket)[0])


def _join(ticket: ServiceTicket) -> tuple[socket.socket, wire.Joined]:
    greeting = wire.Join(wire.PROTOCOL, _shown(ticket))
    return _greet(ticket.root, greeting, wire.Joined, fds_wanted=0)[:2]


def _blocks_of(about: SessionInfo) -> wire.PoolBlocks:
    fmt = about.spec.format
    return wire.PoolBlocks(
        about.fingerprint, fmt.engine_blocks, fmt.shard_bytes, fmt.replicas, about.identity
    )


def _shown(ticket: ServiceTicket) -> wire.Ticket:
    return wire.Ticket(ticket.client, bytes.fromhex(ticket.token))


def _greet(
    root: str,
    greeting: wire.ToService,
    kind: type[Answer],
    *,
    fds_wanted: int,
    fds_sent: Sequence[int] = (),
) -> tuple[socket.socket, Answer, list[int]]:
    """Greet the service, with a pidfd of this process and further descriptors. Returns the
    connection, the answer of this kind, and its descriptors, all the caller's."""
    try:
        with RuntimeDirectory(root) as directory:
            connection = directory.connect(wire.SOCKET, _PATIENCE_SECONDS, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise ArenaError(
            f"no service of FlexKV answers in {root!r} ({error}); allowed: the runtime directory "
            f"of a `flexkv serve` that runs"
        ) from None
    fds: list[int] = []
    try:
        own = wire.own_process()
        try:
            socket.send_fds(connection, wire.packets([greeting]), [own, *fds_sent])
        finally:
            os.close(own)
        packet, fds = wire.receive_greeting(connection)
        messages = wire.read_engine(packet) if packet else []
        answer = messages[0] if messages else None
        if isinstance(answer, wire.Refused):
            raise ArenaError(f"the service in {root!r} refuses the engine: {answer.reason}")
        if len(messages) != 1 or len(fds) != fds_wanted:
            raise ArenaError(f"the service in {root!r} has closed the connection")
        if not isinstance(answer, kind):
            raise ArenaError(f"the service in {root!r} answers with {type(answer).__name__}")
    except BaseException as error:
        connection.close()
        _close(fds)
        if isinstance(error, OSError | wire.WireError):
            raise ArenaError(f"the service in {root!r} does not answer: {error}") from None
        raise
    return connection, answer, fds


@contextlib.contextmanager
def _closed_on_error(connection: socket.socket, fds: list[int]) -> Iterator[None]:
    """Close the connection and descriptors if the block raises, which maps their memory: an
    ArenaError if it cannot be mapped, or is of another size."""
    try:
        yield
    except BaseException as error:
        connection.close()
        _close(fds)
        fds.clear()
        if isinstance(error, OSError | ValueError):
            raise ArenaError(f"the memory of the service cannot be mapped: {error}") from None
        raise


def _map_keys(fds: list[int]) -> KeySet:
    """The set of keys in the last of these memory files, whose descriptor is closed. Raises OSError
    or ValueError if it cannot be mapped, or is no set."""
    fd = fds.pop()
    try:
        check_seals(fd)
        return key_set(mmap.mmap(fd, 0, prot=mmap.PROT_READ), is_owner=False)
    finally:
        os.close(fd)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
