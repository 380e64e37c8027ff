# SPDX-License-Identifier: Apache-2.0
"""Pages of which a hit needs the last ones: those of sliding windows, and recurrent states.

SGLang keeps them in pools of their own and numbers them apart. It offloads those that a node of its
tree still has, and for a hit it loads those before the hit's end. A page may take several slots, so
that no slot is larger than a page of full attention.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexkv.client import CacheClient
from flexkv.types.presence import Presence

WINDOWS = "swa"
STATES = "mamba"
"""SGLang's names of the pools."""

_HASH_BYTES = 32
_NUMBER_BYTES = 2
"""Bytes of a part's number in a key."""
_SEARCHED_PAGES = 64
"""Pages that are looked up at once, at least."""
_SEARCHED_MOST = 1024
"""Pages that are looked up at most, from the end of a prefix on: 0.8 ms on a cloud machine's core
if none is there. SGLang looks a waiting request up in each step."""


IN_HOST = (Presence.HOST,)
OBTAINABLE = (Presence.HOST, Presence.BELOW, Presence.UNKNOWN)


@dataclass(frozen=True, slots=True)
class TrailingPool:
    """Pages of one size.

    Attributes:
        name: SGLang's name of their pool.
        pages: pages of the pool.
        parts: slots that a page takes.
        first: number of the first page's first part among the blocks of the engine.
        number: number of a page's first part among those of all pools, from 1.
        reach: of how many pages before its end a hit needs one.
        are_states: whether the pages are recurrent states. The parts of a state have consecutive
            numbers; of windows, the pages of a part have.
    """

    name: str
    pages: int
    parts: int
    first: int
    number: int
    reach: int
    are_states: bool = False

    def blocks_of(self, pages: Sequence[int]) -> list[int]:
        """The numbers of the blocks of pages, in the order of `keys_of`."""
        of_part, of_page = (1, self.parts) if self.are_states else (self.pages, 1)
        starts = range(self.first, self.first + self.parts * of_part, of_part)
        return [start + page * of_page for start in starts for page in pages]

    def keys_of(self, keys: Sequence[bytes], parts: range | None = None) -> list[bytes]:
        """The keys of the blocks of pages: those of full attention with a number behind the hash.
        `parts`: of these parts only."""
        chosen = range(self.parts) if parts is None else parts
        numbers = [(self.number + part).to_bytes(_NUMBER_BYTES, "big") for part in chosen]
        return [key[:_HASH_BYTES] + each + key[_HASH_BYTES:] for each in numbers for key in keys]

    def last_of(self, pages: int) -> int:
        """How many of the last pages of a hit it needs."""
        return min(pages, self.reach)


class TrailingPages:
    """The pages of all such pools of one engine; false if there are none.

    Args:
        pools: in the order of their blocks. Pools of one name have the same numbers of pages.

    Attributes:
        pools: as given.
        have_states: whether there are recurrent states. A request computes on those that it has
            loaded, so that no other one finds them in SGLang's own cache.
    """

    def __init__(self, pools: Iterable[TrailingPool] = ()) -> None:
        self.pools = tuple(pools)
        self.have_states = any(pool.are_states for pool in self.pools)

    def __bool__(self) -> bool:
        return bool(self.pools)

    def of_hit(self, pages: int) -> dict[str, int]:
        """How many of the last pages of a hit of `pages` pages have one, by the pool's name."""
        return {pool.name: pool.last_of(pages) for pool in self.pools}

    def count(self, last: Mapping[str, int]) -> int:
        """How many blocks `blocks_of` and `keys_of` have. `last`: as `of_hit` returns it."""
        return sum(pool.parts * last.get(pool.name, 0) for pool in self.pools)

    def blocks_of(self, pages: Mapping[str, Sequence[int]]) -> list[int]:
        """The numbers of the blocks of pages, in the order of `keys_of`. `pages`: SGLang's numbers
        of pages, by the pool's name."""
        blocks = [pool.blocks_of(pages.get(pool.name, ())) for pool in self.pools]
        return [block for its in blocks for block in its]

    def keys_of(self, keys: Sequence[bytes], last: Mapping[str, int]) -> list[bytes]:
        """The keys of the blocks of the last pages of a prefix. `last`: as `of_hit` returns it."""
        ends = [(pool, keys[len(keys) - last.get(pool.name, 0) :]) for pool in self.pools]
        return [key for pool, its in ends for key in pool.keys_of(its)]

    def with_last(self, keys: Sequence[bytes], last: Mapping[str, int]) -> Sequence[bytes]:
        """The keys of a prefix, followed by `keys_of`."""
        return [*keys, *self.keys_of(keys, last)] if last else keys

    def keys_behind(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys of all blocks that these pages may have beside those of full attention."""
        return [key for pool in self.pools for key in pool.keys_of(keys)]

    def keys_of_hit(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys of the blocks that a hit of these pages needs."""
        return self.keys_of(keys, self.of_hit(len(keys)))

    def longest(
        self, cache: CacheClient, keys: Sequence[bytes], places: Collection[Presence]
    ) -> int:
        """How many of these pages a hit may have at most, so that all that it needs before its end
        is in `places`; 0 if there is no such end near that of `keys`.

        Args:
            keys: keys of consecutive pages behind those that SGLang has itself.
        """
        end, last = len(keys), max(0, len(keys) - _SEARCHED_MOST)
        searches = [_Search(cache, pool, keys, places) for pool in self.pools]
        agreed = 0
        while agreed < len(searches):
            for search in searches:
                shorter = search.end_up_to(end, last)
                agreed = agreed + 1 if shorter == end else 1
                end = shorter
        return end


class _Search:
    """What a pool has of the pages of a prefix, from its end on."""

    def __init__(
        self,
        cache: CacheClient,
        pool: TrailingPool,
        keys: Sequence[bytes],
        places: Collection[Presence],
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._keys = keys
        self._places = places
        self._known = len(keys)
        self._begun: dict[int, bool] = {}

    def end_up_to(self, end: int, last: int) -> int:
        """The end, up to `end`, before which all is there that a hit needs; 0 if there is none
        behind page `last`."""
        while end > last:
            begin = end - self._pool.last_of(end)
            gap = next((page for page in range(end - 1, begin - 1, -1) if not self._has(page)), -1)
            if gap < 0:
                gap = self._gap(begin, end)
            if gap < 0:
                return end
            end = gap
        return 0

    def _has(self, page: int) -> bool:
        """Whether the first part of a page is there: most pages have no part."""
        while page < self._known:
            end = self._known
            self._known = max(0, end - max(self._pool.last_of(end), _SEARCHED_PAGES))
            there = self._there(self._known, end, range(1))
            self._begun |= zip(range(self._known, end), there, strict=True)
        return self._begun[page]

    def _gap(self, begin: int, end: int) -> int:
        """The last of some pages that lacks a part other than the first; -1 if none does."""
        parts = range(1, self._pool.parts)
        there = self._there(begin, end, parts)
        count = end - begin
        gaps = (end - 1 - i for i in range(count) if not all(there[count - 1 - i :: count]))
        return next(gaps, -1)

    def _there(self, begin: int, end: int, parts: range) -> list[bool]:
        keys = self._pool.keys_of(self._keys[begin:end], parts)
        return [each in self._places for each in self._cache.presence(keys)] if keys else []


NONE_TRAILING = TrailingPages()
NO_LAST: Mapping[str, int] = {}
"""For `last` if there are none."""
