# SPDX-License-Identifier: Apache-2.0
"""SGLang's requests on the rank that decides: from SGLang's queue to their ends."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Sequence
from typing import Any

from flexkv.client import CacheClient, FetchState
from flexkv.engine.boundary import ErrorBoundary, in_turns
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.recorder import Recorder
from flexkv.engine.scheduler.reports import HitReports
from flexkv.engine.side_figures import CacheFigures
from flexkv_sglang.following import FollowedRequests, Hashes, options_reader
from flexkv_sglang.look_ahead import Prompt
from flexkv_sglang.matching import PrefixMatcher
from flexkv_sglang.page_keys import PageKeys
from flexkv_sglang.trailing import TrailingPages
from flexkv_sglang.waiting import WaitingRequests


@in_turns
class SglangRequests:
    """The requests of one engine. Single-threaded, but for operators; see `in_turns`.

    Args:
        cache: the engine's cache; borrowed.
        chooser: decides what is worth loading and waiting for; borrowed.
        page_size: tokens of a page, which is a block.
        page_keys: makes the keys of pages; borrowed.
        boundary: where errors of single requests end.
        recorder: of the requests; None if nothing is recorded. Owned.
        options: parameters that requests may set (setting `request_options`); None for all.
        trailing: the pages of which a hit needs the last.

    Attributes:
        boundary: as given.
        figures: of the cache.
        sessions: the conversations of the requests.
        waiting: those in SGLang's queue.
        followed: all of them.
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
        self._keys_of = page_keys.of
        self.waiting = WaitingRequests(
            cache,
            chooser,
            page_size,
            page_keys.of,
            boundary,
            trailing=trailing,
            priority_of=self._priority_of,
            fetched=self._fetched,
        )
        reader = options_reader(options)
        reader.set_media(cache.info.media)
        # The worker's figures count this rank's errors, which must not count twice.
        self.figures = CacheFigures(
            cache, ErrorBoundary(), reader.put_counts, lambda: chooser.prefill_cost
        )
        reports = HitReports(cache, chooser, self.figures, recorder, page_size)
        self.sessions = reports.sessions
        self.followed = FollowedRequests(
            cache, page_keys, reports, reader, page_size=page_size, trailing=trailing
        )
        self._matcher = PrefixMatcher(cache, chooser, page_size, trailing, self.followed)

    # Requests that wait.

    @property
    def looks_ahead(self) -> bool:
        """Whether pages of waiting requests are left to look up."""
        return bool(self.waiting.ahead)

    def is_new(self, rid: str) -> bool:
        """Whether SGLang's own cache must be searched for this waiting request: in the first call
        since it last began to wait, and after loads that it waited for."""
        return self.waiting.is_new(rid) or self.waiting.shared.is_unsure(rid)

    def look_ahead(self, rid: str, prompt: Prompt, kind: Hashable = None) -> None:
        """Find out what lower tiers have for a waiting request, and begin to read it, in this and
        further calls of `go_on_looking`. `kind`: see `SharedPrefixes.waits`."""
        self.waiting.look_up(rid, prompt, kind)

    def go_on_looking(self) -> None:
        """See `LookAhead.go_on`."""
        self.waiting.ahead.go_on()

    def held(self, rids: Sequence[str], ended_batch: int) -> list[bool]:
        """See `WaitingRequests.held`. `ended_batch`: the last batch whose loads have ended."""
        self.waiting.shared.end_loads(ended_batch)
        return self.waiting.held(rids)

    def matched(self, request: Any, own_tokens: int) -> None:
        """See `FollowedRequests.matched`."""
        self.followed.matched(request, own_tokens)

    def limit(self, request: Any) -> int | None:
        """See `FollowedRequests.limit`."""
        return self.followed.limit(request)

    def lookup(self, rid: str, hashes: Sequence[str]) -> int:
        """See `PrefixMatcher.match`."""
        return self._matcher.match(rid, self._keys_of(hashes), hashes[-1]) if hashes else 0

    # Requests that SGLang computes next.

    def loads(self, rid: str, hashes: Sequence[str], batch: int, transfer_id: int) -> int:
        """A request loads these pages in the batch of this number, by a transfer. Returns how many
        of them lower tiers gave."""
        self.waiting.shared.loads(rid, hashes[0], batch)
        by_medium = self.waiting.awaited.loads(rid, self._keys_of(hashes))
        self.followed.loads(rid, len(hashes), by_medium, transfer_id)
        return by_medium.total()

    def cancelled(self, rid: str) -> None:
        """A request loads nothing. Idempotent."""
        self.followed.cancelled(rid)
        self.waiting.shared.cancelled(rid)

    def scheduled(self, requests: Sequence[Any], waiting: Sequence[Any], hashes: Hashes) -> None:
        """Note the requests that SGLang computes next. Called in each step, also if there are none;
        see `FollowedRequests.batch` for the arguments."""
        if requests:
            self.waiting.shared.scheduled([each.rid for each in requests])
        self.followed.batch(requests, waiting, hashes)

    # The cache.

    def forget_keys(self) -> None:
        """From now on, pages have other keys."""
        self.followed.forget_keys()
        self.waiting.forget_keys()

    def end_fetches(self) -> None:
        """End all fetches from lower tiers. Idempotent."""
        self.waiting.awaited.end_all()

    def close(self) -> None:
        """End the reports, the recorder and all fetches: each of them, also if another one
        fails."""
        with contextlib.ExitStack() as ends:
            ends.callback(self.figures.close)
            ends.callback(self.followed.close)
            ends.callback(self.end_fetches)

    def _fetched(self, rid: str, state: FetchState) -> None:
        """A fetch of a request has ended."""
        self.followed.fetched(rid, state)

    def _priority_of(self, rid: str) -> int:
        """See `FollowedRequests.priority_of`."""
        return self.followed.priority_of(rid)
