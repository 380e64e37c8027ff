# SPDX-License-Identifier: Apache-2.0
"""The scheduler of an engine attaches again in a thread: that waits for the service, and an idle
engine calls nobody."""

from __future__ import annotations

import contextlib
import logging
import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from flexkv.index.key_set import KeySet
from flexkv.types.errors import ArenaError

logger = logging.getLogger(__name__)

_FIRST_SECONDS, _MOST_SECONDS = 1.0, 5.0
"""Pauses before the first try and between later ones, each up to half of it more or less; each is
twice as long as the one before. A service waits longer for engines that live. Not tuned."""
_LASTS_SECONDS = 60.0
"""An attachment that has lasted so long ended by chance: the pauses begin anew. Not tuned."""


class Attachment(NamedTuple):
    """What a service has given to a scheduler.

    Attributes:
        connection: to the service.
        below: what the disks of the pool have.
        announced: the blocks that engines of the pool are storing.
        has_shares: whether tenants have shares of the memory.
    """

    connection: socket.socket
    below: KeySet
    announced: KeySet
    has_shares: bool


class Reattachment:
    """Watches a connection, and attaches again whenever the service has closed it.

    Args:
        connection: the first one; borrowed for the call.
        attach: attaches again; may raise ArenaError and OSError. Called in the thread.
    """

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
