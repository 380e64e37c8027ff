# SPDX-License-Identifier: Apache-2.0
"""Prefixes that requests wait for while a lower tier reads them into host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from flexkv.client import CacheClient, FetchId, FetchState
from flexkv.engine.scheduler.engine import RequestSpans
from flexkv.engine.scheduler.options import tenant_number_of
from flexkv.engine.scheduler.request import TrackedRequest, WantedFetch
from flexkv.engine.scheduler.spans import add_fetch
from flexkv.types.changes import Medium

LOOKAHEAD_SECONDS = 0.05
"""Seconds: a load may begin if its remaining reads are expected within this time. The load holds
engine blocks meanwhile. The time is about some steps of a decoding batch, in which blocks seldom
become scarce."""


class Fetches:
    """The fetches of one engine's requests, at most one for each; each is kept with its request.

    Args:
        cache: the cache of the engine.
        ahead: whether to offer blocks before they arrive: so the device copies the first while the
            last are read, and a prompt may be larger than host memory. Only for engines that
            recompute a failed load: such a block may fail to arrive.
        ended: called with every fetch that has ended, and its last state.
        spans: takes every fetch that has ended; None if nobody wants to know.
    """

    def __init__(
        self,
        cache: CacheClient,
        ahead: bool,
        ended: Callable[[FetchId, FetchState], None],
        spans: RequestSpans | None = None,
    ) -> None:
        self._cache = cache
        self._may_fetch = cache.info.may_fetch
        self._ahead = ahead
        # A service answers later whether it has room: what lacks room then is computed.
        self._in_parts = ahead and not cache.info.is_shared
        self._ended = ended
        self._spans = spans

    def begin_early(
        self, tracked: TrackedRequest, keys: Sequence[bytes], announced: int = 0
    ) -> None:
        """Fetch the blocks `keys` of a queued request before its turn comes. Another engine writes
        the first `announced` of them to a shared store."""
        tenant = self._tenant_of(tracked)
        priority = tracked.options.priority or 0
        fetch = self._cache.fetch(
            keys, queued=True, tenant=tenant, announced=announced, priority=priority
        )
        if fetch is not None:
            tracked.early = WantedFetch(fetch, keys)
            tracked.awaited = {}
            note_media(tracked.awaited, keys, self._cache.fetch_state(fetch))

    def offer(
        self,
        tracked: TrackedRequest,
        keys: Sequence[bytes],
        start: int,
        is_worth_waiting: Callable[[FetchId, FetchState, int, bool], bool],
        announced: int = 0,
    ) -> int | None:
        """How many of the request's blocks from `start` on, `keys`, can be loaded now or soon; None
        if the engine should ask again later.

        Fetched blocks stay in host memory until `end`. If waiting for the rest is not worthwhile,
        only the fetched blocks count. `is_worth_waiting` gets the fetch, its state, the position in
        the request where it ends, and whether that is behind the blocks for which host memory has
        no room yet. Another engine writes the first `announced` of the blocks to a shared store.
        """
        if not (self._may_fetch and keys):  # the engine may have computed them meanwhile
            return self._cache.lookup(keys)
        fetch = tracked.waiting
        if fetch is None or fetch.start > start:
            # The request's turn has come, or the engine has evicted blocks since the fetch began.
            if self._came_early(tracked, keys):
                return len(keys)
            fetch = self.begin(tracked, keys, start, announced)
            if fetch is None:
                return self._cache.lookup(keys)
        state = self._cache.fetch_state(fetch.id)
        end = fetch.start + state.reach
        whole = state.stop > 0 and self._is_short(state)
        whole = whole and is_worth_waiting(fetch.id, state, end, True)
        if not whole:
            end = fetch.start + state.stop
            if state.done or not is_worth_waiting(fetch.id, state, end, False):
                return self._cache.lookup(keys)
        if self._ahead and state.is_steady and state.seconds_left < LOOKAHEAD_SECONDS:
            return end - start
        return None

    def begin(
        self, tracked: TrackedRequest, keys: Sequence[bytes], start: int, announced: int = 0
    ) -> WantedFetch | None:
        """Fetch the blocks `keys`, from block `start` of the request on, in place of its earlier
        fetches; None if no lower tier has a block to add."""
        if tracked.early is not None:
            self._cache.extend_fetch(tracked.early.id, raise_priority=True)
        tenant = self._tenant_of(tracked)
        priority = tracked.options.priority or 0
        begun = self._cache.fetch(keys, tenant=tenant, announced=announced, priority=priority)
        fetch = None if begun is None else WantedFetch(begun, keys, start)
        self._replace(tracked, fetch)  # only now, so that what is under way goes on for the new one
        if fetch is not None:
            note_media(tracked.awaited, keys, self._cache.fetch_state(fetch.id))
        return fetch

    def extend(self, tracked: TrackedRequest, keys: Sequence[bytes]) -> bool:
        """Fetch the blocks `keys`, which the engine has hashed since, behind those of `begin`.
        Returns whether a further call may bring more."""
        fetch = tracked.waiting
        if fetch is None:
            return False
        tracked.waiting = replace(fetch, keys=[*fetch.keys, *keys])
        return self._cache.extend_fetch(fetch.id, keys)

    def fetch_next(
        self, tracked: TrackedRequest, keys: Sequence[bytes], start: int
    ) -> FetchId | None:
        """Fetch the blocks `keys` of a load, from block `start` of the request on. Host memory had
        no room for them before the load of the others was ordered, and may have none yet.

        Returns:
            The fetch, for calls that follow; None if the blocks cannot come.
        """
        last = tracked.waiting
        if not self._in_parts or last is None:
            return None
        state, ordered = self._cache.fetch_state(last.id), start - last.start
        if state.length == 0 or state.reach <= ordered < state.length:
            return None  # it has ended, by a reset or by a block that nobody gave
        fetch = last.id
        if ordered or state.stop:
            tenant, priority = self._tenant_of(tracked), tracked.options.priority or 0
            # One block first: to begin a fetch of many takes long, and there may be no room.
            begun = self._cache.fetch(keys[:1], tenant=tenant, priority=priority)
            if begun is None:
                return None
            self._replace(tracked, WantedFetch(begun, keys, start))
            fetch = begun
        else:
            self._cache.extend_fetch(fetch, ())  # looks for room again
        if self._cache.fetch_state(fetch).stop:
            self._cache.extend_fetch(fetch, keys[1:])
            note_media(tracked.awaited, keys, self._cache.fetch_state(fetch))
        return fetch

    def media_of(self, tracked: TrackedRequest) -> Mapping[bytes, Medium]:
        """The medium of each block that had to come from a lower tier, as far as it is known now.
        HOST for blocks that no tier has given."""
        for fetch in (tracked.early, tracked.waiting):
            if fetch is not None:
                note_media(tracked.awaited, fetch.keys, self._cache.fetch_state(fetch.id))
        return tracked.awaited

    @staticmethod
    def has_begun(tracked: TrackedRequest) -> bool:
        """Whether blocks are being fetched for the request, or were since the last `end`."""
        return bool(tracked.early or tracked.waiting or tracked.awaited)

    def is_waiting(self, tracked: TrackedRequest) -> bool:
        """Whether blocks of the request may still arrive."""
        waiting = tracked.waiting
        return waiting is not None and not self._cache.fetch_state(waiting.id).done

    def awaits_more(self, tracked: TrackedRequest) -> bool:
        """Whether blocks of the request may still arrive, now or once host memory has room."""
        waiting = tracked.waiting
        if waiting is None:
            return False
        state = self._cache.fetch_state(waiting.id)
        return not state.done or self._is_short(state)

    def end(self, tracked: TrackedRequest) -> None:
        """The request has its blocks, or needs no more. Idempotent."""
        if self._may_fetch:
            self._replace(tracked, None)
            tracked.awaited = {}

    def _is_short(self, state: FetchState) -> bool:
        """Whether the engine can load blocks for which host memory has no room yet."""
        return self._in_parts and state.is_short

    def _tenant_of(self, tracked: TrackedRequest) -> int | None:
        return tenant_number_of(tracked.request) if self._cache.info.takes_tenants else None

    def _came_early(self, tracked: TrackedRequest, keys: Sequence[bytes]) -> bool:
        """Whether the fetch that began in the queue has brought all of these blocks."""
        early = tracked.early
        if early is None or len(early.keys) != len(keys) or list(early.keys) != list(keys):
            return False
        return (
            self._cache.fetch_state(early.id).arrived == len(keys)
            and not self._cache.status.disabled
        )

    def _replace(self, tracked: TrackedRequest, fetch: WantedFetch | None) -> None:
        """The request waits for `fetch` instead of its previous fetch."""
        ended = tracked.early, tracked.waiting
        tracked.early, tracked.waiting = None, fetch
        for each in ended:
            if each is not None:
                state = self._cache.end_fetch(each.id)
                note_media(tracked.awaited, each.keys, state)
                self._ended(each.id, state)
                if self._spans is not None:
                    add_fetch(self._spans, tracked.request, state)


_NOT_FETCHED = (None, Medium.HOST)


def note_media(media: dict[bytes, Medium], keys: Sequence[bytes], state: FetchState) -> None:
    """Add to `media` the medium of each block that a fetch awaits or awaited, or could bring if the
    arena had room.

    Args:
        media: media of blocks by key; changed.
        keys: keys of the fetch.
        state: state of the fetch.
    """
    for start, stop, medium in (*state.awaited, *state.later):
        media.update(dict.fromkeys(keys[start:stop], medium))


def fetched_blocks(media: Mapping[bytes, Medium], keys: Sequence[bytes]) -> Counter[Medium]:
    """Count the blocks of `keys` that each lower tier gave or is expected to give.

    Args:
        media: media of blocks that host memory did not have, by key; see `note_media`.
        keys: keys of blocks.
    """
    counts = Counter(map(media.get, keys))
    return Counter({medium: counts[medium] for medium in counts if medium not in _NOT_FETCHED})


def slowest(fetched: Mapping[Medium, int]) -> Medium:
    """The slowest tier in `fetched`, which must not be empty."""
    return max(fetched, key=list(Medium).index)
