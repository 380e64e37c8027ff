# SPDX-License-Identifier: Apache-2.0
"""Processes that have connected to the service and are not attached yet: they greet, and may have
to wait for memory."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

from flexkv.service import messages as wire

logger = logging.getLogger(__name__)

_MEMORY_FDS = 3
"""Descriptors of memory that `messages.Resume` brings."""

_GREETING_SECONDS = 5.0
"""Seconds within which a peer must greet. Peers greet at once."""
_MOST_GUESTS = 256
"""Peers that have not greeted yet, and as many that have and wait."""

_LOGGED_SECONDS = 60.0
"""Seconds between two lines about refusals for one reason."""

_FINGERPRINT = re.compile(r"[A-Za-z0-9]{1,64}")
_MOST_BYTES = 1 << 40
"""Bytes of a part of a block, and more than any count of blocks or replicas."""

Greeting: TypeAlias = wire.Open | wire.Join | wire.Schedule | wire.Resume


class RefusalError(Exception):
    """What a process asked for is against the rules. The text is a sentence for its user."""


@dataclass(slots=True, eq=False)
class Newcomer:
    """A process that has greeted. It owns its connection, a pidfd by which its end shows (-1 for
    none), and descriptors of the memory that it hands back."""

    connection: socket.socket
    greeting: Greeting
    pidfd: int
    memory: list[int]

    @property
    def model(self) -> str:
        """The name of the model that it serves; empty for a process of an engine that is known."""
        greeting = self.greeting
        return greeting.model if isinstance(greeting, wire.Open | wire.Resume) else ""

    def close_files(self) -> None:
        """Close the descriptors, and leave the connection open. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        while self.memory:
            os.close(self.memory.pop())


class Lobby:
    """Processes that have not been let in. Single-threaded; it owns `listener`, where they connect.

    `watch` calls a function whenever a connection can be read, until `unwatch`. `is_ready` says
    whether a newcomer can be let in now, or is asked again in each turn. `admit` lets it in, with
    its connection and pidfd. The last two raise if it is refused.

    `refused` has why processes were refused, by the model that they serve; empty for those that
    name none. An entry ends when a process of the model is let in; the empty one with any.
    """

    def __init__(
        self,
        listener: socket.socket,
        watch: Callable[[socket.socket, Callable[[], object]], None],
        unwatch: Callable[[socket.socket], None],
        is_ready: Callable[[Newcomer], bool],
        admit: Callable[[Newcomer], None],
    ) -> None:
        self._listener = listener
        self._watch, self._unwatch = watch, unwatch
        self._is_ready, self._admit = is_ready, admit
        self._silent: dict[socket.socket, float] = {}
        self._waiting: list[Newcomer] = []
        self.refused: dict[str, str] = {}
        self._refused_for, self._refused_at = "", -_LOGGED_SECONDS
        listener.setblocking(False)
        watch(listener, self._accept)

    def serve(self, now: float) -> None:
        """Let those in who have waited long enough, and dismiss those who say nothing."""
        for newcomer in list(self._waiting):
            self._receive(newcomer)
        late = [each for each, since in self._silent.items() if now - since > _GREETING_SECONDS]
        for connection in late:
            self._dismiss(connection)

    def close(self) -> None:
        """Dismiss all, and listen no more."""
        self._listener.close()
        for connection in self._silent:
            connection.close()
        for newcomer in self._waiting:
            newcomer.close_files()
            newcomer.connection.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            logger.warning("cannot accept a process: %s", error)
            return
        with ExitStack() as undo:
            undo.callback(connection.close)
            connection.setblocking(False)
            if len(self._silent) >= _MOST_GUESTS or not wire.is_same_user(connection):
                logger.warning("refused a process of another user, or one of too many")
                return
            self._silent[connection] = time.monotonic()
            self._watch(connection, lambda: self._greet(connection))
            undo.pop_all()

    def _greet(self, connection: socket.socket) -> None:
        fds: list[int] = []
        newcomer = None
        try:
            packet, fds = wire.receive_greeting(connection)
            if not packet:
                self._dismiss(connection)  # another service asks whether this one lives
                return
            greeting = _greeting_of(wire.read_service(packet), fds)
            if len(self._waiting) >= _MOST_GUESTS:
                raise RefusalError(f"{_MOST_GUESTS} processes wait; allowed: no more")
            self._forget(connection)
            newcomer, fds = Newcomer(connection, greeting, fds[0], fds[1:]), []
            self._waiting.append(newcomer)
        except Exception as error:  # noqa: BLE001 - whatever one peer causes is no end for others
            self._refuse(connection, error, newcomer)
            return
        finally:
            for fd in fds:
                os.close(fd)
        self._receive(newcomer)

    def _receive(self, newcomer: Newcomer) -> None:
        try:
            if not self._is_ready(newcomer):
                return
            self._waiting.remove(newcomer)  # nobody is let in twice
            self._admit(newcomer)
            newcomer.close_files()
            for model in ("", newcomer.model):
                self.refused.pop(model, None)
        except Exception as error:  # noqa: BLE001 - as above
            self._refuse(newcomer.connection, error, newcomer)

    def _refuse(
        self, connection: socket.socket, error: Exception, newcomer: Newcomer | None = None
    ) -> None:
        with connection:  # it would wait for an answer
            model = ""
            if newcomer is not None:
                model = newcomer.model
                if newcomer in self._waiting:
                    self._waiting.remove(newcomer)
                newcomer.close_files()
            self._note_refusal(error, model)
            with contextlib.suppress(OSError):
                connection.sendall(wire.packets([wire.Refused(str(error))])[0])
            self._forget(connection)

    def _note_refusal(self, error: Exception, model: str) -> None:
        reason, now = str(error) or type(error).__name__, time.monotonic()
        if not isinstance(error, ConnectionError):  # else it has ended itself
            self.refused.pop(model, None)
            self.refused[model] = reason
            if len(self.refused) > _MOST_GUESTS:
                del self.refused[next(iter(self.refused))]
        # Processes try again every second or so.
        if reason != self._refused_for or now - self._refused_at >= _LOGGED_SECONDS:
            self._refused_for, self._refused_at = reason, now
            logger.warning("refused a process: %s", reason)

    def _forget(self, connection: socket.socket) -> None:
        self._unwatch(connection)
        self._silent.pop(connection, None)

    def _dismiss(self, connection: socket.socket) -> None:
        with connection:
            self._forget(connection)


def _greeting_of(messages: list[wire.ToService], fds: Sequence[int]) -> Greeting:
    """The greeting that a packet with these descriptors is. Raises RefusalError if it is none, or
    of another protocol."""
    resumes = bool(messages) and isinstance(messages[0], wire.Resume)
    most = 1 + _MEMORY_FDS if resumes else 1
    # Nothing else tells the end of a process, so that its slots would never be free again.
    if len(messages) != 1 or len(fds) != most or not wire.is_process(fds[0]):
        raise RefusalError("a greeting is one message with one pidfd, and memory to resume")
    (greeting,) = messages
    if not isinstance(greeting, Greeting):
        raise RefusalError(f"{type(greeting).__name__} is no greeting")
    if greeting.protocol != wire.PROTOCOL:
        raise RefusalError(
            f"the engine speaks protocol {greeting.protocol}; allowed: {wire.PROTOCOL}, the same "
            f"version of FlexKV as the service"
        )
    if isinstance(greeting, wire.Open | wire.Resume):
        _check_blocks(greeting.blocks)
        if len(greeting.model) > wire.MOST_NAME:
            raise RefusalError(
                f"the model's name has {len(greeting.model)} characters; allowed: {wire.MOST_NAME}"
            )
    return greeting


def _check_blocks(blocks: wire.PoolBlocks) -> None:
    """Refuse blocks that no engine has, by a RefusalError. Their fingerprint names folders."""
    counts = (blocks.engine_blocks, blocks.replicas, *blocks.shard_bytes)
    are_sizes = blocks.shard_bytes and all(0 < each <= _MOST_BYTES for each in counts)
    if not are_sizes or not _FINGERPRINT.fullmatch(blocks.fingerprint):
        raise RefusalError(
            f"the blocks have the fingerprint {blocks.fingerprint[:64]!r} and {len(counts) - 2} "
            f"parts of {blocks.shard_bytes[:4]} bytes; allowed: 1 to 64 letters and digits, and "
            f"sizes from 1"
        )
