# SPDX-License-Identifier: Apache-2.0
"""What an engine knows of its pool's shared stores, by questions to the service."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flexkv.service import messages as wire
from flexkv.service.line import Line
from flexkv.transfer.sources import ANSWERS, HAS_SECONDS, LACKS_SECONDS


class StoreAnswers:
    """Single-threaded; no call waits.

    Args:
        line: to the service; borrowed.
        seconds: how long an answer is awaited. Then the block counts as absent, until there is one
            or `LACKS_SECONDS` are over.
    """

    def __init__(self, line: Line, seconds: float) -> None:
        self._line = line
        self._seconds = seconds
        self._known: dict[bytes, tuple[bool, float]] = {}
        self._asked: dict[bytes, float] = {}

    def has(self, key: bytes, now: float) -> bool | None:
        """Whether a store has the block of `key`; None if that is unknown and may become known.

        Args:
            key: the key.
            now: time.monotonic().
        """
        has, until = self._known.get(key, (False, 0.0))
        if until > now:
            return has
        asked = self._asked.get(key)
        is_late = asked is not None and self._seconds < now - asked <= LACKS_SECONDS
        return False if is_late else None

    def ask(self, keys: Sequence[bytes], scattered: Sequence[bytes]) -> bool:
        """Ask about blocks of which `has` does not know. Returns whether an answer is awaited. The
        arguments are those of `CacheClient.query`."""
        now = time.monotonic()
        unknown = {key for key in (*keys, *scattered) if self.has(key, now) is None}
        # Those that nobody has asked about, or that got no answer for long.
        new = {key for key in unknown if now - self._asked.get(key, 0.0) > LACKS_SECONDS}
        first = [key for key in keys if key in new]
        others = [key for key in scattered if key in new]
        most = wire.MOST_KEYS
        for start in range(0, len(first), most):
            self._line.put(wire.Query(first[start : start + most], []))
        for start in range(0, len(others), most):
            self._line.put(wire.Query([], others[start : start + most]))
        for key in (*first, *others):
            self._asked.pop(key, None)  # to its end
            self._asked[key] = now
        _limit(self._asked)
        if new:
            self._line.await_answer()
        return bool(unknown)

    def hear(self, message: wire.Answered) -> None:
        """The service answers."""
        now = time.monotonic()
        for has, keys in ((True, message.there), (False, message.absent)):
            until = now + (HAS_SECONDS if has else LACKS_SECONDS)
            for key in keys:
                self._asked.pop(key, None)
                self._known.pop(key, None)  # to its end
                self._known[key] = has, until
        _limit(self._known)

    def clear(self) -> None:
        """The service is gone, and with it all answers that it owed."""
        self._asked.clear()


def _limit(table: dict[bytes, float] | dict[bytes, tuple[bool, float]]) -> None:
    while len(table) > ANSWERS:
        del table[next(iter(table))]
