# SPDX-License-Identifier: Apache-2.0
"""What one engine wants to know of a pool's shared stores, as the service keeps it."""

from __future__ import annotations

from collections.abc import Iterator

from flexkv.client import CacheClient
from flexkv.service import messages as wire
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
        self._waiting: dict[bytes, None] = {}
        self._looked_at = 0.0

    def __bool__(self) -> bool:
        """Whether an answer is owed."""
        return bool(self._waiting)

    def handle(self, message: wire.Query) -> None:
        """Ask the stores, unless too much waits."""
        keys = message.keys + message.scattered
        if len(self._waiting) + len(keys) <= _MOST:
            self._cache.query(message.keys, message.scattered)
            self._waiting.update(dict.fromkeys(keys))

    def answers(self, now: float) -> Iterator[wire.Answered]:
        """What is known by now. Each store has a deadline, after which it counts as empty."""
        if not self._waiting or now - self._looked_at < _PAUSE_SECONDS:
            return
        self._looked_at = now
        keys = list(self._waiting)
        known = zip(keys, self._cache.presence(keys), strict=True)
        found = {key: each for key, each in known if each is not Presence.UNKNOWN}
        for key in found:
            del self._waiting[key]
        answered = list(found)
        for start in range(0, len(answered), wire.MOST_KEYS):
            part = answered[start : start + wire.MOST_KEYS]
            there = [key for key in part if found[key] is not Presence.ABSENT]
            absent = [key for key in part if found[key] is Presence.ABSENT]
            yield wire.Answered(there, absent)

    def clear(self) -> None:
        """The engine has left."""
        self._waiting.clear()
