# SPDX-License-Identifier: Apache-2.0
"""A request's prefix from the moment that the request is queued until its load has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from flexkv.adapter.cost import Span
from flexkv.adapter.engine import EnginePool
from flexkv.adapter.engine_cache import EngineCache
from flexkv.adapter.fetches import Fetches
from flexkv.adapter.figures import CacheFigures
from flexkv.adapter.load_choice import LoadChooser
from flexkv.adapter.loading import Loads
from flexkv.adapter.matching import Matcher
from flexkv.adapter.orders import StepOrders, StepReport
from flexkv.adapter.request import Match, TrackedRequest
from flexkv.adapter.request_options import context_of
from flexkv.transfer.copies import Transfer


class PrefixLoads:
    """Finds what can be loaded, has it fetched, and orders loads.

    Args:
        engine: the engine's cache.
        chooser: says what is worth loading, and how.
        figures: count what requests asked for and got.
        load_ahead: see `Fetches`.
    """

    def __init__(
        self, engine: EngineCache, chooser: LoadChooser, figures: CacheFigures, load_ahead: bool
    ) -> None:
        self._cache = engine.cache
        self._groups = engine.groups
        self._keys = engine.keys
        self._chooser = chooser
        self._figures = figures
        self._fetches = Fetches(self._cache, load_ahead and self._groups.plain, chooser.fetched)
        self._matcher = Matcher(engine, self._fetches, chooser)
        self._loads = Loads(engine, self._fetches)
        self._recorder = engine.recorder
        self._running = 0

    def bind_pool(self, pool: EnginePool) -> None:
        """The engine's own prefix cache."""
        self._matcher.bind_pool(pool)
        self._loads.bind_pool(pool)

    def prefetch(self, tracked: TrackedRequest) -> None:
        """The request is in the queue: what only lower tiers have can come meanwhile."""
        self._matcher.prefetch(tracked)

    def match(
        self, tracked: TrackedRequest, local_tokens: int, others: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond `local_tokens` can be loaded, and whether that is done before the
        request is computed on. None while a lower tier reads. The engine may ask any number of
        times before it acts. `others`: other requests that the engine has."""
        request = tracked.request
        tracked.match = None
        if self._loads.shares_half_loaded(request, local_tokens):
            return None, False
        if not tracked.may_load:
            tracked.match = Match(local_tokens)
            return 0, False
        found = self._matcher.match(tracked, local_tokens, others)
        if found is None:
            return None, False
        tokens, match = found
        if tokens and self._fits_this_step(tracked, tokens):
            # The engine wants to compute a token of the step at least. The block that this one is
            # in is loaded all the same: it holds the same.
            tokens = min(tokens, request.num_tokens - 1 - match.local_tokens)
            match = dataclasses.replace(match, layerwise=True)
        tracked.match = match
        if tokens == 0:
            self._fetches.end(tracked)
        return tokens, tokens > 0 and not match.layerwise

    def begin(self, tracked: TrackedRequest, tokens: int, orders: StepOrders) -> None:
        """The engine gave the request its blocks, and acts upon `match`: `tokens` tokens are to be
        loaded."""
        request, match = tracked.request, tracked.match
        if match is not None:
            tracked.begin_load(match, tokens)
            hit_tokens = match.local_tokens + tokens
            context = context_of(request, tracked.options, hit_tokens)
            self._cache.record(
                self._matcher.blocks_of(tracked, hit_tokens),
                context,
                self._matcher.prompt_of(tracked),
            )
            if self._recorder is not None:
                own, prompt = match.local_tokens, request.num_prompt_tokens
                self._recorder.scheduled(tracked.id, prompt, own, tokens, context.session)
            asked = request.num_tokens - match.local_tokens
            self._figures.asked(asked, tokens, tracked.fetched)
            if tokens:
                self._figures.hit(self._blocks(tokens), Span(match.local_tokens, hit_tokens))
            for reason, left in match.left:
                self._figures.left(reason, left)
                self._chooser.left(reason)
        if tokens == 0 or match is None:
            self._fetches.end(tracked)
        if tokens:
            local_tokens, layerwise = (
                (0, False) if match is None else (match.local_tokens, match.layerwise)
            )
            self._loads.begin(tracked, local_tokens, tokens, orders, layerwise=layerwise)

    def refuse(
        self, tracked: TrackedRequest, table: Sequence[int], tokens: int, orders: StepOrders
    ) -> None:
        """In place of `begin`, which failed: the engine is told that the load of `tokens` tokens
        failed.

        Args:
            tracked: the request.
            table: its blocks of the first group.
            tokens: that `match` promised.
            orders: of the step.
        """
        match = tracked.match or Match(0)
        size = self._groups.members[0].engine_block_tokens
        start = match.local_tokens // size
        stop = -(-(match.local_tokens + tokens) // size)
        self._loads.refuse(
            tracked, list(table[start:stop]), match.local_tokens, orders, layerwise=match.layerwise
        )

    def loaded(self, tracked: TrackedRequest) -> None:
        """The engine has seen the request's load end."""
        self._fetches.end(tracked)

    def used(self, tracked: TrackedRequest, tokens: int) -> None:
        """The request has ended with so many tokens."""
        self._cache.touch(self._matcher.blocks_of(tracked, tokens))
        request = tracked.request
        output = request.num_tokens - request.num_prompt_tokens
        self._cache.ended(tracked.id, output)
        if self._recorder is not None:
            keys = self._matcher.keys_of(tracked, tokens)
            self._recorder.ended(tracked.id, output, len(keys), lambda: keys)

    def abandon(self, tracked: TrackedRequest, orders: StepOrders) -> None:
        """See `Loads.abandon`."""
        self._loads.abandon(tracked, orders)

    def fail_rest(self, tracked: TrackedRequest, orders: StepOrders) -> None:
        """See `Loads.fail_rest`."""
        self._loads.fail_rest(tracked, orders)

    def continue_all(self, orders: StepOrders) -> None:
        """Order what has come of loads that were not ordered whole."""
        self._loads.continue_all(orders)

    def step_is_complete(self) -> None:
        """The engine has decided what the step computes: the next one begins when it has ended."""
        self._loads.step_is_complete()

    def step_begins(
        self,
        scheduled: Mapping[str, int],
        computed: int,
        guesses: int,
        requests: Mapping[str, TrackedRequest],
    ) -> int:
        """A step is given out. Returns the number that its report bears, or 0 if none is wanted.

        Args:
            scheduled: tokens that it computes, by request.
            computed: all these tokens.
            guesses: those of them that speculative decoding guessed.
            requests: all that are tracked.
        """
        self._running = len(scheduled)
        spans = []
        # Where all requests decode there is no prompt to look for.
        if computed > self._running + guesses:
            for request_id, count in scheduled.items():
                tracked = requests.get(request_id)
                if tracked is not None:
                    start = tracked.request.num_computed_tokens
                    spans.append(Span(start, start + count))
        return self._chooser.step_begins(spans)

    def step_ended(self, report: StepReport | None) -> None:
        """A step is over. The workers may have something to report of it."""
        self._chooser.step_ended(0 if report is None else report.number)
        if report is not None:
            self._chooser.loaded(report.load_rate)

    def ended(self, transfer: Transfer) -> None:
        """A transfer has ended, of a load perhaps."""
        self._loads.ended(transfer)

    def _fits_this_step(self, tracked: TrackedRequest, tokens: int) -> bool:
        """Whether so many tokens are loaded beside the forward of this step."""
        if self._fetches.is_waiting(tracked):
            return False
        blocks = self._blocks(tokens)
        return self._chooser.is_layerwise(blocks, self._running, tracked.options.load_mode)

    def _blocks(self, tokens: int) -> int:
        """How many blocks of the first group hold so many tokens."""
        return -(-tokens // self._groups.members[0].block_tokens)
