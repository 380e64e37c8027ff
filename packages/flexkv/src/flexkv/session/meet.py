# SPDX-License-Identifier: Apache-2.0
"""The functions by which processes of an engine meet: rank 0 leads, other ranks join, the scheduler
attaches. A process that is the whole engine is alone."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat, join_stages
from flexkv.session import wire
from flexkv.session.reservation import Reservation
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.session.session_server import Server
from flexkv.session.wire import Answer, Greeting, SessionInfo, Shard
from flexkv.system.available import Promise
from flexkv.types.errors import ArenaError

MEET_SECONDS = 120.0
"""Seconds that processes wait for one another. Ranks register their caches at the same moment, but
rank 0 then fills the arena, which takes about 5 s per 100 GiB with 4 threads."""

Plan: TypeAlias = Callable[[BlockFormat, Sequence[Promise]], ArenaSpec]
"""Sizes an arena for a format of blocks, beside what other processes are about to take."""

_RETRY_SECONDS = 0.02
"""Pause between two attempts to connect to rank 0."""


class Closeable(Protocol):
    """What a session closes with it."""

    def close(self) -> None: ...


@dataclass(slots=True)
class Session:
    """A process's part in a session. Owns the arena's mapping and, in rank 0, the socket. The
    `membership` shows the arena's owner that this process may write to it, and is closed after the
    arena; None if the arena is the engine's own."""

    info: SessionInfo
    arena: Arena
    membership: Closeable | None = field(default=None, repr=False)
    _server: Server | None = field(default=None, repr=False)

    def close(self) -> None:
        """Unmap the arena and, in rank 0, release the engine's id. Idempotent. No copy may be under
        way in this process."""
        if self._server is not None:
            self._server.close()
        self.arena.close()
        if self.membership is not None:
            self.membership.close()


Share: TypeAlias = Callable[[str, SessionInfo], Session]
"""Gives an arena that engines share to the engine of this id, with blocks as described, of which
the arena's sizes are not known."""


def lead(
    root: str,
    name: str,
    mine: Shard,
    ranks: int,
    plan: Plan,
    *,
    threads: int,
    share: Share | None = None,
    patience: float = MEET_SECONDS,
) -> Session:
    """Open the session of the engine `name` as rank 0, and wait until all `ranks` have joined.

    The arena is one of `share`, or is created as `plan` says, which may raise. So many `threads`
    fill it. The runtime directory `root` is created if it is missing.

    Raises ArenaError if the directory cannot be used, a living engine owns `name`, a rank did not
    join in time or disagrees, or memory is missing. The other ranks raise this error too."""
    server = Server(root, name, ranks)
    try:
        session = _make_session(root, name, server.gather(mine, patience), plan, threads, share)
    except BaseException as error:
        server.refuse(str(error) or type(error).__name__)
        server.close()
        raise
    server.hand_out(session.info, session.arena.fd)
    session._server = server
    return session


def alone(
    root: str, mine: Shard, plan: Plan, *, threads: int, share: Share | None = None
) -> Session:
    """Make the session of a process that is its own scheduler and only rank. No process can join.
    See `lead`; `share` gets the number of the process as the engine's id. Raises ArenaError."""
    return _make_session(root, f"process {os.getpid()}", [mine], plan, threads, share)


def _make_session(  # noqa: PLR0917 - what an engine starts with
    root: str, name: str, shards: Sequence[Shard], plan: Plan, threads: int, share: Share | None
) -> Session:
    first = shards[0]
    parts = tuple(shard.shard_bytes for shard in shards[:: first.replicas])
    block_format = BlockFormat(first.engine_blocks, parts, first.replicas)
    stages = {shard.stage: shard.fingerprint for shard in shards}
    identity = tuple(dict.fromkeys(part for shard in shards for part in shard.identity))

    def describe(spec: ArenaSpec) -> SessionInfo:
        known = replace(spec, grows=False)  # the memory is there before others have it
        return SessionInfo(join_stages(list(stages.values())), known, first.durable, identity)

    if share is not None:
        session = share(name, describe(ArenaSpec(block_format, 0)))
        try:
            session.arena.populate(threads)
        except BaseException:
            session.close()
            raise
        return session
    nodes = frozenset(shard.numa_node for shard in shards if shard.numa_node is not None)
    with contextlib.closing(Reservation(root)) as reservation:
        sized = functools.partial(plan, block_format)
        arena = Arena.create_planned(sized, threads, nodes, reservation)
    return Session(describe(arena.spec), arena)


def join(root: str, name: str, mine: Shard, patience: float = MEET_SECONDS) -> Session:
    """Join the session `name` as a rank other than 0. Waits for rank 0 to open it. Raises
    ArenaError if rank 0 does not in time, refuses this rank, or cannot create the arena."""
    return _enter(root, name, Greeting(rank=mine), patience)


def attach(root: str, name: str, patience: float = MEET_SECONDS) -> Session:
    """Attach to the session `name` as the engine's scheduler. Waits until all ranks have joined. An
    arena has one scheduler in its life. Raises ArenaError if rank 0 does not open the session in
    time, its arena has had a scheduler, or rank 0 cannot create the arena."""
    return _enter(root, name, Greeting(scheduler=os.getpid()), patience)


def _enter(root: str, name: str, greeting: Greeting, patience: float) -> Session:
    with _connect(root, name, patience) as connection:
        try:
            wire.send(connection, greeting)
            answer, fd = wire.receive(connection, Answer)
        except OSError as error:
            raise ArenaError(f"rank 0 of engine {name!r} disconnected: {error}") from None
        except ValueError as error:
            raise ArenaError(f"rank 0 of engine {name!r} sent no valid arena: {error}") from None
    if answer is not None and answer.session is not None and fd is not None:
        return Session(answer.session, Arena(fd, answer.session.spec))
    if fd is not None:
        os.close(fd)
    refusal = "" if answer is None else answer.error
    raise ArenaError(refusal or "rank 0 sent no arena")


def _connect(root: str, name: str, patience: float) -> socket.socket:
    """Connect to rank 0. Waits until it listens."""
    deadline = time.monotonic() + patience
    while True:
        try:
            with RuntimeDirectory(root) as directory:
                return directory.connect(name, patience, socket.SOCK_SEQPACKET)
        except OSError as error:
            absent = isinstance(error, FileNotFoundError | ConnectionRefusedError | BlockingIOError)
            if not absent or time.monotonic() > deadline:
                raise ArenaError(
                    f"rank 0 of engine {name!r} does not answer in {root}: {error}; allowed: all "
                    f"processes of an engine on one machine, with the same runtime_dir"
                ) from None
        time.sleep(_RETRY_SECONDS)
