# SPDX-License-Identifier: Apache-2.0
"""The scheduler of an engine attaches again in a thread, since that waits for the service."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable

from flexkv.types.errors import ArenaError

logger = logging.getLogger(__name__)

_FIRST_SECONDS, _MOST_SECONDS = 1.0, 30.0
"""Pauses before the first try and between later ones, each up to half of it more or less; each is
twice as long as the one before. Not tuned."""
_LASTS_SECONDS = 60.0
"""An attachment that has lasted so long ended by chance: the pauses begin anew. Not tuned."""


class Reattachment:
    """One thread for each time that the connection has ended. Single-threaded but for that."""

    def __init__(self) -> None:
        self._pause = _FIRST_SECONDS
        self._attached_at = time.monotonic()
        self._runs = False
        self._stops = threading.Event()
        self._made: list[socket.socket] = []

    @property
    def runs(self) -> bool:
        """Whether it has begun, and `take` has not yet given a connection."""
        return self._runs

    @property
    def has_connection(self) -> bool:
        """Whether `take` gives a connection."""
        return bool(self._made)

    def begin(self, attach: Callable[[], socket.socket]) -> None:
        """Call `attach` from time to time until it raises neither ArenaError nor OSError."""
        if time.monotonic() - self._attached_at > _LASTS_SECONDS:
            self._pause = _FIRST_SECONDS
        self._runs = True
        threading.Thread(
            target=self._try, args=(attach,), name="flexkv-reattachment", daemon=True
        ).start()

    def take(self) -> socket.socket | None:
        """The connection, which is the caller's; None if there is none yet."""
        if not self._made:
            return None
        self._runs, self._attached_at = False, time.monotonic()
        return self._made.pop()

    def close(self) -> None:
        """Try no more. A thread that waits for the service ends after that. Idempotent."""
        self._stops.set()
        while self._made:
            self._made.pop().close()

    def _try(self, attach: Callable[[], socket.socket]) -> None:
        said = ""
        while not self._stops.wait(self._pause * random.uniform(0.5, 1.5)):
            self._pause = min(2 * self._pause, _MOST_SECONDS)
            try:
                self._made.append(attach())
            except (ArenaError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("not attached to the service again yet: %s", error)
                continue
            if self._stops.is_set():
                self.close()
            return
