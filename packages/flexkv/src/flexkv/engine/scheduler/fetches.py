# SPDX-License-Identifier: Apache-2.0
"""Prefixes that requests wait for while a lower tier reads them into host memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from flexkv.client import CacheClient, FetchId, FetchState
from flexkv.engine.scheduler.engine import Describe
from flexkv.engine.scheduler.options import tenant_number_of
from flexkv.engine.scheduler.request import TrackedRequest, Wanted, WantedFetch
from flexkv.engine.scheduler.spans import OtelSpans
from flexkv.types.changes import Medium

LOOKAHEAD_SECONDS = 0.05
"""Seconds: a load may begin if its remaining reads are expected within this time. The load holds
engine blocks meanwhile. The time is about some steps of a decoding batch, in which blocks seldom
become scarce."""

_ROOM_SECONDS = 1.0
"""Seconds that a load in parts waits for the service to find room for the next part."""


class Fetches:
    """The fetches of one engine's requests, at most one for each; each is kept with its request.

    A fetch that began while its request was queued goes on when the request's turn comes.

    Args:
        ahead: whether to offer blocks before they arrive: so the device copies the first while the
            last are read, and a prompt may be larger than host memory. Only for engines that
            recompute a failed load: such a block may fail to arrive.
        plain: whether blocks are of one group, so that a fetch of more also serves a request that
            lacks only the last of them.
    """

    def __init__(
        self,
        cache: CacheClient,
        ahead: bool,
        ended: Callable[[FetchId, FetchState], None],
        spans: OtelSpans | None = None,
        *,
        describe: Describe | None = None,
        plain: bool = True,
    ) -> None:
        self._cache = cache
        self._may_fetch = cache.info.may_fetch
        self._ahead = ahead
        # A service answers later what it has room for.
        self._answers_later = cache.info.is_shared
        self._ended = ended
        self._spans = spans
        self._describe = describe
        self._plain = plain

    def begin(
        self,
        tracked: TrackedRequest,
        keys: Sequence[bytes],
        start: int,
        *,
        queued: bool = False,
        announced: int = 0,
    ) -> WantedFetch | None:
        """Fetch the blocks `keys` of a request instead of what was fetched for it before. None if
        no tier has one to add. `start` and `announced` are those of a `Plan`."""
        begun = self._fetch(tracked, keys, queued=queued, announced=announced)
        fetch = None if begun is None else WantedFetch(begun, keys, start, queued)
        # Only now, so that what is under way goes on for the new one.
        self._replace(tracked, fetch)
        if fetch is not None:
            if queued:
                tracked.awaited = {}
            note_media(tracked.awaited, keys, self._cache.fetch_state(fetch.id))
        return fetch

    def extend(self, tracked: TrackedRequest, keys: Sequence[bytes]) -> bool:
        """Fetch the blocks `keys`, which the engine has hashed since, behind those of `begin`.
        Returns whether a further call may bring more."""
        fetch = tracked.fetch
        if fetch is None:
            return False
        # No copy in each call: of a prompt's 131,072 pages the last would take 2 ms.
        own = cast("list[bytes]", fetch.keys if fetch.is_extended else [*fetch.keys])
        own += keys
        fetch.keys, fetch.is_extended = own, True
        return self._cache.extend_fetch(fetch.id, keys)

    def offer(
        self,
        tracked: TrackedRequest,
        keys: Sequence[bytes],
        start: int,
        is_worth_waiting: Callable[[FetchId, FetchState, int, bool], bool],
        announced: int = 0,
    ) -> int | None:
        """How many of the request's blocks `keys` can be loaded now or soon; None if the engine
        should ask again later.

        Fetched blocks stay in host memory until `end`. If waiting for the rest is not worthwhile,
        only the fetched blocks count. `is_worth_waiting` gets the fetch, its state, the position in
        the request where it ends, and whether that is behind the blocks for which host memory has
        no room yet. The other arguments are those of `begin`.
        """
        if not (self._may_fetch and keys):  # the engine may have computed them meanwhile
            return self._cache.lookup(keys)
        fetch = tracked.fetch
        if fetch and fetch.queued and not self._raise(tracked, fetch, keys, start, announced):
            fetch = None
        if fetch and fetch.turn and self._answers_later:
            # Its service may say only now that it had no room while the request was queued.
            fetch = fetch if self._cache.fetch_state(fetch.id).length else None
        # Or the engine has evicted blocks since it began, or a hit of other groups ends elsewhere.
        if fetch is None or fetch.start > start or not (self._plain or _is_of(fetch, keys, start)):
            fetch = self.begin(tracked, keys, start, announced=announced)
            if fetch is None:
                return self._cache.lookup(keys)
        state = fetch.since_turn(self._cache.fetch_state(fetch.id))
        end = fetch.start + state.reach
        whole = state.stop > 0 and self._is_short(state)
        whole = whole and is_worth_waiting(fetch.id, state, end, True)
        if not whole:
            end = fetch.start + state.stop
            if state.done or not is_worth_waiting(fetch.id, state, end, False):
                if (
                    fetch.keys is keys
                    and state.arrived == len(keys)
                    and not self._cache.status.disabled
                ):
                    return len(keys)
                return self._cache.lookup(keys)
        if self._ahead and state.is_steady and state.seconds_left < LOOKAHEAD_SECONDS:
            return end - start
        return None

    def fetch_next(
        self, tracked: TrackedRequest, keys: Sequence[bytes], start: int
    ) -> FetchId | None:
        """Fetch the blocks `keys` of a load, from `start` on. Host memory had no room for them
        before the load of the others was ordered, and may have none yet. Returns the fetch; None
        if the blocks cannot come."""
        last = tracked.fetch
        if not self._ahead or last is None:
            return None
        state, ordered = self._cache.fetch_state(last.id), start - last.start
        if state.length == 0 or state.reach <= ordered < state.length:
            return None  # it has ended, by a reset or by a block that nobody gave
        fetch = last.id
        if ordered or state.stop:
            # One block first: to begin a fetch of many takes long, and there may be no room.
            begun = self._fetch(tracked, keys[:1])
            if begun is None:
                return None
            self._replace(tracked, WantedFetch(begun, keys, start))
            fetch = begun
        elif self._answers_later and time.monotonic() - state.begun > _ROOM_SECONDS:
            return None
        else:
            self._cache.extend_fetch(fetch, ())  # looks for room again
        now = self._cache.fetch_state(fetch)
        if now.stop:
            if now.length < len(keys):
                self._cache.extend_fetch(fetch, keys[now.length :])
            note_media(tracked.awaited, keys, self._cache.fetch_state(fetch))
        return fetch

    def media_of(self, tracked: TrackedRequest) -> Mapping[bytes, Medium]:
        """The medium of each block that had to come from a lower tier, as far as it is known now.
        HOST for blocks that no tier has given."""
        fetch = tracked.fetch
        if fetch is not None:
            note_media(tracked.awaited, fetch.keys, self._cache.fetch_state(fetch.id))
        return tracked.awaited

    def describe(self, tracked: TrackedRequest, wanted: Iterable[Wanted]) -> None:
        """Describe fetched blocks for events, which report them in full once they have arrived."""
        awaited = tracked.awaited
        if self._describe is None or not awaited:
            return
        for each in wanted:
            absent = set(self._cache.missing(each.keys))
            found = (
                (each.start + i, key)
                for i, key in enumerate(each.keys)
                if key in awaited and i not in absent
            )
            self._describe(tracked.request, each.group, found)

    def is_waiting(self, tracked: TrackedRequest) -> bool:
        """Whether blocks of the request may still arrive."""
        fetch = tracked.fetch
        return fetch is not None and not self._cache.fetch_state(fetch.id).done

    def awaits_more(self, tracked: TrackedRequest) -> bool:
        """Whether blocks of the request may still arrive, now or once host memory has room."""
        fetch = tracked.fetch
        if fetch is None:
            return False
        state = self._cache.fetch_state(fetch.id)
        return not state.done or self._is_short(state)

    def end(self, tracked: TrackedRequest) -> None:
        """The request has its blocks, or needs no more. Idempotent, also after an error."""
        if tracked.fetch is not None:
            self._end(tracked, tracked.fetch, None)
        tracked.awaited = {}

    def _raise(
        self,
        tracked: TrackedRequest,
        fetch: WantedFetch,
        keys: Sequence[bytes],
        start: int,
        announced: int,
    ) -> bool:
        """Let a fetch of a queued request go on as one of a request that waits. False if another
        one has to begin, because its blocks are others or it has ended."""
        at = start - fetch.start
        if at < 0 or list(fetch.keys[at : at + len(keys)]) != list(keys):
            return False
        state = self._cache.fetch_state(fetch.id)
        if state.arrived < at + len(keys):
            self._cache.extend_fetch(fetch.id, raise_priority=True)
            now = self._cache.fetch_state(fetch.id)
            # A full queue drops reads of queued requests, which cuts the fetch before them.
            is_cut = any(stop > now.stop for _, stop, _ in now.awaited)
            # A service may have room by now, and an announced block may have come.
            is_short = (announced or self._answers_later) and now.stop < now.length
            if now.length == 0 or is_cut or is_short:
                if self._answers_later:  # what it holds would count beside the next one
                    self._replace(tracked, None)
                return False
            note_media(tracked.awaited, fetch.keys, now)
            fetch.turn = time.monotonic(), state
        fetch.queued = False
        if len(fetch.keys) == len(keys):
            fetch.keys = keys
        return True

    def _fetch(
        self,
        tracked: TrackedRequest,
        keys: Sequence[bytes],
        *,
        queued: bool = False,
        announced: int = 0,
    ) -> FetchId | None:
        tenant = tenant_number_of(tracked.request) if self._cache.info.takes_tenants else None
        priority = tracked.options.priority or 0
        return self._cache.fetch(
            keys, queued=queued, tenant=tenant, announced=announced, priority=priority
        )

    def _is_short(self, state: FetchState) -> bool:
        """Whether the engine can load blocks for which host memory has no room yet."""
        return self._ahead and state.is_short

    def _replace(self, tracked: TrackedRequest, fetch: WantedFetch | None) -> None:
        """The request waits for `fetch` instead of its previous fetch."""
        last = tracked.fetch
        if last is None:
            tracked.fetch = fetch
            return
        try:
            state = self._end(tracked, last, fetch)
        except BaseException:
            if fetch is not None and tracked.fetch is last:
                self._cache.end_fetch(fetch.id)
            raise
        note_media(tracked.awaited, last.keys, state)

    def _end(
        self, tracked: TrackedRequest, fetch: WantedFetch, follower: WantedFetch | None
    ) -> FetchState:
        state = self._cache.end_fetch(fetch.id)
        tracked.fetch = follower  # not before: an error would lose the fetch
        self._ended(fetch.id, fetch.since_turn(state))
        if self._spans is not None:
            self._spans.add_fetch(tracked.request, state)
        return state


def _is_of(fetch: WantedFetch, keys: Sequence[bytes], start: int) -> bool:
    """Whether a fetch is of just these blocks. Each plan of a request makes its keys anew."""
    return fetch.keys is keys or (fetch.start == start and list(fetch.keys) == list(keys))


_NOT_FETCHED = (None, Medium.HOST)


def note_media(media: dict[bytes, Medium], keys: Sequence[bytes], state: FetchState) -> None:
    """Add to `media` the medium of each block that a fetch awaits or awaited, or could bring if the
    arena had room."""
    for start, stop, medium in (*state.awaited, *state.later):
        media.update(dict.fromkeys(keys[start:stop], medium))


def fetched_blocks(media: Mapping[bytes, Medium], keys: Sequence[bytes]) -> Counter[Medium]:
    """Count the blocks of `keys` that each lower tier gave or is expected to give."""
    counts = Counter(map(media.get, keys))
    return Counter({medium: counts[medium] for medium in counts if medium not in _NOT_FETCHED})


def slowest(fetched: Mapping[Medium, int]) -> Medium:
    """The slowest tier in `fetched`, which must not be empty."""
    return max(fetched, key=list(Medium).index)
