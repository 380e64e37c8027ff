# SPDX-License-Identifier: Apache-2.0
"""A client of Mooncake Store: what FlexKV calls, and how one joins the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

NO_SPACE = -200
"""Error code of Mooncake 0.3.13: no node that lends memory has room."""


class MooncakeError(OSError):
    """A call to Mooncake Store or its metadata server failed."""


Client: TypeAlias = Any
"""A `mooncake.store.MooncakeDistributedStore`, which has no types. Every call but `register_buffer`
and `close` releases the interpreter's lock while it waits. Calls return 0 or sizes in bytes, and
negative codes for errors. Addresses and sizes are in bytes; the memory behind them stays the
caller's and must be registered."""


class Member:
    """A client that joins the store once, and the memory that it registers. Thread-safe. `join`:
    makes a client that has joined the store; `close` closes it. May wait for ever. Raises OSError
    if that fails."""

    def __init__(self, join: Callable[[], Client]) -> None:
        self._join = join
        self._joined: Client | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._unregistered: list[tuple[int, int]] = []

    @property
    def client(self) -> Client:
        """The client. Raises MooncakeError if it has not joined."""
        if self._joined is None:
            raise MooncakeError("Mooncake was not joined yet")
        return self._joined

    def join(self) -> None:
        """Join the store, and register the memory. Called by one thread until it succeeds. Raises
        OSError if the store cannot be joined."""
        if self._joined is not None:
            return
        client = self._join()
        with self._lock:
            if self._closed:
                # The memory may be gone, too.
                client.close()
                raise MooncakeError("Mooncake was closed while it was joined")
            self._joined = client
            self._register()

    def register(self, address: int, size: int) -> None:
        """Register memory at `address`, of `size` bytes; later if the client has not joined yet."""
        with self._lock:
            self._unregistered.append((address, size))
            self._register()

    def check_registered(self) -> None:
        """Raises MooncakeError if some memory cannot be registered."""
        if self._unregistered:
            with self._lock:
                self._register()
            if self._unregistered:
                raise MooncakeError("Mooncake cannot register the host memory")

    def close(self) -> None:
        """Leave the store. A client that joins later is closed at once."""
        with self._lock:
            self._closed = True
            if self._joined is not None:
                self._joined.close()

    def _register(self) -> None:
        """Register the memory that is not registered, once there is a client. Under the lock."""
        if self._joined is not None:
            self._unregistered = [
                each for each in self._unregistered if self._joined.register_buffer(*each) != 0
            ]


def error_of(what: str, code: int) -> MooncakeError:
    """The error of a call that returned a negative code."""
    return MooncakeError(f"{what} ended with code {code} of Mooncake")
