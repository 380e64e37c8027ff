# SPDX-License-Identifier: Apache-2.0
"""Prefixes that requests wait for while a lower tier reads them into host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from flexkv import Fetch, KVCache, Priority

LOOKAHEAD_SECONDS = 0.05
"""A load may begin when the rest of it is expected within this time: the engine's blocks are held
meanwhile. As long as some steps of a decoding batch, in which blocks seldom become scarce."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request's fetch, and the position of its first block in the request."""

    fetch: Fetch
    start: int


class Fetches:
    """The fetches of one engine's requests, one at most for each.

    Args:
        cache: of the engine.
        ahead: offer blocks that are about to come, so that the device copies the first while the
            last are read. Should one of them not come, vLLM's load fails: only where it recomputes
            then.
        ended: told of every fetch that has ended.
    """

    def __init__(self, cache: KVCache, ahead: bool, ended: Callable[[Fetch], None]) -> None:
        self._cache = cache
        self._ahead = ahead
        self._ended = ended
        self._early: dict[str, Fetch] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._awaited: dict[str, AbstractSet[bytes]] = {}

    def begin_early(self, request_id: str, keys: Sequence[bytes]) -> None:
        """The request is in the queue: fetch its blocks `keys` in good time."""
        self.end(request_id)  # of an earlier request of the same id, if any
        fetch = self._cache.fetch(keys, Priority.PREFETCH)
        if fetch is not None:
            self._early[request_id] = fetch
            self._awaited[request_id] = set(fetch.awaited)

    def offer(
        self,
        request_id: str,
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
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.start > start:
            # It is its turn, or the engine has lost what it had when the fetch began.
            waiting = self._begin(request_id, keys, start)
        if waiting is None or waiting.fetch.done:
            return self._cache.lookup(keys)
        if not is_worth_waiting(waiting.fetch, waiting.start + waiting.fetch.stop):
            return self._cache.lookup(keys)
        if self._ahead and waiting.fetch.seconds_left < LOOKAHEAD_SECONDS:
            return waiting.start + waiting.fetch.stop - start
        return None

    def awaited(self, request_id: str) -> AbstractSet[bytes]:
        """Keys of the blocks that had to come from a lower tier for the request, until `end`."""
        return self._awaited.get(request_id, frozenset())

    def is_waiting(self, request_id: str) -> bool:
        """Whether blocks of the request may still come."""
        waiting = self._waiting.get(request_id)
        return waiting is not None and not waiting.fetch.done

    def end(self, request_id: str) -> None:
        """The request has what it wanted, or wants nothing any more."""
        early = self._early.pop(request_id, None)
        if early is not None:
            self._end(early)
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._end(waiting.fetch)
        self._awaited.pop(request_id, None)

    def _end(self, fetch: Fetch) -> None:
        self._ended(fetch)
        self._cache.end_fetch(fetch)

    def _begin(self, request_id: str, keys: Sequence[bytes], start: int) -> _Waiting | None:
        early = self._early.get(request_id)
        if early is not None:
            self._cache.hasten(early)
        fetch = self._cache.fetch(keys)
        awaited = self.awaited(request_id)
        self.end(request_id)  # only now, so that what is under way goes on for the new one
        if fetch is not None:
            awaited |= set(fetch.awaited)
        if awaited:
            self._awaited[request_id] = awaited
        if fetch is None:
            return None
        self._waiting[request_id] = _Waiting(fetch, start)
        return self._waiting[request_id]
