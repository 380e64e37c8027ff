# SPDX-License-Identifier: Apache-2.0
"""Finds the available blocks of a request, by few calls for many blocks."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.client import CacheClient
from flexkv.engine.scheduler.groups import Group
from flexkv.engine.scheduler.keys import BlockKeys
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.types.presence import Presence

_FIRST_ASK = 16
"""Blocks in the first question to lower tiers. The number doubles each time that they have all: a
prefix may end anywhere, and each block costs about half a microsecond."""

_OBTAINABLE = (Presence.HOST, Presence.BELOW)


class Availability:
    """`Present` for one request. If calls begin at the same first block of a group, each block is
    looked up once. The last missing block must be asked for with the same end or an earlier one
    each time, as `longest_hit` does.

    Args:
        cache: the cache of the engine.
        tracked: the request.
        keys: makes the keys of its blocks.
        below: whether blocks of lower tiers count as available, too.

    Attributes:
        in_host: whether all blocks found so far are in host memory.
    """

    def __init__(
        self, cache: CacheClient, tracked: TrackedRequest, keys: BlockKeys, *, below: bool
    ) -> None:
        self._cache = cache
        self._tracked = tracked
        self._keys = keys
        self._below = below and cache.info.may_fetch
        self.in_host = True
        self._gaps: dict[tuple[int, int], tuple[int, int]] = {}
        self._ends: dict[int, tuple[int, list[bool]]] = {}

    def first_missing(self, group: Group, start: int, stop: int) -> int:
        """See `Present.first_missing`."""
        gap, asked = self._gaps.get((group.index, start), (start, start))
        if gap == asked < stop:
            gap = asked + self._reach(self._keys.of(self._tracked, group, asked, stop))
            self._gaps[group.index, start] = gap, stop
        return min(gap, stop)

    def last_missing(self, group: Group, start: int, stop: int) -> int | None:
        """See `Present.last_missing`."""
        # The known part: where it ends, and backwards from there whether each block is available.
        end, known = self._ends.setdefault(group.index, (stop, []))
        first = end - len(known)
        if start < first:
            keys = self._keys.of(self._tracked, group, start, first)
            there = self._there(keys)
            there += [False] * (first - start - len(keys))  # the engine has not hashed them
            known += reversed(there)
        try:
            return end - 1 - known.index(False, end - stop, end - start)
        except ValueError:
            return None

    def _reach(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, are available."""
        count, ask = self._cache.lookup(keys), _FIRST_ASK
        while self._below and count < len(keys):
            there = self._there(keys[count : count + ask])
            if False in there:
                return count + there.index(False)
            count, ask = count + len(there), 2 * ask
        return count

    def _there(self, keys: Sequence[bytes]) -> list[bool]:
        presence = self._cache.presence(keys)
        if self._below:
            self.in_host = self.in_host and Presence.BELOW not in presence
            return [each in _OBTAINABLE for each in presence]
        return [each is Presence.HOST for each in presence]
