# SPDX-License-Identifier: Apache-2.0
"""Rank 0's end of a session."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import NamedTuple

from flexkv.session import wire
from flexkv.session.runtime_directory import RuntimeDirectory, owned_message
from flexkv.session.wire import Answer, Greeting, SessionInfo, Shard
from flexkv.system.forks import close_in_children
from flexkv.types.errors import ArenaError

logger = logging.getLogger(__name__)

GREETING_SECONDS = 5.0
"""Seconds within which a peer must send its greeting. Peers send it at once."""

_PAUSE_SECONDS = 0.1
"""Seconds before the next attempt to accept, if the process has no descriptor or memory left."""


class Guest(NamedTuple):
    """A process that asks for the arena. Its connection is closed after the answer."""

    connection: socket.socket
    pid: int
    is_scheduler: bool


class Server:
    """Listens for the other ranks of the engine `name`, and for its scheduler.

    One thread accepts connections. Each connection has a thread of its own until its greeting is
    read, so a slow or wrong peer does not affect the others. Raises ArenaError if the directory
    cannot be used, or a living engine owns `name`."""

    def __init__(self, root: str, name: str, ranks: int) -> None:
        self._name = name
        self._ranks = ranks
        self._changed = threading.Condition()
        self._shards: dict[int, Shard] = {}
        self._waiting: list[Guest] = []
        self._answer: tuple[Answer, int | None] | None = None
        self._handing_out = threading.Lock()
        self._scheduler: int | None = None
        self._closed = threading.Event()
        self._directory = RuntimeDirectory(root, create=True)
        try:
            self._listener = self._directory.listen(name, socket.SOCK_SEQPACKET)
        except ArenaError:
            self._directory.close()
            raise
        close_in_children(self)
        self._thread = threading.Thread(target=self._accept, name="flexkv-session", daemon=True)
        self._thread.start()

    def gather(self, mine: Shard, patience: float) -> list[Shard]:
        """Wait `patience` seconds for the shards of the other ranks; `mine` is rank 0's. Returns
        all, in the order of ranks. Raises ArenaError if a rank did not join in time, or its shard
        does not fit the others."""
        deadline = time.monotonic() + patience
        with self._changed:
            while len(self._shards) < self._ranks - 1:
                if not self._changed.wait(deadline - time.monotonic()):
                    missing = sorted(set(range(1, self._ranks)) - set(self._shards))
                    raise ArenaError(
                        f"ranks {missing} of engine {self._name!r} did not join within "
                        f"{patience:.0f} s; allowed: all {self._ranks} ranks on one machine"
                    )
            shards = [mine, *(self._shards[rank] for rank in sorted(self._shards))]
        firsts: dict[int, Shard] = {}
        for shard in shards:
            first = firsts.setdefault(shard.stage, shard)
            for other, equal in (
                (mine, shard.kind == mine.kind),
                (first, shard.fingerprint == first.fingerprint),
            ):
                if not equal:
                    raise ArenaError(
                        f"rank {shard.rank} of engine {self._name!r} has another KV cache than "
                        f"rank {other.rank} ({shard} against {other}); allowed: the same in all "
                        f"ranks, except for the layers of other pipeline stages"
                    )
        return shards

    def hand_out(self, info: SessionInfo, fd: int) -> None:
        """Send the arena to all present and future guests. Its descriptor is borrowed until
        `close`."""
        self._settle(Answer(info), fd)

    def refuse(self, reason: str) -> None:
        """Send an error to all present and future guests, because there is no arena."""
        self._settle(Answer(error=reason), None)

    def close(self) -> None:
        """Stop listening and release the engine's id, which another engine may then use.
        Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        # Remove the file while this process still listens. Afterwards the file may be the next
        # engine's.
        self._directory.remove(self._name)
        # A shutdown ends the accepting thread. After a plain close, the thread would go on with
        # whatever gets the descriptor's number next.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._directory.close()

    def leave_to_parent(self) -> None:
        """See `Owner.leave_to_parent`."""
        self._closed = threading.Event()
        self._closed.set()
        self._listener.close()
        self._directory.close()
        for guest in self._waiting:
            guest.connection.close()

    def _settle(self, answer: Answer, fd: int | None) -> None:
        with self._changed:
            self._answer = answer, fd
            waiting, self._waiting = self._waiting, []
        for guest in waiting:
            self._give(guest, answer, fd)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except Exception as error:  # noqa: BLE001 - nobody could join if the thread ended
                if self._closed.is_set():
                    return
                logger.warning(
                    "session %r cannot accept a process (%s); trying again in %s s",
                    self._name,
                    error,
                    _PAUSE_SECONDS,
                )
                self._closed.wait(_PAUSE_SECONDS)
                continue
            try:
                threading.Thread(
                    target=self._attend, args=(connection,), name="flexkv-greeting", daemon=True
                ).start()
            except Exception as error:  # noqa: BLE001 - no more threads, or no memory
                logger.warning("session %r refused a process: %s", self._name, error)
                connection.close()

    def _attend(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(GREETING_SECONDS)
            self._greet(connection)
        except (OSError, ValueError) as error:
            logger.warning("refused a connection to session %r: %s", self._name, error)
            self._send(connection, Answer(error=f"not a FlexKV greeting: {error}"))

    def _greet(self, connection: socket.socket) -> None:
        peer = wire.peer_of(connection)
        if peer.uid != os.geteuid():
            raise ValueError("the peer is another user")
        greeting, fd = wire.receive(connection, Greeting)
        if fd is not None:
            os.close(fd)
        if greeting is None:
            connection.close()  # another engine asks whether this one lives
            return
        shard = greeting.rank
        if shard is None and greeting.scheduler is None:
            raise ValueError("neither a rank nor a scheduler")
        guest = Guest(connection, peer.pid, shard is None)
        with self._changed:
            if shard is not None and not self._take(shard):
                answer, fd = Answer(error=owned_message(self._name, os.getpid())), None
            elif self._answer is None:
                self._waiting.append(guest)
                return
            else:
                answer, fd = self._answer
        self._give(guest, answer, fd)

    def _take(self, shard: Shard) -> bool:
        """Record the shard of a rank. False if the rank has joined already or does not exist."""
        if shard.rank in self._shards or not 0 < shard.rank < self._ranks:
            return False
        self._shards[shard.rank] = shard
        self._changed.notify_all()
        return True

    def _give(self, guest: Guest, answer: Answer, fd: int | None) -> None:
        """Answer a guest. Only the first scheduler gets the arena."""
        if not guest.is_scheduler or fd is None:
            self._send(guest.connection, answer, fd)
            return
        with self._handing_out:
            if self._scheduler is not None:
                refusal = _taken_message(self._name, self._scheduler)
                self._send(guest.connection, Answer(error=refusal))
            elif self._send(guest.connection, answer, fd):
                self._scheduler = guest.pid

    def _send(self, connection: socket.socket, answer: Answer, fd: int | None = None) -> bool:
        with connection:
            try:
                wire.send(connection, answer, fd)
                return True
            except OSError as error:
                logger.warning("a process disconnected before its answer: %s", error)
                return False


def _taken_message(name: str, pid: int) -> str:
    return (
        f"the arena of engine id {name!r} has been handed to scheduler process {pid}, and an arena "
        f"has one scheduler in its life; allowed: one scheduler per engine, which restarts with "
        f"its workers, and an engine_id of its own for every engine"
    )
