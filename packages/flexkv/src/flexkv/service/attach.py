# SPDX-License-Identifier: Apache-2.0
"""The processes of an engine attach to the node's service."""

from __future__ import annotations

import dataclasses
import mmap
import os
import socket

from flexkv.host.arena import Arena, ArenaSpec
from flexkv.host.memory_file import check_seals
from flexkv.service import messages as wire
from flexkv.session.meet import Shared
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.session.wire import ServiceTicket, SessionInfo
from flexkv.types.errors import ArenaError

_PATIENCE_SECONDS = 120.0
"""Seconds to wait for the answer to a greeting: the service fills the memory of a new pool first,
which takes about 5 s per 100 GiB. The service's own loop waits meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attached:
    """The scheduler's part.

    Attributes:
        connection: to the service; the caller's. Calls on it do not wait.
        index: memory of the index, which this process cannot write to; the caller's.
        holds: memory for the holds of the engine; the caller's.
        answer: what the service says of the pool.
    """

    connection: socket.socket
    index: mmap.mmap
    holds: mmap.mmap
    answer: wire.Scheduled


def open_pool(root: str, engine: str, about: SessionInfo) -> Shared:
    """Ask the service for an arena, as rank 0 of an engine.

    Args:
        root: runtime directory of the service.
        engine: the engine's id, for logs.
        about: the blocks of the engine.

    Raises:
        ArenaError: no service runs there, or it refuses the engine.
    """
    fmt = about.spec.format
    blocks = wire.PoolBlocks(
        about.fingerprint, fmt.engine_blocks, fmt.shard_bytes, fmt.replicas, about.identity
    )
    connection, answer, fds = _greet(root, wire.Open(wire.PROTOCOL, engine, blocks), 1)
    try:
        if not isinstance(answer, wire.Opened):
            raise _unexpected(root, answer)
        ticket = answer.ticket
        spec = ArenaSpec(fmt, answer.slots, answer.boards, ticket.client)
        arena = Arena(fds.pop(), spec)
    except BaseException:
        connection.close()
        raise
    finally:
        _close(fds)
    shown = ServiceTicket(root, ticket.client, ticket.token.hex())
    return Shared(dataclasses.replace(about, spec=spec, service=shown), arena, connection)


def join_pool(ticket: ServiceTicket) -> socket.socket:
    """Tell the service that this process, a rank of an engine, has the arena. It knows so until the
    process ends. The caller closes the connection.

    Raises:
        ArenaError: the service does not answer, or refuses the process.
    """
    connection, answer, fds = _greet(ticket.root, wire.Join(wire.PROTOCOL, _shown(ticket)), 0)
    _close(fds)
    if not isinstance(answer, wire.Joined):
        connection.close()
        raise _unexpected(ticket.root, answer)
    return connection


def schedule_pool(ticket: ServiceTicket, step_blocks: int) -> Attached:
    """Attach as the scheduler of an engine.

    Args:
        ticket: what rank 0 has got.
        step_blocks: see `messages.Schedule`.

    Raises:
        ArenaError: the service does not answer, or refuses the engine.
    """
    greeting = wire.Schedule(wire.PROTOCOL, _shown(ticket), step_blocks)
    connection, answer, fds = _greet(ticket.root, greeting, 2)
    try:
        if not isinstance(answer, wire.Scheduled):
            raise _unexpected(ticket.root, answer)
        for fd in fds:
            check_seals(fd)
        index = mmap.mmap(fds[0], 0, prot=mmap.PROT_READ)
        holds = mmap.mmap(fds[1], 0)
    except OSError as error:
        connection.close()
        raise ArenaError(f"the index of the service cannot be mapped: {error}") from None
    except BaseException:
        connection.close()
        raise
    finally:
        _close(fds)
    connection.setblocking(False)
    return Attached(connection, index, holds, answer)


def _shown(ticket: ServiceTicket) -> wire.Ticket:
    return wire.Ticket(ticket.client, bytes.fromhex(ticket.token))


def _greet(
    root: str, greeting: wire.ToService, fds_wanted: int
) -> tuple[socket.socket, wire.ToEngine, list[int]]:
    """Greet the service. Returns the connection, the answer, and its descriptors, all the
    caller's."""
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
            socket.send_fds(connection, wire.packets([greeting]), [own])
        finally:
            os.close(own)
        packet, fds = wire.receive(connection)
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


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
