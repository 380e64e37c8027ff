# SPDX-License-Identifier: Apache-2.0
"""Follows a request's prefix from the time that the request is queued to the end of its load."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from flexkv.client import Ended, Hold
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.orders import StepOrders
from flexkv.engine.scheduler.engine import EnginePool
from flexkv.engine.scheduler.engine_cache import EngineCache
from flexkv.engine.scheduler.fetches import Fetches
from flexkv.engine.scheduler.loads import Loads
from flexkv.engine.scheduler.match import Matcher
from flexkv.engine.scheduler.options import tenant_of
from flexkv.engine.scheduler.reports import HitReports, spans_of
from flexkv.engine.scheduler.request import Match, TrackedRequest
from flexkv.engine.side_figures import CacheFigures


class PrefixLoads:
    """Finds the prefixes that can be loaded, starts fetches, and orders loads.

    Args:
        engine: the engine's cache; borrowed.
        chooser: decides which hits are loaded, and how.
        figures: counts the queries and hits of requests.
        load_ahead: see `Fetches`.

    Attributes:
        unfinished: see `Loads`.
        half_loaded: see `Loads`.
        hits: see `Loads`.
        sessions: see `HitReports`.
        running_requests: how many requests compute in the last step; the caller sets it.
    """

    def __init__(
        self, engine: EngineCache, chooser: LoadChooser, figures: CacheFigures, load_ahead: bool
    ) -> None:
        self._cache = engine.cache
        self._groups = engine.groups
        self._keys = engine.keys
        self._chooser = chooser
        ahead = load_ahead and self._groups.plain
        self._fetches = Fetches(self._cache, ahead, chooser.fetched, engine.spans)
        self._matcher = Matcher(engine, self._fetches, chooser)
        self._loads = Loads(
            engine,
            self._fetches,
            lambda tracked, keys, first, span: self._matcher.next_part(
                tracked, keys, first, span, self.running_requests
            ),
        )
        self.hits = self._loads.hits
        tokens = engine.groups.members[0].block_tokens
        self._reports = HitReports(engine.cache, chooser, figures, engine.recorder, tokens)
        self.sessions = self._reports.sessions
        self.unfinished = self._loads.unfinished
        self.half_loaded = self._loads.half_loaded
        self.running_requests = 0

    def bind_pool(self, pool: EnginePool) -> None:
        """Set the engine's own prefix cache; borrowed."""
        self._matcher.bind_pool(pool)
        self._loads.bind_pool(pool)

    def prefetch(self, tracked: TrackedRequest) -> None:
        """Start a fetch for a queued request, so that blocks of lower tiers arrive meanwhile."""
        self._matcher.prefetch(tracked)

    def match(
        self, tracked: TrackedRequest, local_tokens: int, others: int
    ) -> tuple[int | None, bool]:
        """Find the tokens of a request that can be loaded. The engine may call this any number of
        times before it acts.

        Args:
            tracked: the request.
            local_tokens: tokens in the engine's own cache.
            others: the number of other requests that the engine has.

        Returns:
            How many tokens beyond `local_tokens` can be loaded; None while a lower tier reads. And
            whether the load ends before the engine computes the request.
        """
        request = tracked.request
        tracked.match = None
        if self.half_loaded and self._loads.shares_half_loaded(request, local_tokens):
            return None, False
        if not tracked.may_load:
            tracked.match = Match(local_tokens)
            return 0, False
        found = self._matcher.match(tracked, local_tokens, others)
        if found is None:
            return None, False
        tokens, match = found
        if tokens and self.hits.needed and not self._hold(tracked, match, tokens):
            tokens, match = 0, Match(match.local_tokens)
        if tokens and self._fits_this_step(tracked, tokens):
            # The engine must compute at least one token in the step. The block of this token is
            # loaded all the same, because it holds the same bytes.
            tokens = min(tokens, request.num_tokens - 1 - match.local_tokens)
            match = dataclasses.replace(match, layerwise=True)
        tracked.match = match
        if tokens == 0:
            self._fetches.end(tracked)
        return tokens, tokens > 0 and not match.layerwise

    def begin(self, tracked: TrackedRequest, tokens: int, orders: StepOrders) -> None:
        """Begin the load of a request, once the engine has allocated its blocks.

        Args:
            tracked: the request, after `match`.
            tokens: tokens to load, as `match` returned them.
            orders: the orders of the step; changed.
        """
        match = tracked.match
        if match is not None:
            tracked.begin_load(match, tokens)
            self._reports.allocated(
                tracked.request,
                tracked.options,
                match,
                tokens,
                keys=self._matcher.used_by(tracked, match.local_tokens + tokens),
                fetched=tracked.fetched if tracked.may_load else None,
                others=lambda: self._matcher.others_of(tracked, tracked.request.num_tokens),
            )
        if tokens == 0 or match is None:
            self._fetches.end(tracked)
        if tokens:
            local_tokens, layerwise = (
                (0, False) if match is None else (match.local_tokens, match.layerwise)
            )
            self._loads.begin(tracked, local_tokens, tokens, orders, layerwise=layerwise)
        self.hits.release(tracked.id)

    def refuse(
        self, tracked: TrackedRequest, table: Sequence[int], tokens: int, orders: StepOrders
    ) -> None:
        """Report the load of a request as failed, because `begin` has raised.

        Args:
            tracked: the request.
            table: its engine blocks of the first group.
            tokens: tokens that `match` returned.
            orders: the orders of the step; changed.
        """
        match = tracked.match or Match(0)
        size = self._groups.members[0].engine_block_tokens
        start = match.local_tokens // size
        stop = -(-(match.local_tokens + tokens) // size)
        self._loads.refuse(
            tracked, list(table[start:stop]), match.local_tokens, orders, layerwise=match.layerwise
        )

    def loaded(self, tracked: TrackedRequest) -> None:
        """End the fetch of a request, because the engine has seen its load end."""
        self._fetches.end(tracked)

    def used(self, tracked: TrackedRequest, tokens: int) -> None:
        """Count the use of an ended request's prefix, which has `tokens` tokens."""
        self._cache.touch(self._matcher.blocks_of(tracked, tokens))
        matcher = self._matcher
        options = tracked.options
        if options.release or options.demote:
            keys = [*matcher.keys_of(tracked, tokens), *matcher.others_of(tracked, tokens)]
            if options.release:
                self._cache.unhold(Hold.RETAIN, tenant_of(tracked.request), keys)
            if options.demote:
                self._cache.demote(keys)
        self._reports.ended(
            tracked.request,
            lambda: matcher.keys_of(tracked, tokens),
            lambda: matcher.others_of(tracked, tokens),
        )

    def abandon(self, tracked: TrackedRequest, orders: StepOrders) -> None:
        """See `Loads.abandon`."""
        self._loads.abandon(tracked, orders)

    def fail_rest(self, tracked: TrackedRequest, orders: StepOrders) -> None:
        """See `Loads.fail_rest`."""
        self._loads.fail_rest(tracked, orders)

    def continue_all(self, orders: StepOrders) -> None:
        """Order further parts of loads, for the blocks that have arrived meanwhile."""
        self._loads.continue_all(orders)

    def step_begins(
        self, scheduled: Mapping[str, int], requests: Mapping[str, TrackedRequest]
    ) -> int:
        """Record a step that the engine sends to its workers, and that computes prompts.

        Args:
            scheduled: tokens that the step computes, by request.
            requests: all tracked requests, by id.

        Returns:
            The number of the step's report; 0 if no report is wanted.
        """
        return self._chooser.step_begins(spans_of(scheduled, requests))

    def ended(self, transfer: Ended) -> None:
        """Record the end of a transfer, which may be a load's."""
        self._loads.ended(transfer)

    @property
    def running(self) -> Iterable[int]:
        """Ids of the transfers of loads that have not ended."""
        return self._loads.running

    def _hold(self, tracked: TrackedRequest, match: Match, tokens: int) -> bool:
        """Hold the blocks of a hit. Returns False if one of them has left. What a fetch brings
        stays until its end."""
        if self._fetches.awaits_more(tracked):
            return True
        return self.hits.hold(tracked.id, self._matcher.hit_of(tracked, match, tokens))

    def _fits_this_step(self, tracked: TrackedRequest, tokens: int) -> bool:
        """Whether `tokens` tokens are loaded beside the forward pass of this step."""
        if self._fetches.awaits_more(tracked):
            return False
        blocks = -(-tokens // self._groups.members[0].block_tokens)
        return self._chooser.is_layerwise(blocks, self.running_requests, tracked.options.load_mode)
