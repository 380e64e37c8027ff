# SPDX-License-Identifier: Apache-2.0
"""How old blocks are, for the setting `max_age_seconds`.

A time is a count of `UNIT_SECONDS` since 2026, of which a record on disk has 24 bits. A block is
too old a little before its time, never after it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence

UNIT_SECONDS = 32
UNKNOWN = 0
"""The time of a block of which nobody knows it. It is too old."""
LAST = (1 << 24) - 1
"""The last time that a record can hold: in the year 2043. Later blocks have this one."""
_BEGIN = 1_767_225_600
"""2026-01-01, in seconds of `time.time()`."""
_MARGIN_SECONDS = 8.0
"""A block is too old so much sooner, because nobody looks for old blocks all the time."""
_LOOK_SECONDS = 1.0
"""Pause between two searches for old blocks. Not tuned."""
_CHECKED = 4
"""Keys that are checked for each that is noted, while more are known than blocks are there."""


def uptime() -> float:
    """Seconds that the machine has been running; goes on while it sleeps, and nobody sets it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def time_of_day() -> float:
    """Seconds since 1970. Somebody may set it."""
    return time.time()


class BlockAges:
    """When the blocks of one cache were stored. It knows those in host memory by their keys; a disk
    keeps the times of its own. Single-threaded, but for `at_least`.

    Args:
        max_age_seconds: blocks that were stored longer ago are too old.
        num_blocks: blocks that host memory has room for.
    """

    def __init__(self, max_age_seconds: float, num_blocks: int) -> None:
        self._units = max(1, int((max_age_seconds - _MARGIN_SECONDS) // UNIT_SECONDS))
        self._most = 2 * num_blocks + 1024
        # The time of day at the start: who sets the clock later does not change the age of a block.
        self._begin = time_of_day() - _BEGIN - uptime()
        self._has: Callable[[bytes], bool] = lambda _: True
        self._stored: dict[bytes, int] = {}
        self._keys: dict[int, dict[bytes, None]] = {}  # by time
        self._times: list[int] = []  # a heap of the keys of `_keys`
        self._left: Iterator[bytes] | None = None
        self._looked = 0.0

    @property
    def now(self) -> int:
        """The time of a block that is stored now."""
        units = int((self._begin + uptime()) // UNIT_SECONDS)
        return min(max(1, units), LAST)

    @property
    def oldest(self) -> int:
        """Blocks of earlier times are too old."""
        return max(1, self.now - self._units + 1)

    @property
    def is_due(self) -> bool:
        """Whether to look for old blocks now."""
        return uptime() - self._looked >= _LOOK_SECONDS

    def at_least(self, stored: int) -> None:
        """It is not earlier than this time of a block. If it is by the clock, the clock has
        fallen."""
        behind = stored - self.now
        if behind > 0:
            self._begin += behind * UNIT_SECONDS

    def bind(self, has: Callable[[bytes], bool]) -> None:
        """Set what says whether host memory has a block, complete or not."""
        self._has = has

    def note(self, keys: Sequence[bytes], stored: Sequence[int] | None = None) -> None:
        """Blocks come into host memory.

        Args:
            keys: their keys.
            stored: the time of each; None for now.
        """
        now = self.now
        for key, at in zip(keys, [now] * len(keys) if stored is None else stored, strict=True):
            self._drop(key)
            self._stored[key] = at
            if at not in self._keys:
                self._keys[at] = {}
                heapq.heappush(self._times, at)
            self._keys[at][key] = None
        self._check(_CHECKED * len(keys))

    def of(self, keys: Sequence[bytes]) -> list[int]:
        """The times of blocks in host memory."""
        return [self._stored.get(key, UNKNOWN) for key in keys]

    def count_young(self, keys: Sequence[bytes]) -> int:
        """How many blocks of host memory, from the first on, are not too old."""
        oldest = self.oldest
        if not self._has_older(oldest):
            return len(keys)
        stored = self._stored
        old = (i for i, key in enumerate(keys) if stored.get(key, oldest) < oldest)
        return next(old, len(keys))

    def are_young(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks of host memory are not too old."""
        oldest = self.oldest
        if not self._has_older(oldest):
            return [True] * len(keys)
        return [self._stored.get(key, oldest) >= oldest for key in keys]

    def take_old(self, most: int) -> list[bytes]:
        """Up to `most` keys of blocks of host memory that are too old. The caller removes these."""
        taken: list[bytes] = []
        oldest = self.oldest
        while len(taken) < most and self._has_older(oldest):
            keys = self._keys[self._times[0]]
            while keys and len(taken) < most:
                key, _ = keys.popitem()
                del self._stored[key]
                taken.append(key)
            if not keys:
                del self._keys[heapq.heappop(self._times)]
        if len(taken) < most:
            self._looked = uptime()
        return taken

    def clear(self) -> None:
        """Host memory has no block any more."""
        for known in (self._stored, self._keys, self._times):
            known.clear()
        self._left = None

    def _has_older(self, oldest: int) -> bool:
        return bool(self._times) and self._times[0] < oldest

    def _drop(self, key: bytes) -> None:
        at = self._stored.pop(key, None)
        if at is not None:
            self._keys[at].pop(key, None)

    def _check(self, count: int) -> None:
        """Forget some blocks that host memory has evicted, if too many are known."""
        if self._left is None and len(self._stored) > self._most:
            self._left = iter(list(self._stored))
        for _ in range(count if self._left is not None else 0):
            key = next(self._left, None) if self._left is not None else None
            if key is None:
                self._left = None
                return
            if not self._has(key):
                self._drop(key)
