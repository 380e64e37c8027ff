# SPDX-License-Identifier: Apache-2.0
"""SGLang's requests on the rank that decides, from SGLang's queue to their ends: their lookups,
their hits, and the effects of their parameters.

A linker sees hashes of the pages that SGLang lacks, and neither requests nor answers. SGLang's
matches and the batches of its scheduler have the rest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from flexkv.client import CacheClient, Hold
from flexkv.engine.boundary import ErrorBoundary, in_turns
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.recorder import Recorder
from flexkv.engine.scheduler.options import OptionsReader, pin_owner, tenant_of
from flexkv.engine.scheduler.reports import HitReports
from flexkv.engine.side_figures import CacheFigures
from flexkv_sglang.hashes import PageHashes, PromptPages
from flexkv_sglang.keys import PageKeys
from flexkv_sglang.request import NO_MATCH, SglangRequest, Tracked, traced_work
from flexkv_sglang.trailing import IN_HOST, TrailingPages
from flexkv_sglang.waiting import WaitingRequests

_LOOK_SECONDS = 1.0
"""Seconds between two checks for ended requests. A check costs one call per running request."""

_PARAMETER_NAMES = """
    load max_load_tokens pin pin_seconds pin_name unpin session returns retain_seconds release
    priority demote
"""
_PARAMETERS = tuple(_PARAMETER_NAMES.split())
"""Parameters of requests that FlexKV follows in SGLang's `custom_params`. SGLang stores pages of
its tree, which have no request, and loads in one way."""


@in_turns
class SglangRequests:
    """The requests of one engine. Single-threaded, but for operators; see `in_turns`.

    Args:
        recorder: of the requests; None if nothing is recorded. Owned.
        options: parameters that requests may set (setting `request_options`); None for all.

    `keeping` is how many requests that run pin or retain their blocks.
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
        self.keeping = 0
        self._cache = cache
        self._chooser = chooser
        self._page_size = page_size
        self._keys_of = page_keys.of
        self._trailing = trailing
        self._options = OptionsReader(options, _PARAMETERS, "custom_params")
        self._options.set_media(cache.info.media)
        # The worker's figures count this rank's errors, which must not count twice.
        self.figures = CacheFigures(
            cache, ErrorBoundary(), self._options.put_counts, lambda: chooser.prefill_cost
        )
        self._reports = HitReports(
            cache, chooser, self.figures, recorder, page_size, keeps_others=False
        )
        self.sessions = self._reports.sessions
        self.traced = traced_work()
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
        self._hashes: PageHashes | None = None  # none before the first step
        self._checked = time.monotonic()

    # Requests that wait.

    def look_ahead(self, request: Any, missing: PromptPages) -> None:
        """Find out what lower tiers have of the pages that SGLang lacks; see `WaitingRequests`."""
        self.waiting.look_up(self._track(request), missing)

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
        choice = self._chooser.choose_load(tracked.span(found * size), blocks, whole=bool(trailing))
        if choice.left is None:
            return found
        pages = 0 if trailing else choice.blocks
        tracked.match = replace(match, left=((choice.left, (found - pages) * size),))
        return pages

    # Requests that SGLang computes next.

    def loads(self, rid: str, hashes: Sequence[str], batch: int, transfer_id: int) -> int:
        """A request loads these pages in the batch of this number, by a transfer. Returns how many
        tokens of them lower tiers gave for it, also if an earlier load of these was cancelled."""
        self.waiting.shared.loads(rid, hashes[0], batch)
        tracked = self._by_id.get(rid)
        if tracked is None:
            return 0
        self.traced.began(transfer_id, tracked.request, len(hashes))
        came = self.waiting.fetched(tracked, self._keys_of(hashes))
        tracked.loads = len(hashes)
        tracked.fetched = {medium: count * self._page_size for medium, count in came.items()}
        return sum(tracked.fetched.values())

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
        self._hashes = hashes
        for request in requests:
            tracked = self._track(request)
            try:
                self.waiting.leave(tracked)
                # SGLang computes long prompts in chunks, and resumes retracted requests.
                if not tracked.ran or tracked.loads:
                    self._began(tracked, hashes)
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

    def close(self) -> None:
        """End the requests, the reports, the recorder and all fetches: each of them, also if
        another one fails."""
        with contextlib.ExitStack() as ends:
            ends.callback(self.figures.close)
            ends.callback(self._reports.close)
            for tracked in [*self._by_id.values()]:
                ends.callback(self._end, tracked)
            ends.callback(self.waiting.end_fetches)

    def _track(self, request: Any) -> Tracked:
        """The state of SGLang's request. It begins with the first call."""
        tracked = self._by_id.get(request.rid)
        if tracked is not None and tracked.sglang is request:
            return tracked
        if tracked is not None:
            self._end(tracked)  # an earlier one of the same id
        seen = SglangRequest(request)
        tracked = self._by_id[request.rid] = Tracked(seen, self._options.of(seen))
        self._reports.queued(seen, tracked.options)
        return tracked

    def _began(self, tracked: Tracked, hashes: PageHashes) -> None:
        """Report a request that SGLang computes next."""
        request, size, loads = tracked.request, self._page_size, tracked.loads
        match, last = tracked.match or NO_MATCH, tracked.last_hash
        looked_up = tracked.missing or self._keys_of(())
        own_tokens = max(0, request.num_computed_tokens - loads * size)
        own_hashes = hashes.of_hit(tracked.sglang) if own_tokens else ()
        if len(own_hashes) != own_tokens // size:
            own_hashes = ()  # those of a streaming session are unknown
        own = self._keys_of(own_hashes)
        prompt = own + looked_up
        if len(prompt) > max(0, request.num_prompt_tokens - 1) // size:
            # The lookup is older than SGLang's own hit.
            prompt, last = own + looked_up[:loads], ""
        if len(own) == own_tokens // size:
            tracked.prefix = prompt if last else own
            tracked.prefix_end = last or next(reversed(own_hashes), None)
        used: Sequence[bytes] = prompt[: len(own) + loads]
        if self._trailing:
            used = [*used, *self._trailing.keys_of_hit(used)]
        if not tracked.ran:
            tracked.ran = True
            self.keeping += tracked.keeps
        self._reports.allocated(
            request,
            tracked.options,
            replace(match, local_tokens=own_tokens),
            loads * size,
            keys=(used, prompt),
            fetched=tracked.fetched if tracked.match is not None and tracked.may_load else None,
        )
        self._keep(tracked, prompt)

    def _end(self, tracked: Tracked) -> None:
        """Forget a request; report its end if it was computed."""
        del self._by_id[tracked.id]
        try:
            self.waiting.leave(tracked)
        finally:
            if tracked.ran:
                self._ended(tracked)

    def _ended(self, tracked: Tracked) -> None:
        self.keeping -= tracked.keeps
        made: list[Sequence[bytes]] = []

        def all_keys() -> Sequence[bytes]:
            if not made:
                made.append(self._keys_at_end(tracked))
            return made[0]

        try:  # SGLang may fail to hash the pages
            if tracked.keeps:
                self._keep(tracked, all_keys())
        finally:
            self._reports.ended(
                tracked.request,
                all_keys,
                lambda: self._trailing.keys_behind(all_keys()),
                tracked.options,
            )

    def _keep(self, tracked: Tracked, keys: Sequence[bytes]) -> None:
        """Pin or retain the blocks of a prefix that host memory has."""
        request, options = tracked.request, tracked.options
        if not (tracked.keeps and keys):
            return
        all_keys = [*keys, *self._trailing.keys_of_hit(keys)]
        if options.pin:
            self._cache.hold(Hold.PIN, all_keys, pin_owner(request, options), options.pin_seconds)
        if options.retain_seconds is not None:
            self._cache.hold(Hold.RETAIN, all_keys, tenant_of(request), options.retain_seconds)

    def _keys_at_end(self, tracked: Tracked) -> Sequence[bytes]:
        """The keys of all pages of a request's prompt and answer."""
        known = self._keys_of(()) if tracked.prefix is None else tracked.prefix
        if self._hashes is None:
            return known
        request = tracked.sglang
        behind = self._hashes.behind(request, len(known), tracked.prefix_end if known else None)
        return known + self._keys_of(behind)
