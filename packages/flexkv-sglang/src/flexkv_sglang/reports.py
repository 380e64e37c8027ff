# SPDX-License-Identifier: Apache-2.0
"""Reports SGLang's requests where they begin and end: their hits and their parameters' effects."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, cast

from flexkv.client import CacheClient, Hold
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.recorder import Recorder
from flexkv.engine.scheduler.options import OptionsReader, pin_owner, tenant_of
from flexkv.engine.scheduler.reports import HitReports
from flexkv.engine.side_figures import CacheFigures
from flexkv.types.packed_keys import PackedKeys
from flexkv_sglang.keys import PageKeys
from flexkv_sglang.request import NO_MATCH, SglangRequest, Tracked
from flexkv_sglang.trailing import TrailingPages
from flexkv_sglang.tree import PageHashes

_PARAMETERS = (
    "load",
    "max_load_tokens",
    "pin",
    "pin_seconds",
    "pin_name",
    "unpin",
    "session",
    "returns",
    "retain_seconds",
    "release",
    "priority",
    "demote",
)
"""Parameters of requests that FlexKV follows in SGLang's `custom_params`. SGLang stores pages of
its tree, which have no request, and loads in one way."""


class RequestReports:
    """The reports of one engine, on the rank that decides.

    Args:
        recorder: of the requests; None if nothing is recorded. Owned.
        options: parameters that requests may set (setting `request_options`); None for all.

    Attributes:
        figures: of the cache.
        sessions: the conversations of the requests.
        keeping: how many requests that run pin or retain their blocks.
        hashes: of pages; None before the first step. Borrowed.
    """

    def __init__(
        self,
        cache: CacheClient,
        chooser: LoadChooser,
        page_keys: PageKeys,
        *,
        page_size: int,
        trailing: TrailingPages,
        recorder: Recorder | None,
        options: Collection[str] | None,
    ) -> None:
        self.keeping = 0
        self.hashes: PageHashes | None = None
        self._cache = cache
        self._keys_of = page_keys.of
        self._page_size = page_size
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

    def track(self, request: Any) -> Tracked:
        """The state of a request of SGLang's that is new here."""
        seen = SglangRequest(request)
        return Tracked(seen, self._options.of(seen))

    def queued(self, tracked: Tracked) -> None:
        """A request is tracked from now on."""
        self._reports.queued(tracked.request, tracked.options)

    def began(self, tracked: Tracked, hashes: PageHashes) -> None:
        """SGLang computes a request next."""
        request, size, loads = tracked.request, self._page_size, tracked.loads
        match, last = tracked.match or NO_MATCH, tracked.last_hash
        looked_up = cast("PackedKeys", match.keys or self._keys_of(()))
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

    def ended(self, tracked: Tracked) -> None:
        """A request has ended that was computed."""
        request = tracked.request
        self.keeping -= tracked.keeps
        made: list[PackedKeys] = []

        def all_keys() -> PackedKeys:
            if not made:
                made.append(self._keys_at_end(tracked))
            return made[0]

        try:  # SGLang may fail to hash the pages
            if tracked.keeps:
                self._keep(tracked, all_keys())
        finally:
            self._reports.ended(
                request, all_keys, lambda: self._trailing.keys_behind(all_keys()), tracked.options
            )

    def close(self) -> None:
        """Close the recorder."""
        self._reports.close()

    def _keep(self, tracked: Tracked, keys: PackedKeys) -> None:
        """Pin or retain the blocks of a prefix that host memory has."""
        request, options = tracked.request, tracked.options
        if not (tracked.keeps and keys):
            return
        all_keys = [*keys, *self._trailing.keys_of_hit(keys)]
        if options.pin:
            self._cache.hold(Hold.PIN, all_keys, pin_owner(request, options), options.pin_seconds)
        if options.retain_seconds is not None:
            self._cache.hold(Hold.RETAIN, all_keys, tenant_of(request), options.retain_seconds)

    def _keys_at_end(self, tracked: Tracked) -> PackedKeys:
        """The keys of all pages of a request's prompt and answer."""
        known = self._keys_of(()) if tracked.prefix is None else tracked.prefix
        if self.hashes is None:
            return known
        request = tracked.sglang
        behind = self.hashes.behind(request, len(known), tracked.prefix_end if known else None)
        return known + self._keys_of(behind)
