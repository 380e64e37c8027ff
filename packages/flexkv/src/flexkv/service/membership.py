# SPDX-License-Identifier: Apache-2.0
"""A rank of an engine shows the service that it may write to the memory."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
from collections.abc import Callable

from flexkv.host.memory_lock import MemoryLock
from flexkv.system.forks import close_in_children
from flexkv.types.errors import ArenaError

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0
"""Seconds between two greetings while the service is gone, up to half of it more or less. Not
tuned."""


class Membership:
    """The service knows of this process by its connection and a pidfd, and if another service
    comes, by a lock on the memory, until this process has greeted that one, too. A thread does so.

    Args:
        connection: to the service; owned.
        lock: on the memory; owned.
        join: greets the service again.
    """

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
        """See `flexkv.system.forks.Owner`."""
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
