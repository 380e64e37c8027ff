# SPDX-License-Identifier: Apache-2.0
"""Fetches from lower tiers for requests that wait in SGLang's queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexkv.client import CacheClient, FetchId, FetchState
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.choice.cost import Span
from flexkv.engine.scheduler.fetches import fetched_blocks, note_media
from flexkv.types.changes import Medium
from flexkv.types.tenants import NO_TENANT
from flexkv_sglang.trailing import NONE_TRAILING, OBTAINABLE, TrailingPages


@dataclass(slots=True)
class _Trailing:
    """The trailing pages that a request needs before the end of its prefix.

    Attributes:
        keys: keys of the pages that the request's prefix may have at most.
        tenant: number of the request's tenant.
        pages: how many of these it has; unknown until their fetch has been tried.
        fetch: of their blocks; None if it has not begun.
        tried: whether it was tried.
    """

    keys: Sequence[bytes]
    tenant: int
    pages: int = 0
    fetch: FetchId | None = None
    tried: bool = False


@dataclass(slots=True)
class _Fetched:
    """A fetch of a request.

    Attributes:
        id: of the fetch.
        keys: keys of its blocks.
        first: number of the first of them.
    """

    id: FetchId
    keys: list[bytes]
    first: int


class AwaitedPrefixes:
    """The fetches of one engine's requests, at most one for each. Single-threaded.

    Args:
        cache: the engine's cache; borrowed.
        chooser: decides which fetches are worth waiting for; borrowed.
        block_tokens: tokens of a block.
        trailing: the pages of which a hit needs the last.
        priority_of: returns the priority of a request.
        ended: called with the request and the last state of each fetch that has ended.

    Attributes:
        trailing: as given.
    """

    def __init__(
        self,
        cache: CacheClient,
        chooser: LoadChooser,
        block_tokens: int,
        trailing: TrailingPages = NONE_TRAILING,
        *,
        priority_of: Callable[[str], int] = lambda rid: 0,
        ended: Callable[[str, FetchState], None] = lambda rid, state: None,
    ) -> None:
        self.trailing = trailing
        self._priority_of = priority_of
        self._ended = ended
        self._trailing: dict[str, _Trailing] = {}
        self._cache = cache
        self._chooser = chooser
        self._block_tokens = block_tokens
        self._fetches: dict[str, _Fetched] = {}
        self._given: dict[str, dict[bytes, Medium]] = {}

    def __contains__(self, rid: str) -> bool:
        """Whether the request has a fetch."""
        return rid in self._fetches

    def begin(self, rid: str, keys: Sequence[bytes], first: int, tenant: int = NO_TENANT) -> bool:
        """Begin to fetch blocks from lower tiers. The request has no fetch.

        Args:
            rid: the request.
            keys: keys of its blocks from some block on, in order.
            first: number of the first of them.
            tenant: number of the request's tenant.

        Returns:
            Whether the fetch can be extended. If not, no tier has a block behind it.
        """
        fetch = self._fetch(rid, keys, tenant)
        if fetch is None:
            return False
        self._fetches[rid] = _Fetched(fetch, list(keys), first)
        return self._cache.fetch_state(fetch).stop == len(keys)

    def extend(self, rid: str, keys: Sequence[bytes]) -> bool:
        """Fetch the blocks behind those of the request's fetch. Returns whether the fetch can be
        extended further."""
        fetched = self._fetches[rid]
        fetched.keys += keys
        return self._cache.extend_fetch(fetched.id, keys)

    def end_with_trailing(self, rid: str, keys: Sequence[bytes], tenant: int = NO_TENANT) -> None:
        """Nothing more is fetched for the request's prefix, which ends within `keys`: fetch the
        trailing pages before its end as soon as the end is known.

        Args:
            rid: the request.
            keys: keys of the pages behind those that SGLang has.
            tenant: number of the request's tenant.
        """
        self._trailing[rid] = _Trailing(keys, tenant)

    def held(self, rids: Sequence[str]) -> list[bool]:
        """Whether each request should wait, because its fetch is expected to end sooner than
        computing would. Fetches of all other requests end: those requests have left the queue.

        Args:
            rids: all requests of the queue.
        """
        for rid in (self._fetches.keys() | self._trailing.keys() | self._given.keys()) - set(rids):
            self.end(rid)
            self._given.pop(rid, None)
        return [self._is_awaited(rid) for rid in rids]

    def loads(self, rid: str, keys: Sequence[bytes]) -> Counter[Medium]:
        """The request loads blocks, so its fetch ends. Returns how many of them each lower tier has
        fetched for the request, also if an earlier load of these was cancelled."""
        fetched = self._fetches.get(rid)
        if fetched is not None:
            media = self._given.setdefault(rid, {})
            note_media(media, fetched.keys, self._cache.fetch_state(fetched.id))
        self.end(rid)
        return fetched_blocks(self._given.get(rid, {}), keys)

    def end(self, rid: str) -> None:
        """End the request's fetch and release its blocks. Idempotent."""
        fetched = self._fetches.get(rid)
        if fetched is not None:
            state = self._cache.end_fetch(fetched.id)
            del self._fetches[rid]  # not before: an error would lose the fetch
            self._chooser.fetched(fetched.id, state)
            self._ended(rid, state)
        trailing = self._trailing.get(rid)
        if trailing is not None:
            if trailing.fetch is not None:
                self._ended(rid, self._cache.end_fetch(trailing.fetch))
            del self._trailing[rid]

    def end_all(self) -> None:
        """End the fetches of all requests. Idempotent."""
        for rid in [*self._fetches, *self._trailing]:
            self.end(rid)
        self._given.clear()

    def _is_awaited(self, rid: str) -> bool:
        trailing = self._trailing.get(rid)
        if trailing is not None and not trailing.tried and not self._try_trailing(rid, trailing):
            return False
        return self._is_prefix_awaited(rid) or (
            trailing is not None
            and trailing.fetch is not None
            and self._are_trailing_awaited(trailing)
        )

    def _is_prefix_awaited(self, rid: str) -> bool:
        fetched = self._fetches.get(rid)
        if fetched is None:
            return False
        state = self._cache.fetch_state(fetched.id)
        first, size = fetched.first, self._block_tokens
        span = Span(first * size, (first + state.stop) * size)
        return not state.done and self._chooser.is_worth_waiting(fetched.id, span)

    def _are_trailing_awaited(self, trailing: _Trailing) -> bool:
        assert trailing.fetch is not None
        span = Span(0, trailing.pages * self._block_tokens)
        done = self._cache.fetch_state(trailing.fetch).done
        return not done and self._chooser.is_worth_waiting(trailing.fetch, span)

    def _try_trailing(self, rid: str, trailing: _Trailing) -> bool:
        """Begin to fetch trailing pages, if the end of the prefix is known. Returns False if no
        tier has any that the request could use: then it uses no page of the prefix, either."""
        prefix = self._fetches.get(rid)
        if prefix is None:
            length = self._cache.lookup(trailing.keys)
        else:
            state = self._cache.fetch_state(prefix.id)
            if state.queried is not None and not state.done:
                return True
            length = prefix.first + state.stop
        trailing.tried = True
        trailing.pages = self.trailing.longest(self._cache, trailing.keys[:length], OBTAINABLE)
        if length and not trailing.pages:
            self.end(rid)
            return False
        keys = self.trailing.keys_of_hit(trailing.keys[: trailing.pages])
        trailing.fetch = self._fetch(rid, keys, trailing.tenant)
        return True

    def _fetch(self, rid: str, keys: Sequence[bytes], tenant: int) -> FetchId | None:
        own = tenant if self._cache.info.takes_tenants else None
        return self._cache.fetch(keys, tenant=own, priority=self._priority_of(rid))
