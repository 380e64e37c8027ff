# SPDX-License-Identifier: Apache-2.0
"""Answers SGLang's lookups: how many pages of a prompt are loaded."""

from __future__ import annotations

from flexkv.client import CacheClient
from flexkv.engine.choice.cost import Span
from flexkv.engine.choice.load_choice import LoadChooser
from flexkv.engine.side_figures import CacheFigures
from flexkv.types.packed_keys import PackedKeys
from flexkv_sglang.queries import Queries
from flexkv_sglang.windows import IN_HOST, Windows


class PrefixMatcher:
    """The lookups of one engine, on the rank that decides. Single-threaded.

    Args:
        cache: the engine's cache; borrowed.
        chooser: decides what is worth loading; borrowed.
        page_size: tokens of a page.
        windows: the model's sliding windows.
        figures: counts the queries; borrowed.

    Attributes:
        queries: the lookups.
    """

    def __init__(
        self,
        cache: CacheClient,
        chooser: LoadChooser,
        page_size: int,
        windows: Windows,
        figures: CacheFigures,
    ) -> None:
        self._cache = cache
        self._chooser = chooser
        self._page_size = page_size
        self._windows = windows
        self.queries = Queries(figures, page_size)

    def match(self, rid: str, keys: PackedKeys) -> int:
        """How many of these pages to load; SGLang computes the others. A hit that needs windows is
        loaded as a whole or not at all.

        Args:
            rid: the request.
            keys: keys of the pages that SGLang lacks, in the order of the prompt.
        """
        found = self._cache.lookup(keys)
        found = self._windows.longest(self._cache, keys[:found], IN_HOST)
        pages, left = 0, None
        if found:
            parts = self._windows.parts
            blocks = found + parts * min(found, self._windows.reach)
            span = Span(0, found * self._page_size)
            choice = self._chooser.choose_load(span, blocks, whole=bool(parts))
            left = choice.left
            pages = choice.blocks if not parts else 0 if left else found
        if left is not None:
            self._chooser.left(left)
        self.queries.asked(rid, len(keys), left, found - pages)
        return pages
