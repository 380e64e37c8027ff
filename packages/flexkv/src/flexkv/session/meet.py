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
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat, join_stages
from flexkv.session import wire
from flexkv.session.reservation import Reservation
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.session.session_server import Server
from flexkv.session.wire import SessionInfo, Shard
from flexkv.system.available import Promise
from flexkv.types.errors import ArenaError

MEET_SECONDS = 120.0
"""Seconds that processes wait for one another. Ranks register their caches at the same moment, but
rank 0 then fills the arena, which takes about 5 s per 100 GiB with 4 threads."""

Plan: TypeAlias = Callable[[BlockFormat, Sequence[Promise]], ArenaSpec]
"""Sizes an arena for a format of blocks, beside what other processes are about to take."""

Share: TypeAlias = Callable[[str, SessionInfo], "Shared"]
"""Asks for an arena that engines share, for the engine of this id and blocks as described, of which
the arena's sizes are not known."""

_RETRY_SECONDS = 0.02
"""Pause between two attempts to connect to rank 0. Not tuned."""


class Shared(NamedTuple):
    """An arena that engines share.

    Attributes:
        info: the description of the session.
        arena: the arena; the caller's.
        membership: shows the arena's owner that this process may write to it; the caller's.
    """

    info: SessionInfo
    arena: Arena
    membership: Closeable


class Closeable(Protocol):
    """What a session closes with it."""

    def close(self) -> None: ...


@dataclass(slots=True)
class Session:
    """A process's part in a session. Owns the arena's mapping and, in rank 0, the socket.

    Attributes:
        info: the description of the session.
        arena: the arena.
        membership: closed after the arena; None if the arena is the engine's own.
    """

    info: SessionInfo
    arena: Arena
    _server: Server | None = field(default=None, repr=False)
    membership: Closeable | None = field(default=None, repr=False)

    def close(self) -> None:
        """Unmap the arena and, in rank 0, release the engine's id. Idempotent. No copy may be under
        way in this process."""
        if self._server is not None:
            self._server.close()
        self.arena.close()
        if self.membership is not None:
            self.membership.close()


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
    """Open the session `name` as rank 0 and wait until every rank has joined.

    Args:
        root: path of the runtime directory; created with mode 0700 if missing.
        name: the engine's id.
        mine: rank 0's shard.
        ranks: the number of ranks, this one included.
        plan: sizes the arena once the shards are known, beside what other processes are about to
            take; may raise.
        threads: the number of threads that fill the arena.
        share: gives an arena that engines share; None to create one of `plan`.
        patience: seconds to wait for the ranks.

    Returns:
        The session, which the caller closes.

    Raises:
        ArenaError: the directory cannot be used, a living engine owns `name`, a rank did not
            join in time or disagrees, or memory is missing. The other ranks raise this error too.
    """
    server = Server(root, name, ranks)
    try:
        shards = server.gather(mine, patience)
        membership: Closeable | None = None
        if share is None:
            info, arena = _make_arena(root, shards, plan, threads)
        else:
            info, arena, membership = _share_arena(share, name, shards, threads)
    except BaseException as error:
        server.refuse(str(error) or type(error).__name__)
        server.close()
        raise
    server.hand_out(info, arena.fd)
    return Session(info, arena, server, membership)


def alone(
    root: str, mine: Shard, plan: Plan, *, threads: int, share: Share | None = None
) -> Session:
    """Make the session of a process that is its own scheduler and only rank. No process can join.

    Args:
        root: path of the runtime directory.
        mine: the process's shard.
        plan, share: see `lead`. `share` gets the number of the process as the engine's id.
        threads: the number of threads that fill the arena.

    Returns:
        The session, which the caller closes.

    Raises:
        ArenaError: memory is missing, or nobody shares an arena.
    """
    if share is None:
        return Session(*_make_arena(root, [mine], plan, threads))
    info, arena, membership = _share_arena(share, f"process {os.getpid()}", [mine], threads)
    return Session(info, arena, membership=membership)


def _share_arena(share: Share, name: str, shards: Sequence[Shard], threads: int) -> Shared:
    shared = share(name, _describe(shards, ArenaSpec(_format(shards), 0)))
    with contextlib.ExitStack() as undo:
        undo.callback(shared.membership.close)
        undo.callback(shared.arena.close)
        shared.arena.populate(threads)
        undo.pop_all()
    return shared


def _make_arena(
    root: str, shards: Sequence[Shard], plan: Plan, threads: int
) -> tuple[SessionInfo, Arena]:
    """Create the arena for the shards of all ranks, and its description."""
    nodes = frozenset(s.numa_node for s in shards if s.numa_node is not None)
    with contextlib.closing(Reservation(root)) as reservation:
        sized = functools.partial(plan, _format(shards))
        arena = Arena.create_planned(sized, threads, nodes, reservation)
    return _describe(shards, arena.spec), arena


def _format(shards: Sequence[Shard]) -> BlockFormat:
    first = shards[0]
    parts = tuple(shard.shard_bytes for shard in shards[:: first.replicas])
    return BlockFormat(first.engine_blocks, parts, first.replicas)


def _describe(shards: Sequence[Shard], spec: ArenaSpec) -> SessionInfo:
    """The description of a session with an arena of these sizes."""
    stages = {shard.stage: shard.fingerprint for shard in shards}
    name = join_stages(list(stages.values()))
    identity = dict.fromkeys(part for shard in shards for part in shard.identity)
    return SessionInfo(name, spec, shards[0].durable, tuple(identity))


def join(root: str, name: str, mine: Shard, patience: float = MEET_SECONDS) -> Session:
    """Join the session `name` as a rank other than 0. Waits for rank 0 to open it.

    Args:
        root: path of the runtime directory.
        name: the engine's id.
        mine: this rank's shard.
        patience: seconds to wait.

    Returns:
        The session, which the caller closes.

    Raises:
        ArenaError: rank 0 did not open the session in time, refused this rank, or could not create
            the arena.
    """
    return _enter(root, name, {"rank": asdict(mine)}, patience)


def attach(root: str, name: str, patience: float = MEET_SECONDS) -> Session:
    """Attach to the session `name` as the engine's scheduler. Waits until all ranks have joined. An
    arena has one scheduler in its life.

    Args:
        root: path of the runtime directory.
        name: the engine's id.
        patience: seconds to wait.

    Returns:
        The session, which the caller closes.

    Raises:
        ArenaError: rank 0 did not open the session in time, its arena has had a scheduler, or rank
            0 could not create the arena.
    """
    return _enter(root, name, {"scheduler": os.getpid()}, patience)


def _enter(root: str, name: str, greeting: dict[str, object], patience: float) -> Session:
    with _connect(root, name, patience) as connection:
        try:
            wire.send(connection, greeting)
            message, fd = wire.receive(connection)
        except (OSError, ValueError) as error:
            raise ArenaError(f"rank 0 of engine {name!r} disconnected: {error}") from None
    if message is None or fd is None:
        raise ArenaError(str((message or {}).get("error", "rank 0 sent no arena")))
    try:
        info = SessionInfo.from_json(message)
    except (ValueError, KeyError) as error:
        os.close(fd)
        raise ArenaError(f"rank 0 of engine {name!r} sent no valid arena: {error}") from None
    return Session(info, Arena(fd, info.spec))


def _connect(root: str, name: str, patience: float) -> socket.socket:
    """Connect to rank 0. Waits until it listens."""
    deadline = time.monotonic() + patience
    while True:
        try:
            with RuntimeDirectory(root) as directory:
                return directory.connect(name, patience)
        except OSError as error:
            absent = isinstance(error, FileNotFoundError | ConnectionRefusedError | BlockingIOError)
            if not absent or time.monotonic() > deadline:
                raise ArenaError(
                    f"rank 0 of engine {name!r} does not answer in {root}: {error}; allowed: all "
                    f"processes of an engine on one machine, with the same runtime_dir"
                ) from None
        time.sleep(_RETRY_SECONDS)
