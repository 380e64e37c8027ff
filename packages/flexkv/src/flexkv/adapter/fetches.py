# SPDX-License-Identifier: Apache-2.0
"""Prefixes that requests wait for while a lower tier reads them into host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexkv.adapter.request import TrackedRequest
from flexkv.cache import KVCache
from flexkv.tiers.job import Priority
from flexkv.transfer.fetch import Fetch

LOOKAHEAD_SECONDS = 0.05
"""A load may begin when the rest of it is expected within this time: the engine's blocks are held
meanwhile. As long as some steps of a decoding batch, in which blocks seldom become scarce."""


class Fetches:
    """The fetches of one engine's requests, one at most for each; each is kept with its request.

    Args:
        cache: of the engine.
        ahead: offer blocks that are about to come, so that the device copies the first while the
            last are read. Only for engines that recompute a failed load: one of those blocks may
            not come.
        ended: told of every fetch that has ended.
    """

    def __init__(self, cache: KVCache, ahead: bool, ended: Callable[[Fetch], None]) -> None:
        self._cache = cache
        self._ahead = ahead
        self._ended = ended

    def begin_early(self, tracked: TrackedRequest, keys: Sequence[bytes]) -> None:
        """The request is in the queue: fetch its blocks `keys` in good time."""
        fetch = self._cache.fetch(keys, Priority.PREFETCH)
        if fetch is not None:
            tracked.early = fetch
            tracked.awaited = set(fetch.awaited)

    def offer(
        self,
        tracked: TrackedRequest,
        keys: Sequence[bytes],
        start: int,
        is_worth_waiting: Callable[[Fetch, int], bool],
    ) -> int | None:
        """How many of the request's blocks from `start` on, `keys`, can be loaded now or are about
        to be; None while it should ask again later.

        What has come stays in host memory until `end`. Where waiting for the rest is not worth it,
        what has come is all. `is_worth_waiting` is told the fetch and the position in the request
        that it ends at: host memory may have no room for more.
        """
        fetch = tracked.waiting
        if fetch is None or tracked.waiting_start > start:
            # It is its turn, or the engine has lost what it had when the fetch began.
            fetch = self._begin(tracked, keys, start)
        if fetch is None or fetch.done:
            return self._cache.lookup(keys)
        end = tracked.waiting_start + fetch.stop
        if not is_worth_waiting(fetch, end):
            return self._cache.lookup(keys)
        if self._ahead and fetch.seconds_left < LOOKAHEAD_SECONDS:
            return end - start
        return None

    @staticmethod
    def has(tracked: TrackedRequest) -> bool:
        """Whether blocks of the request are being fetched, or were for it."""
        return tracked.early is not None or tracked.waiting is not None

    @staticmethod
    def is_waiting(tracked: TrackedRequest) -> bool:
        """Whether blocks of the request may still come."""
        return tracked.waiting is not None and not tracked.waiting.done

    def end(self, tracked: TrackedRequest) -> None:
        """The request has what it wanted, or wants nothing any more. Idempotent."""
        tracked.awaited = frozenset()
        self._replace(tracked, None)

    def _begin(self, tracked: TrackedRequest, keys: Sequence[bytes], start: int) -> Fetch | None:
        if tracked.early is not None:
            self._cache.hasten(tracked.early)
        fetch = self._cache.fetch(keys)
        if fetch is not None:
            tracked.awaited = tracked.awaited | set(fetch.awaited)
        tracked.waiting_start = start
        self._replace(tracked, fetch)  # only now, so that what is under way goes on for the new one
        return fetch

    def _replace(self, tracked: TrackedRequest, fetch: Fetch | None) -> None:
        """The request waits for `fetch` instead of what it has waited for."""
        ended = tracked.early, tracked.waiting
        tracked.early, tracked.waiting = None, fetch
        for each in ended:
            if each is not None:
                self._cache.end_fetch(each)
                self._ended(each)
