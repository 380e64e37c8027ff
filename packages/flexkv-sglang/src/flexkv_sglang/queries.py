# SPDX-License-Identifier: Apache-2.0
"""Counts each request's query once, although SGLang looks up a waiting request in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexkv.engine.choice.cost import Span
from flexkv.engine.choice.load_choice import Left
from flexkv.engine.side_figures import CacheFigures
from flexkv.types.changes import Medium

_UNANSWERED = 64
"""Queries of requests that left unscheduled, before these are searched for. Not tuned."""


@dataclass(frozen=True, slots=True)
class _Query:
    pages: int
    left: Left | None
    left_pages: int


class Queries:
    """The requests of one engine, from their last lookup until they get their pages.

    Args:
        figures: counts the queries; borrowed.
        page_tokens: tokens of a page.
    """

    def __init__(self, figures: CacheFigures, page_tokens: int) -> None:
        self._figures = figures
        self._page_tokens = page_tokens
        self._open: dict[str, _Query] = {}

    def asked(self, rid: str, pages: int, left: Left | None, left_pages: int) -> None:
        """Note the lookup of a request, in place of its earlier lookups.

        Args:
            rid: the request.
            pages: pages that the engine's own cache lacks.
            left: why some loadable pages are not loaded; None if all are loaded.
            left_pages: how many loadable pages are not loaded.
        """
        self._open[rid] = _Query(pages, left, left_pages)

    def loaded(self, rid: str, pages: int, fetched: Mapping[Medium, int]) -> None:
        """Count a request that loads `pages` pages.

        Args:
            rid: the request.
            pages: pages that it loads.
            fetched: how many of them came from each lower tier.
        """
        self._count(self._open.pop(rid, _Query(pages, None, 0)), pages, fetched)

    def scheduled(self, rids: Sequence[str], waiting: Sequence[str]) -> None:
        """Count the requests of a batch that load nothing.

        Args:
            rids: requests of the batch.
            waiting: all requests that still wait. Queries of any others are discarded in time.
        """
        for rid in rids:
            query = self._open.pop(rid, None)
            if query is not None:
                self._count(query, 0, {})
        if len(self._open) > 2 * len(waiting) + _UNANSWERED:
            known = set(waiting)
            self._open = {rid: query for rid, query in self._open.items() if rid in known}

    def _count(self, query: _Query, hits: int, fetched: Mapping[Medium, int]) -> None:
        size = self._page_tokens
        tokens = {medium: count * size for medium, count in fetched.items()}
        self._figures.asked(query.pages * size, hits * size, tokens)
        if hits:
            # The pages' place in the prompt is unknown here. Later pages would have cost more.
            self._figures.hit(hits, Span(0, hits * size))
        if query.left is not None:
            self._figures.left(query.left, query.left_pages * size)
