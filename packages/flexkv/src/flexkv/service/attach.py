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
from collections.abc import Callable, Sequence
from typing import NamedTuple

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

_AGAIN_SECONDS = 1.0
"""Seconds between two greetings while the service is gone, up to half of it more or less."""


class Membership:
    """The service knows of this process by its connection and a pidfd, and if another service
    comes, by a lock on the memory, until this process has greeted that one, too. A thread does so
    by `join`. Connection and lock are owned."""

    def __init__(
        self, connection: socket.socket, lock: MemoryLock, join: Callable[[], socket.socket]
    ) -> None:
        connection.settimeout(None)
        self._connection = connection
        self._lock = lock
        self._join = join
        self._guard = threading.Lock()
        self._closed = threading.Event()
        close_in_children(self)
        threading.Thread(target=self._stay, name="flexkv-membership", daemon=True).start()

    def close(self) -> None:
        """Leave the service. Idempotent."""
        with self._guard:
            self._closed.set()
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._connection.close()
        self._lock.close()

    def leave_to_parent(self) -> None:
        self._connection.close()

    def _stay(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):
                while self._connection.recv(1):
                    pass
            self._attach_again()

    def _attach_again(self) -> None:
        while not self._closed.wait(_AGAIN_SECONDS * random.uniform(0.5, 1.5)):
            try:
                connection = self._join()
            except (ArenaError, OSError) as error:  # its scheduler logs it, too
                logger.debug("not attached again: %s", error)
                continue
            with self._guard:
                self._connection.close()
                self._connection = connection
                connection.settimeout(None)
                if self._closed.is_set():
                    connection.close()
            return


_FIRST_SECONDS, _MOST_SECONDS = 1.0, 5.0
"""Pauses before the first try and between later ones, each up to half of it more or less; each is
twice as long as the one before. A service waits longer for engines that live."""
_LASTS_SECONDS = 60.0
"""An attachment that has lasted so long ended by chance: the pauses begin anew."""


class Attachment(NamedTuple):
    """What a service has given to a scheduler: a connection, what the disks of the pool have, the
    blocks that engines of the pool are storing, and whether tenants have shares of the memory."""

    connection: socket.socket
    below: KeySet
    announced: KeySet
    has_shares: bool


class Reattachment:
    """Watches a connection, borrowed for the call, and attaches again in a thread whenever the
    service has closed it: that waits for the service, and an idle engine calls nobody. `attach` may
    raise ArenaError and OSError."""

    def __init__(self, connection: socket.socket, attach: Callable[[], Attachment]) -> None:
        self._attach = attach
        self._stops = threading.Event()
        self._made: deque[Attachment] = deque()  # one at most; each call on it is atomic
        self._taken: Attachment | None = None
        threading.Thread(
            target=self._stay, args=(connection.dup(),), name="flexkv-reattachment", daemon=True
        ).start()

    @property
    def has_made(self) -> bool:
        """Whether `take` gives an attachment: the one before it has ended."""
        return bool(self._made)

    def take(self) -> Attachment | None:
        """The new attachment, which is the caller's; None if there is none yet."""
        with contextlib.suppress(IndexError):
            self._taken = self._made.popleft()
            return self._taken
        return None

    def reject(self) -> None:
        """What `take` has given last is of no use. Attaches again, unless that has ended before."""
        if self._taken is not None:
            with contextlib.suppress(OSError):
                self._taken.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Try no more. A thread that waits for the service ends after that. The caller shuts down
        its connection. Idempotent."""
        self._stops.set()
        self._drop()

    def _drop(self) -> None:
        """Close an attachment that nobody has taken."""
        with contextlib.suppress(IndexError):
            self._made.popleft().connection.close()

    def _stay(self, watched: socket.socket) -> None:
        pause = _FIRST_SECONDS
        while True:
            since = time.monotonic()
            with watched:
                ends = select.poll()
                ends.register(watched, 0)  # POLLHUP is always told
                ends.poll()
            if time.monotonic() - since > _LASTS_SECONDS:
                pause = _FIRST_SECONDS
            made, pause = self._try(pause)
            if made is None:
                return
            attachment, watched = made
            self._drop()  # an idle engine has seen several services end
            self._made.append(attachment)
            if self._stops.is_set():
                self._drop()

    def _try(self, pause: float) -> tuple[tuple[Attachment, socket.socket] | None, float]:
        """The attachment and a connection to watch, or None after `close`; and the pause before the
        next try."""
        said = ""
        while not self._stops.wait(pause * random.uniform(0.5, 1.5)):
            pause = min(2 * pause, _MOST_SECONDS)
            try:
                attachment = self._attach()
                try:
                    return (attachment, attachment.connection.dup()), pause
                except OSError:
                    attachment.connection.close()
                    raise
            except (ArenaError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("not attached to the service again yet: %s", error)
        return None, pause


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
        self.connection, answer, self._fds = _greet(ticket.root, greeting, 4)
        try:
            if not isinstance(answer, wire.Scheduled):
                raise _unexpected(ticket.root, answer)
            self.announced = _map_keys(self._fds.pop())
            self.below = _map_keys(self._fds.pop())
            for fd in self._fds:
                check_seals(fd)
            index_fd, holds_fd = self._fds
            self.answer = answer
            self.index = mmap.mmap(index_fd, 0, prot=mmap.PROT_READ)
            self.page = EnginePage(holds_fd, ticket.client, info.spec.num_slots)
            self._lock = MemoryLock(arena.fd, ticket.client)
            try:
                with RuntimeDirectory(ticket.root) as directory:
                    self._shows_life = directory.hold(wire.ENGINES)
            except BaseException:
                self._lock.close()
                raise
            self.connection.setblocking(False)
        except BaseException as error:
            self.connection.close()
            _close(self._fds)
            if isinstance(error, OSError | ValueError):
                raise ArenaError(f"the memory of the service cannot be mapped: {error}") from None
            raise

    @property
    def _ticket(self) -> ServiceTicket:
        assert self._info.service is not None
        return self._info.service

    def resume(self) -> Attachment:
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
            connection, answer, fds = _greet(ticket.root, greeting, 2, lent)
        finally:
            _close(lent)
        try:
            announced, below = _map_keys(fds.pop()), _map_keys(fds.pop())
            if not isinstance(answer, wire.Resumed):
                raise _unexpected(ticket.root, answer)
            connection.setblocking(False)
        except BaseException as error:
            connection.close()
            if isinstance(error, ValueError):
                raise ArenaError(f"the memory of the service cannot be mapped: {error}") from None
            raise
        return Attachment(connection, below, announced, answer.has_shares)

    def close(self) -> None:
        """Let go of the memory of the index and of the holds. Idempotent."""
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
    connection, answer, fds = _greet(root, greeting, 1)
    try:
        if not isinstance(answer, wire.Opened):
            raise _unexpected(root, answer)
        given = answer.ticket
        spec = ArenaSpec(about.spec.format, answer.slots, answer.boards, given.client)
        arena = Arena(fds.pop(), spec)
    except BaseException:
        connection.close()
        raise
    finally:
        _close(fds)
    ticket = ServiceTicket(root, given.client, given.token.hex(), engine, model)
    membership = _member(ticket, connection, arena)
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
    """Tell the service that this process, a rank of an engine, has the arena, which is borrowed. It
    knows so until the process ends, or the caller closes the membership. Raises ArenaError if the
    service does not answer, or refuses the process."""
    return _member(ticket, _join(ticket), arena)


def _member(ticket: ServiceTicket, connection: socket.socket, arena: Arena) -> Membership:
    try:
        lock = MemoryLock(arena.fd, ticket.client)
    except BaseException:
        connection.close()
        raise
    return Membership(connection, lock, functools.partial(_join, ticket))


def _join(ticket: ServiceTicket) -> socket.socket:
    connection, answer, _ = _greet(ticket.root, wire.Join(wire.PROTOCOL, _shown(ticket)), 0)
    if not isinstance(answer, wire.Joined):
        connection.close()
        raise _unexpected(ticket.root, answer)
    return connection


def _blocks_of(about: SessionInfo) -> wire.PoolBlocks:
    fmt = about.spec.format
    return wire.PoolBlocks(
        about.fingerprint, fmt.engine_blocks, fmt.shard_bytes, fmt.replicas, about.identity
    )


def _shown(ticket: ServiceTicket) -> wire.Ticket:
    return wire.Ticket(ticket.client, bytes.fromhex(ticket.token))


def _greet(
    root: str, greeting: wire.ToService, fds_wanted: int, fds_sent: Sequence[int] = ()
) -> tuple[socket.socket, wire.ToEngine, list[int]]:
    """Greet the service, with a pidfd of this process and further descriptors. Returns the
    connection, the answer, and its descriptors, all the caller's."""
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
        if messages and isinstance(messages[0], wire.Refused):
            raise ArenaError(f"the service in {root!r} refuses the engine: {messages[0].reason}")
        if len(messages) != 1 or len(fds) != fds_wanted:
            raise ArenaError(f"the service in {root!r} has closed the connection")
    except (OSError, wire.WireError) as error:
        connection.close()
        _close(fds)
        raise ArenaError(f"the service in {root!r} does not answer: {error}") from None
    except BaseException:
        connection.close()
        _close(fds)
        raise
    return connection, messages[0], fds


def _unexpected(root: str, answer: wire.ToEngine) -> ArenaError:
    return ArenaError(f"the service in {root!r} answers with {type(answer).__name__}")


def _map_keys(fd: int) -> KeySet:
    """The set of keys in a memory file, whose descriptor is closed. Raises OSError or ValueError if
    it cannot be mapped, or is no set."""
    try:
        check_seals(fd)
        return key_set(mmap.mmap(fd, 0, prot=mmap.PROT_READ), is_owner=False)
    finally:
        os.close(fd)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
