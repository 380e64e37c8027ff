# SPDX-License-Identifier: Apache-2.0
"""Fetches from lower tiers for requests that wait in SGLang's queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flexkv import KVCache
from flexkv.adapter.cost import Span
from flexkv.adapter.hit_sources import fetched_blocks
from flexkv.adapter.load_choice import LoadChooser
from flexkv.changes import Medium
from flexkv.transfer.fetch import Fetch


class AwaitedPrefixes:
    """The fetches of one engine's requests, at most one for each. Single-threaded.

    Args:
        cache: the engine's cache; borrowed.
        chooser: decides which fetches are worth waiting for; borrowed.
        block_tokens: tokens of a block.
    """

    def __init__(self, cache: KVCache, chooser: LoadChooser, block_tokens: int) -> None:
        self._cache = cache
        self._chooser = chooser
        self._block_tokens = block_tokens
        self._fetches: dict[str, Fetch] = {}

    def begin(self, rid: str, keys: Sequence[bytes], found: int) -> None:
        """Begin to fetch a prefix from lower tiers, unless the request's fetch is under way.

        Args:
            rid: the request.
            keys: keys of its blocks, in order.
            found: how many of the leading blocks are in host memory.
        """
        if found == len(keys) or rid in self._fetches or not self._cache.has_lower_tiers:
            return
        fetch = self._cache.fetch(keys)
        if fetch is not None:
            self._fetches[rid] = fetch

    def held(self, rids: Sequence[str]) -> list[bool]:
        """Whether each request should wait, because its fetch is expected to end sooner than
        computing would. Fetches of all other requests end: those requests have left the queue.

        Args:
            rids: all requests of the queue.
        """
        for rid in self._fetches.keys() - set(rids):
            self.end(rid)
        return [rid in self._fetches and self._is_awaited(self._fetches[rid]) for rid in rids]

    def count(self, rid: str, keys: Sequence[bytes]) -> Counter[Medium]:
        """How many blocks of `keys` each lower tier has fetched for the request."""
        fetch = self._fetches.get(rid)
        return fetched_blocks({} if fetch is None else dict.fromkeys(fetch.awaited, fetch), keys)

    def end(self, rid: str) -> None:
        """End the request's fetch and release its blocks. Idempotent."""
        fetch = self._fetches.pop(rid, None)
        if fetch is not None:
            self._cache.end_fetch(fetch)
            self._chooser.fetched(fetch)

    def end_all(self) -> None:
        """End the fetches of all requests. Idempotent."""
        for rid in list(self._fetches):
            self.end(rid)

    def _is_awaited(self, fetch: Fetch) -> bool:
        span = Span(0, fetch.stop * self._block_tokens)
        return not fetch.done and self._chooser.is_worth_waiting(fetch, span)
