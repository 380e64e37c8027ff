# SPDX-License-Identifier: Apache-2.0
"""Polls the cache of an engine that may be idle, so that old blocks leave it."""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol

from flexkv.control.http_door import RefusedError, SilentError

_SECONDS = 1.0
"""Pause between two polls. Not tuned."""


class PolledCache(Protocol):
    """Polls the cache between two calls of the engine."""

    def poll(self) -> None:
        """Poll it.

        Raises:
            SilentError: the engine has let no call in.
            RefusedError: the poll has failed.
        """
        ...


class IdlePolls:
    """Polls once in a second until `close`.

    Args:
        cache: what to poll; borrowed.
    """

    def __init__(self, cache: PolledCache) -> None:
        self._cache = cache
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="flexkv-ages", daemon=True).start()

    def close(self) -> None:
        """Begin no further poll. Does not wait for one that waits for its turn: the caller may have
        the turn. Idempotent."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            with contextlib.suppress(SilentError, RefusedError):
                self._cache.poll()
