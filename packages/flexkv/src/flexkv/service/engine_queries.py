# SPDX-License-Identifier: Apache-2.0
"""What one engine wants to know of a pool's shared stores, as the service keeps it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

from flexkv.client import CacheClient
from flexkv.service import messages as wire
from flexkv.transfer.sources import LACKS_SECONDS
from flexkv.types.presence import Presence

_MOST = 1 << 16
"""The most blocks that wait for an answer: of the longest prompts several. Further questions get no
answer, and their blocks are misses. Not tuned."""

_PAUSE_SECONDS = 0.002
"""Seconds between two looks for answers, which arrive after milliseconds. Not tuned."""


class EngineQueries:
    """Single-threaded.

    Args:
        cache: of the pool; borrowed.
    """

    def __init__(self, cache: CacheClient) -> None:
        self._cache = cache
        self._waiting: dict[bytes, float] = {}  # until when
        self._looked_at = 0.0

    def __bool__(self) -> bool:
        """Whether an answer is owed."""
        return bool(self._waiting)

    def handle(self, message: wire.Query) -> None:
        """Ask the stores, unless too much waits."""
        keys = message.keys + message.scattered
        if len(self._waiting) + len(keys) <= _MOST:
            self._cache.query(message.keys, message.scattered)
            # A store's answer is forgotten if the pool is cleared, or if nobody looks for long.
            self._waiting |= dict.fromkeys(keys, time.monotonic() + LACKS_SECONDS)

    def answers(self, now: float) -> Iterator[wire.Answered]:
        """What is known by now, of as many blocks as a message has: a look takes part of a
        millisecond, whatever an engine asks. Each store has a deadline, after which it counts as
        empty."""
        if not self._waiting or now - self._looked_at < _PAUSE_SECONDS:
            return
        self._looked_at = now
        keys = list(islice(self._waiting, wire.MOST_KEYS))
        there, absent = [], []
        for key, presence in zip(keys, self._cache.presence(keys), strict=True):
            until = self._waiting.pop(key)
            if presence is Presence.UNKNOWN:
                if until > now:
                    self._waiting[key] = until  # to its end
            elif presence is Presence.ABSENT:
                absent.append(key)
            else:
                there.append(key)
        if there or absent:
            yield wire.Answered(there, absent)

    def clear(self) -> None:
        """The engine has left."""
        self._waiting.clear()
