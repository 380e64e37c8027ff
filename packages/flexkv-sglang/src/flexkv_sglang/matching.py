# SPDX-License-Identifier: Apache-2.0
"""Answers SGLang's lookups: how many pages of a prompt are loaded."""

from __future__ import annotations

from flexkv.client import CacheClient
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.choice.cost import Span
from flexkv.types.packed_keys import PackedKeys
from flexkv_sglang.following import FollowedRequests
from flexkv_sglang.trailing import IN_HOST, TrailingPages


class PrefixMatcher:
    """The lookups of one engine, on the rank that decides. Single-threaded.

    Args:
        cache: the engine's cache; borrowed.
        chooser: decides what is worth loading; borrowed.
        page_size: tokens of a page.
        trailing: the pages of which a hit needs the last.
        followed: knows the requests, and learns of the lookups; borrowed.
    """

    def __init__(
        self,
        cache: CacheClient,
        chooser: LoadChooser,
        page_size: int,
        trailing: TrailingPages,
        followed: FollowedRequests,
    ) -> None:
        self._cache = cache
        self._chooser = chooser
        self._page_size = page_size
        self._trailing = trailing
        self._followed = followed

    def match(self, rid: str, keys: PackedKeys, last: str) -> int:
        """How many of these pages to load; SGLang computes the others. A hit that needs trailing
        pages is loaded as a whole or not at all.

        Args:
            rid: the request.
            keys: keys of the pages that SGLang lacks, in the order of the prompt.
            last: the hash of the last of them.
        """
        most = self._followed.looked_up(rid, keys, last)
        found = self._cache.lookup(keys[:most]) if most else 0
        if found and self._trailing:
            found = self._trailing.longest(self._cache, keys[:found], IN_HOST)
        if not found:
            return 0
        trailing, own_tokens = self._trailing, self._followed.own_tokens(rid)
        blocks = found + trailing.count(trailing.of_hit(found))
        span = Span(own_tokens, own_tokens + found * self._page_size)
        choice = self._chooser.choose_load(span, blocks, whole=bool(trailing))
        left = choice.left
        pages = choice.blocks if not trailing else 0 if left else found
        if left is not None:
            self._followed.left(rid, left, found - pages)
        return pages
