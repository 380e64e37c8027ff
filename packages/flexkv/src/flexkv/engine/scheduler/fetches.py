# SPDX-License-Identifier: Apache-2.0
"""Prefixes that requests wait for while a lower tier reads them into host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexkv.cache import KVCache
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.tiers.job import Priority
from flexkv.transfer.fetch import Fetch

LOOKAHEAD_SECONDS = 0.05
"""Seconds: a load may begin if its remaining reads are expected within this time. The load holds
engine blocks meanwhile. The time is about some steps of a decoding batch, in which blocks seldom
become scarce."""


class Fetches:
    """The fetches of one engine's requests, at most one for each; each is kept with its request.

    Args:
        cache: the cache of the engine.
        ahead: whether to offer blocks before they arrive, so that the device copies the first while
            the last are read. Only for engines that recompute a failed load: such a block may fail
            to arrive.
        ended: called with every fetch that has ended.
    """

    def __init__(self, cache: KVCache, ahead: bool, ended: Callable[[Fetch], None]) -> None:
        self._cache = cache
        self._has_tiers = cache.has_lower_tiers
        self._ahead = ahead
        self._ended = ended

    def begin_early(self, tracked: TrackedRequest, keys: Sequence[bytes]) -> None:
        """Fetch the blocks `keys` of a queued request before its turn comes."""
        fetch = self._cache.fetch(keys, Priority.PREFETCH)
        if fetch is not None:
            tracked.early = fetch
            tracked.awaited = dict.fromkeys(fetch.awaited, fetch)

    def offer(
        self,
        tracked: TrackedRequest,
        keys: Sequence[bytes],
        start: int,
        is_worth_waiting: Callable[[Fetch, int], bool],
    ) -> int | None:
        """How many of the request's blocks from `start` on, `keys`, can be loaded now or soon; None
        if the request should ask again later.

        Fetched blocks stay in host memory until `end`. If waiting for the rest is not worthwhile,
        only the fetched blocks count. `is_worth_waiting` gets the fetch and the position in the
        request where it ends, since host memory may have no room for more.
        """
        if not self._has_tiers:
            return self._cache.lookup(keys)
        fetch = tracked.waiting
        if fetch is None or tracked.waiting_start > start:
            # The request's turn has come, or the engine has evicted blocks since the fetch began.
            fetch = self._begin(tracked, keys, start)
        if fetch is None or fetch.done:
            return self._cache.lookup(keys)
        end = tracked.waiting_start + fetch.stop
        if not is_worth_waiting(fetch, end):
            return self._cache.lookup(keys)
        if self._ahead and fetch.is_steady and fetch.seconds_left < LOOKAHEAD_SECONDS:
            return end - start
        return None

    @staticmethod
    def has_begun(tracked: TrackedRequest) -> bool:
        """Whether blocks are being fetched for the request, or were since the last `end`."""
        return bool(tracked.early or tracked.waiting or tracked.awaited)

    @staticmethod
    def is_waiting(tracked: TrackedRequest) -> bool:
        """Whether blocks of the request may still arrive."""
        return tracked.waiting is not None and not tracked.waiting.done

    def end(self, tracked: TrackedRequest) -> None:
        """The request has its blocks, or needs no more. Idempotent."""
        if self._has_tiers:
            tracked.awaited = {}
            self._replace(tracked, None)

    def _begin(self, tracked: TrackedRequest, keys: Sequence[bytes], start: int) -> Fetch | None:
        if tracked.early is not None:
            self._cache.raise_priority(tracked.early)
        fetch = self._cache.fetch(keys)
        if fetch is not None:
            tracked.awaited |= dict.fromkeys(fetch.awaited, fetch)
        tracked.waiting_start = start
        self._replace(tracked, fetch)  # only now, so that what is under way goes on for the new one
        return fetch

    def _replace(self, tracked: TrackedRequest, fetch: Fetch | None) -> None:
        """The request waits for `fetch` instead of its previous fetch."""
        ended = tracked.early, tracked.waiting
        tracked.early, tracked.waiting = None, fetch
        for each in ended:
            if each is not None:
                self._cache.end_fetch(each)
                self._ended(each)
