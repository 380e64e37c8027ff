# SPDX-License-Identifier: Apache-2.0
"""What requests ask for, counted once each. SGLang looks a waiting request up in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexkv.adapter.cost import Span
from flexkv.adapter.figures import CacheFigures
from flexkv.adapter.load_choice import Left
from flexkv.changes import Medium

_UNANSWERED = 64
"""Requests that may have left before they were scheduled, until somebody looks. Not tuned."""


@dataclass(frozen=True, slots=True)
class _Query:
    pages: int
    left: Left | None
    left_pages: int


class Queries:
    """The requests of one engine, from their last lookup until they get their pages.

    Args:
        figures: that count.
        page_tokens: tokens of a page.
    """

    def __init__(self, figures: CacheFigures, page_tokens: int) -> None:
        self._figures = figures
        self._page_tokens = page_tokens
        self._open: dict[str, _Query] = {}

    def asked(self, rid: str, pages: int, left: Left | None, left_pages: int) -> None:
        """A request was looked up.

        Args:
            rid: the request.
            pages: that the engine does not have itself.
            left: why some that could be loaded are not; None if all are.
            left_pages: how many these are.
        """
        self._open[rid] = _Query(pages, left, left_pages)

    def loaded(self, rid: str, pages: int, fetched: Mapping[Medium, int]) -> None:
        """A request gets so many pages; `fetched` are those of them that lower tiers had."""
        self._count(self._open.pop(rid, _Query(pages, None, 0)), pages, fetched)

    def scheduled(self, rids: Sequence[str], waiting: Sequence[str]) -> None:
        """The engine computes requests.

        Args:
            rids: of the batch.
            waiting: of all requests that still wait. What others asked for is forgotten.
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
            # Where in the prompt they lie is not known here. Further back they would cost more.
            self._figures.hit(hits, Span(0, hits * size))
        if query.left is not None:
            self._figures.left(query.left, query.left_pages * size)
