# SPDX-License-Identifier: Apache-2.0
"""Prefixes that waiting requests need and a lower tier reads."""

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
    """The fetches of one engine's requests, one at most for each.

    Args:
        cache: of the engine.
        chooser: says what is worth waiting for.
        block_tokens: of a block.
    """

    def __init__(self, cache: KVCache, chooser: LoadChooser, block_tokens: int) -> None:
        self._cache = cache
        self._chooser = chooser
        self._block_tokens = block_tokens
        self._fetches: dict[str, Fetch] = {}

    def begin(self, rid: str, keys: Sequence[bytes], found: int) -> None:
        """Have lower tiers read what they have of a prefix, unless they do so already.

        Args:
            rid: the request.
            keys: that it looks for.
            found: how many of them are in host memory, from the first on.
        """
        if found == len(keys) or rid in self._fetches or not self._cache.has_lower_tiers:
            return
        fetch = self._cache.fetch(keys)
        if fetch is not None:
            self._fetches[rid] = fetch

    def held(self, rids: Sequence[str]) -> list[bool]:
        """Which of these requests wait for something that may still come, and sooner than it is
        computed; all others that have waited are gone."""
        for rid in self._fetches.keys() - set(rids):
            self.end(rid)
        return [rid in self._fetches and self._is_awaited(self._fetches[rid]) for rid in rids]

    def count(self, rid: str, keys: Sequence[bytes]) -> Counter[Medium]:
        """How many of these blocks each lower tier has read for the request."""
        fetch = self._fetches.get(rid)
        return fetched_blocks({} if fetch is None else dict.fromkeys(fetch.awaited, fetch), keys)

    def end(self, rid: str) -> None:
        """The request has what it wanted, or wants nothing any more. Idempotent."""
        fetch = self._fetches.pop(rid, None)
        if fetch is not None:
            self._cache.end_fetch(fetch)
            self._chooser.fetched(fetch)

    def end_all(self) -> None:
        """No request waits any more."""
        for rid in list(self._fetches):
            self.end(rid)

    def _is_awaited(self, fetch: Fetch) -> bool:
        span = Span(0, fetch.stop * self._block_tokens)
        return not fetch.done and self._chooser.is_worth_waiting(fetch, span)
