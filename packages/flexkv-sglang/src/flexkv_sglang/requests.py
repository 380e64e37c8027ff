# SPDX-License-Identifier: Apache-2.0
"""SGLang's requests on the rank that decides, from SGLang's queue to their ends.

A linker sees hashes of the pages that SGLang lacks, and neither requests nor answers. SGLang's
matches and the batches of its scheduler have the rest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from flexkv.client import CacheClient
from flexkv.engine.boundary import ErrorBoundary, in_turns
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.choice.cost import Span
from flexkv.engine.recorder import Recorder
from flexkv.engine.scheduler.spans import TracedWork
from flexkv_sglang.keys import PageKeys
from flexkv_sglang.reports import RequestReports
from flexkv_sglang.request import Tracked, spans_of_process
from flexkv_sglang.trailing import IN_HOST, TrailingPages
from flexkv_sglang.tree import MissingPages, PageHashes
from flexkv_sglang.waiting import WaitingRequests

_LOOK_SECONDS = 1.0
"""Seconds between two checks for ended requests. A check costs one call per running request."""


@in_turns
class SglangRequests:
    """The requests of one engine. Single-threaded, but for operators; see `in_turns`.

    Args:
        boundary: where errors of single requests end.
        recorder: of the requests; None if nothing is recorded. Owned.
        options: parameters that requests may set (setting `request_options`); None for all.

    Attributes:
        boundary: as given.
        figures: of the cache.
        sessions: the conversations of the requests.
        waiting: those in SGLang's queue.
        reports: where they begin and end.
        traced: the loads that have spans.
    """

    def __init__(
        self,
        cache: CacheClient,
        chooser: LoadChooser,
        *,
        page_size: int,
        page_keys: PageKeys,
        boundary: ErrorBoundary,
        recorder: Recorder | None,
        options: Collection[str] | None,
        trailing: TrailingPages,
    ) -> None:
        self.boundary = boundary
        self._cache = cache
        self._chooser = chooser
        self._page_size = page_size
        self._keys_of = page_keys.of
        self._trailing = trailing
        self.reports = RequestReports(
            cache,
            chooser,
            page_keys,
            page_size=page_size,
            trailing=trailing,
            recorder=recorder,
            options=options,
        )
        self.figures, self.sessions = self.reports.figures, self.reports.sessions
        self.traced = TracedWork(spans_of_process())
        self.waiting = WaitingRequests(
            cache,
            chooser,
            page_size=page_size,
            keys_of=page_keys.of,
            boundary=boundary,
            trailing=trailing,
            spans=self.traced.spans,
        )
        self._by_id: dict[str, Tracked] = {}
        self._checked = time.monotonic()

    # Requests that wait.

    def look_ahead(self, request: Any, prompt: MissingPages) -> None:
        """Find out what lower tiers have of the pages that SGLang lacks; see `WaitingRequests`."""
        self.waiting.look_up(self._track(request), prompt)

    def held(self, rids: Sequence[str], ended_batch: int) -> list[bool]:
        """See `WaitingRequests.held`. `ended_batch`: the last batch whose loads have ended."""
        self.waiting.shared.end_loads(ended_batch)
        return self.waiting.held(rids)

    def matched(self, request: Any, own_tokens: int) -> None:
        """SGLang has searched its own cache for a request, and looks it up next."""
        self._track(request).own_tokens = own_tokens

    def limit(self, request: Any) -> int | None:
        """The most tokens to load for a request; None for no limit."""
        options = self._track(request).options
        return options.max_load_tokens if options.load else 0

    def lookup(self, rid: str, hashes: Sequence[str]) -> int:
        """How many of the pages that SGLang lacks to load; SGLang computes the others. A hit that
        needs trailing pages is loaded as a whole or not at all. 0 for a request without `matched`.
        """
        tracked = self._by_id.get(rid)
        if tracked is None or not hashes:
            return 0
        keys, size, trailing = self._keys_of(hashes), self._page_size, self._trailing
        match = tracked.looked_up(keys, hashes[-1])
        most = tracked.options.max_load_tokens if tracked.may_load else 0
        if most is not None:
            keys = keys[: most // size]
        found = self._cache.lookup(keys) if keys else 0
        if found and trailing:
            found = trailing.longest(self._cache, keys[:found], IN_HOST)
        if not found:
            return 0
        blocks = found + trailing.count(trailing.of_hit(found))
        span = Span(tracked.own_tokens, tracked.own_tokens + found * size)
        choice = self._chooser.choose_load(span, blocks, whole=bool(trailing))
        if choice.left is None:
            return found
        pages = 0 if trailing else choice.blocks
        tracked.match = replace(match, left=((choice.left, (found - pages) * size),))
        return pages

    # Requests that SGLang computes next.

    def loads(self, rid: str, hashes: Sequence[str], batch: int, transfer_id: int) -> int:
        """A request loads these pages in the batch of this number, by a transfer. Returns how many
        of them lower tiers gave for it, also if an earlier load of these was cancelled."""
        self.waiting.shared.loads(rid, hashes[0], batch)
        tracked = self._by_id.get(rid)
        if tracked is None:
            return 0
        self.traced.began(transfer_id, tracked.request, len(hashes))
        came = self.waiting.fetched(tracked, self._keys_of(hashes))
        tracked.loads = len(hashes)
        tracked.fetched = {medium: count * self._page_size for medium, count in came.items()}
        return came.total()

    def cancelled(self, rid: str, transfer_id: int | None) -> None:
        """A request loads nothing, by the transfer that it had. Idempotent."""
        if transfer_id is not None:
            self.traced.cancelled(transfer_id)
        self.waiting.shared.cancelled(rid)
        tracked = self._by_id.get(rid)
        if tracked is not None:
            tracked.load_nothing()

    def scheduled(
        self, requests: Sequence[Any], waiting: Iterable[Any], hashes: PageHashes
    ) -> None:
        """Report a batch that SGLang computes next, and the requests that have ended. Called in
        each step, also without a batch.

        Args:
            requests: SGLang's requests of the batch; borrowed until they end.
            waiting: the requests in SGLang's queues. Any others that do not run are forgotten in
                time.
            hashes: of pages; borrowed until the next call.
        """
        if requests:
            self.waiting.shared.scheduled([each.rid for each in requests])
        self.reports.hashes = hashes
        for request in requests:
            tracked = self._track(request)
            try:
                self.waiting.leave(tracked)
                # SGLang computes long prompts in chunks, and resumes retracted requests.
                if not tracked.ran or tracked.loads:
                    self.reports.began(tracked, hashes)
            finally:
                tracked.forget_lookup()  # else the next chunk would report the load again
        now = time.monotonic()
        if now - self._checked >= _LOOK_SECONDS:
            self._checked = now
            queue = {id(each) for each in waiting}
            for tracked in [*self._by_id.values()]:
                if tracked.has_ended and id(tracked.sglang) not in queue:
                    self._end(tracked)

    # The cache.

    def forget_keys(self) -> None:
        """From now on, pages have other keys."""
        for tracked in self._by_id.values():
            tracked.forget_lookup()
            tracked.prefix, tracked.prefix_end = None, None
        self.waiting.forget_keys()

    def end_fetches(self) -> None:
        """End all fetches from lower tiers. Idempotent."""
        self.waiting.end_fetches()

    def close(self) -> None:
        """End the requests, the reports, the recorder and all fetches: each of them, also if
        another one fails."""
        with contextlib.ExitStack() as ends:
            ends.callback(self.figures.close)
            ends.callback(self.reports.close)
            for tracked in [*self._by_id.values()]:
                ends.callback(self._end, tracked)
            ends.callback(self.end_fetches)

    def _track(self, request: Any) -> Tracked:
        """The state of SGLang's request. It begins with the first call."""
        tracked = self._by_id.get(request.rid)
        if tracked is not None and tracked.sglang is request:
            return tracked
        if tracked is not None:
            self._end(tracked)  # an earlier one of the same id
        tracked = self._by_id[request.rid] = self.reports.track(request)
        self.reports.queued(tracked)
        return tracked

    def _end(self, tracked: Tracked) -> None:
        del self._by_id[tracked.id]
        self.waiting.leave(tracked)
        if tracked.ran:
            self.reports.ended(tracked)
