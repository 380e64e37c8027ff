# SPDX-License-Identifier: Apache-2.0
"""The blocks of the pool in which SGLang keeps the pages of sliding windows.

SGLang numbers these pages apart. It offloads those that a node of its tree still has, and for a hit
it loads those of the window before the hit's end. A page of a window may take several slots, so
that no slot is larger than a page of full attention.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flexkv.client import CacheClient
from flexkv.types.presence import Presence

_HASH_BYTES = 32
_SEARCHED_PAGES = 64
"""Pages that are looked up at once, at least. Not tuned."""
_SEARCHED_MOST = 1024
"""Pages that are looked up at most, from the end of a prefix on: 0.8 ms on a cloud machine's core
if a page has one part and none is there. SGLang looks a waiting request up in each step."""


IN_HOST = (Presence.HOST,)
OBTAINABLE = (Presence.HOST, Presence.BELOW, Presence.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Windows:
    """The pages of sliding windows of one engine.

    Attributes:
        parts: slots that a page takes; 0 if the model has no such pages.
        first: number of the first page's first part among the blocks of the engine.
        pages: pages of the pool.
        reach: pages of a window, as SGLang loads them.
    """

    parts: int = 0
    first: int = 0
    pages: int = 0
    reach: int = 0

    def blocks_of(self, pages: Sequence[int]) -> list[int]:
        """The numbers of the blocks of pages, in the order of `keys_of`."""
        starts = range(self.first, self.first + self.parts * self.pages, self.pages or 1)
        return [start + page for start in starts for page in pages]

    def keys_of(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys of the windows' blocks of pages: those of full attention with a number behind
        the hash."""
        numbers = [bytes([number]) for number in range(1, 1 + self.parts)]
        return [key[:_HASH_BYTES] + each + key[_HASH_BYTES:] for each in numbers for key in keys]

    def with_last(self, keys: Sequence[bytes], count: int) -> Sequence[bytes]:
        """The keys of pages, followed by those of the windows' blocks of the last `count`."""
        if not count or not self.parts:
            return keys
        return [*keys, *self.keys_of(keys[len(keys) - count :])]

    def of_hit(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys of the windows' blocks that a hit of these pages needs."""
        return self.keys_of(keys[max(0, len(keys) - self.reach) :]) if self.parts else []

    def longest(
        self, cache: CacheClient, keys: Sequence[bytes], places: Collection[Presence]
    ) -> int:
        """How many of these pages a hit may have at most, so that the window before its end is in
        `places`; 0 if none is near the end of `keys`.

        Args:
            cache: of the engine.
            keys: keys of consecutive pages behind those that SGLang has itself.
            places: where blocks may be.
        """
        if not self.parts:
            return len(keys)
        end = begin = len(keys)
        there: list[bool] = []
        last = max(0, len(keys) - _SEARCHED_MOST)
        for page in range(len(keys) - 1, last - 1, -1):
            if page < begin:
                begin = max(0, page + 1 - max(self.reach, _SEARCHED_PAGES))
                there = self._there(cache, keys[begin : page + 1], places)
            if not there[page - begin]:
                end = page
            elif end - page >= self.reach:
                return end
        return 0 if last else end

    def _there(
        self, cache: CacheClient, keys: Sequence[bytes], places: Collection[Presence]
    ) -> list[bool]:
        presence = cache.presence(self.keys_of(keys))
        count = len(keys)
        return [all(each in places for each in presence[page::count]) for page in range(count)]


NO_WINDOWS = Windows()
