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
from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv.engine.scheduler.match import longest_hit
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


class TrailingPages:
    """The pages of all such pools of one engine; false if there are none.

    The pools are in the order of their blocks; those of one name have the same numbers of pages. A
    request computes on the states that it has loaded, so that no other one finds them in SGLang's
    own cache."""

    def __init__(self, pools: Iterable[TrailingPool] = ()) -> None:
        self.pools = tuple(pools)
        self.have_states = any(pool.are_states for pool in self.pools)
        # A hit of so many pages needs the last of them, as a window of pages does.
        self._groups = tuple(
            Group(place, Reach.WINDOW, pool.reach + 1, 1, 1)
            for place, pool in enumerate(self.pools)
        )

    def __bool__(self) -> bool:
        return bool(self.pools)

    def of_hit(self, pages: int) -> dict[str, int]:
        """How many of the last pages of a hit of `pages` pages have one, by the pool's name."""
        return {pool.name: min(pages, pool.reach) for pool in self.pools}

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

    def keys_behind(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys of all blocks that these pages may have beside those of full attention."""
        return [key for pool in self.pools for key in pool.keys_of(keys)]

    def keys_of_hit(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys of the blocks that a hit of these pages needs."""
        return self.keys_of(keys, self.of_hit(len(keys)))

    def longest(
        self, cache: CacheClient, keys: Sequence[bytes], places: Collection[Presence]
    ) -> int:
        """How many of these consecutive pages a hit may have at most, so that all that it needs
        before its end is in `places`; 0 if there is no such end near that of `keys`."""
        if not self.pools:
            return len(keys)
        present = _PartsPresent(cache, self.pools, keys, places)
        return longest_hit(Groups(self._groups, 1), present, 0, len(keys))


class _PartsPresent:
    """See `Present`; blocks and tokens are pages of a prefix. Those far before its end count as
    missing."""

    def __init__(
        self,
        cache: CacheClient,
        pools: Sequence[TrailingPool],
        keys: Sequence[bytes],
        places: Collection[Presence],
    ) -> None:
        self._cache = cache
        self._pools = pools
        self._keys = keys
        self._places = places
        # By pool, from the end of the prefix backwards, whether the first part of a page is there.
        self._known: list[list[bool]] = [[] for _ in pools]

    def first_missing(self, group: Group, start: int, stop: int) -> int:
        """Never called: no pool reaches everywhere."""
        raise NotImplementedError

    def last_missing(self, group: Group, start: int, stop: int) -> int | None:
        """See `Present.last_missing`. Most pages have no part, so that the others are looked up
        where the first is there."""
        pool, known, end = self._pools[group.index], self._known[group.index], len(self._keys)
        if stop <= end - _SEARCHED_MOST:
            return 0
        first = end - len(known)
        if start < first:
            begin = max(0, min(start, first - _SEARCHED_PAGES))
            known += reversed(self._there(pool, begin, first, range(1)))
        if False in known[end - stop : end - start]:
            return end - 1 - known.index(False, end - stop)
        there = self._there(pool, start, stop, range(1, pool.parts))
        count = stop - start
        pages = (page for page in reversed(range(count)) if not all(there[page::count]))
        return next((start + page for page in pages), None)

    def _there(self, pool: TrailingPool, start: int, stop: int, parts: range) -> list[bool]:
        keys = pool.keys_of(self._keys[start:stop], parts)
        return [each in self._places for each in self._cache.presence(keys)] if keys else []


NONE_TRAILING = TrailingPages()
NO_LAST: Mapping[str, int] = {}
"""For `last` if there are none."""
