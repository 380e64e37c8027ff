# SPDX-License-Identifier: Apache-2.0
"""`RequestSide`, the door above a cache: an engine's scheduler reports the life of its requests.

Decides once for all ranks which blocks are loaded and stored. Runs inside the scheduler's loop.
Nothing here waits for anything.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Generic, TypeVar

from flexkv.client import Reset
from flexkv.engine.orders import StepOrders, StepReport
from flexkv.engine.scheduler.engine import EnginePool, EngineRequest
from flexkv.engine.scheduler.engine_cache import EngineCache
from flexkv.engine.scheduler.match import Matcher
from flexkv.engine.scheduler.operator_calls import OperatorCalls
from flexkv.engine.scheduler.reports import HitReports, spans_of
from flexkv.engine.scheduler.request import NEVER, HitTokens, Match, TrackedRequest, limited
from flexkv.engine.scheduler.scheduled_step import IdleSteps, ScheduledStep, Tables
from flexkv.engine.scheduler.storing import Stores
from flexkv.engine.scheduler.tables import BlockTables, StepAccesses
from flexkv.engine.side_figures import CacheFigures, log_totals

_POLLING = "polling the cache"

Orders = TypeVar("Orders", bound=StepOrders)


class RequestSide(Generic[Orders]):
    """All that an engine's scheduler calls. One per engine; single-threaded.

    The engine calls, in this order for each request: `queued`; `match`, any number of times;
    `allocated`; `step` for each step that computes it; `finished`. After a preemption it calls
    `match` again. Its workers carry out the orders that `step` returns, and `step_ended` gets their
    report.

    An error of one call ends here: it is counted, logged once, and a miss. If what follows an error
    fails as well, the call raises. The engine's adapter then calls `turn_off`, and answers.

    Args:
        engine: the engine's cache; owned.
        make_orders: makes the orders of a step, without any. The engine carries them to its
            workers.
        load_ahead: see `Fetches`.
        lists_blocks: whether each step lists all blocks that it uses, so that loads into others
            need not follow it.

    Attributes:
        cached_groups: the engine's numbers of the KV cache groups whose blocks are cached.
        is_off: whether FlexKV does nothing more in this process; see `turn_off`.
    """

    def __init__(
        self,
        engine: EngineCache,
        make_orders: Callable[[], Orders],
        *,
        load_ahead: bool,
        lists_blocks: bool = False,
    ) -> None:
        self.is_off = False
        self._engine = engine
        self._cache = engine.cache
        self._boundary = engine.boundary
        self._chooser = chooser = engine.chooser
        self._groups = engine.groups
        self._keys = engine.keys
        self._make_orders = make_orders
        self._orders = make_orders()
        self._taken: Orders | None = None
        self._ended = engine.ended
        self._ordered: set[int] = set()  # ids of the transfers under way that workers know
        self._lost_some = False
        engine.boundary.after_error = self._after_error
        self._options = options = engine.options
        options.set_media(self._cache.info.media)
        self._requests: dict[str, TrackedRequest] = {}  # those that have not ended
        self.figures = CacheFigures(
            self._cache, engine.boundary, options.put_counts, lambda: chooser.prefill_cost
        )
        self._matcher = Matcher(engine, load_ahead)
        self._loads = self._matcher.loads
        size = self._groups.members[0].block_tokens
        self._reports = HitReports(self._cache, chooser, self.figures, engine.recorder, size)
        self._stores = Stores(engine)
        self._tables = BlockTables(self._groups, self._stores, self._requests)
        self._accesses = StepAccesses() if lists_blocks and self._groups.plain else None
        self._promises = self._loads.promises
        self._idle_steps = IdleSteps()
        self.cached_groups = tuple(group.index for group in self._groups.members)
        self._has_wrong_blocks = False
        self._is_matching = self._is_closed = False

    def show(self, root: str, engine: str) -> None:
        """Report the health of the cache, and answer operators, until `close`. The engine's calls
        hold `ErrorBoundary.turn`, in turns with what operators change."""
        fingerprint = self._engine.session.info.fingerprint
        door, access = None, self._engine.access
        if access is not None:
            calls = OperatorCalls(
                self._cache,
                self._boundary,
                access,
                may_begin=self._may_begin,
                poll=self._poll,
                sessions=self._reports.sessions,
                empty=self.empty,
            )
            door = calls.open(root, engine, fingerprint)
        self.figures.report_health(root, engine, fingerprint, door)

    def bind_pool(self, pool: EnginePool, hash_tokens: int = 0) -> None:
        """Set the engine's own prefix cache, which is borrowed. One of its block hashes has so many
        tokens; 0 if they are those of the groups."""
        self._keys.hash_tokens = hash_tokens or self._keys.hash_tokens
        self._engine.pool = pool

    # The life of a request.

    def queued(self, request: EngineRequest) -> None:
        """The engine has queued `request`: begin to fetch blocks that only lower tiers have."""
        if self.is_off:
            return
        with self._boundary.guard("prefetching", "it is fetched when it is scheduled"):
            tracked = self._track(request)
            if self._cache.info.may_fetch and tracked.may_load:
                self._matcher.prefetch(tracked)

    def match(self, request: EngineRequest, local_tokens: int) -> tuple[int | None, bool]:
        """Find the tokens of a request that can be loaded. The engine may call this any number of
        times before it acts.

        Returns:
            How many tokens beyond `local_tokens` can be loaded; None while a lower tier reads: the
            engine calls again, and gives the request no blocks until then. And whether the load
            ends before the engine computes the request.
        """
        answer: tuple[int | None, bool] = 0, False
        if self.is_off:
            return answer
        is_first, self._is_matching = not self._is_matching, True
        with self._boundary.guard("lookup", "it is a miss"):
            tracked = self._track(request)
            if is_first and (self._ended.waiting or self._cache.busy):
                self._poll()
            answer = self._matcher.match(tracked, local_tokens, len(self._requests) - 1)
        if answer[0] or self._promises.loads:
            self._promises.matched(request.request_id, local_tokens, answer)
        return answer

    def allocated(self, request: EngineRequest, tables: Tables, tokens: int) -> None:
        """The engine gave a request blocks. The tokens that `match` promised are to be loaded. When
        the load has ended, the engine calls again with 0."""
        if self.is_off:
            return
        self._promises.allocated(request.request_id, tables, tokens)
        with self._boundary.guard("ordering a load", "the engine is told that it failed"):
            self._begin(request, tables, tokens)
            return
        self._refuse(request, tables, tokens)

    def hit_tokens(self, request: EngineRequest, tokens: int) -> HitTokens:
        """Divide `tokens` tokens that are loaded for a request among the tiers that had them. Empty
        after an error."""
        if self.is_off:
            return {}
        with self._boundary.guard("telling where a hit came from", "its source is unknown"):
            tracked = self._requests.get(request.request_id)
            return {} if tracked is None else tracked.hit_tokens(tokens)
        return {}

    def announced_tokens(self, request: EngineRequest) -> int:
        """How many tokens of a prompt that has been computed another engine will find in a shared
        store, from the first on; 0 if none. Call it before `finished`."""
        tracked = self._requests.get(request.request_id)
        if self.is_off or not self._cache.info.has_store or tracked is None or not tracked.ran:
            return 0
        if not tracked.options.store:
            return 0
        tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        size = self._groups.alignment
        return tracked.options.limit_stored(tokens) // size * size

    def finished(self, request: EngineRequest) -> None:
        """`request` has ended. The engine may give its blocks away: stores that read them are
        fenced."""
        if self.is_off:
            return
        self._idle_steps.note(True)
        with self._boundary.guard("ending a request", "its blocks may leave sooner"):
            self._end(request)
        tracked = self._requests.get(request.request_id)
        if tracked is not None:  # after an error
            self._abandon(tracked)
        self._promises.ended(request.request_id)

    # Steps.

    def step(self, step: ScheduledStep) -> Orders:
        """The engine has scheduled a step. Returns the orders for its workers, with those collected
        since the last step."""
        if self.is_off:
            return self.last_orders()
        orders = self._taken = None
        with self._boundary.guard(
            "building a step's orders", "no more is stored of the requests that run"
        ):
            orders = self._build_orders(step)
        if orders is None:
            self._lose_track()
            orders = self._take_orders(step)
        if self._promises.loads:
            self._promises.ordered(orders)
        self._is_matching = False
        return orders

    def step_ended(
        self, report: StepReport | None, invalid: AbstractSet[int] = frozenset()
    ) -> None:
        """A step has ended.

        Args:
            report: the workers' report; None if they have none.
            invalid: blocks of the engine that a load of the step, FlexKV's or another, should have
                filled but has not.
        """
        if self.is_off:
            return
        if invalid:
            self._discard_wrong(invalid)
        with self._boundary.guard("ending a step", "copies that ended are seen later"):
            if report is not None:
                if report.proves:
                    self._stores.step_ended(report.proves)
                self._chooser.loaded(report.load_rate)
            self._chooser.timer.ended(0 if report is None else report.number)
            if self._ended.waiting or self._cache.busy:
                self._poll()

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step without requests, so that a copy ends or is reported."""
        if self.is_off:
            return False
        return self._idle_steps.wanted(self._cache.busy or self.figures.active)

    @property
    def has_figures(self) -> bool:
        """Whether to take the figures now."""
        if self.is_off:
            self.figures.turned_off()
        elif not self.figures.active:
            return False
        return self.figures.is_due(bool(self._requests))

    # Resets and pauses.

    def reset(self, cause: str = "request") -> bool:
        """Discard every block. `cause`: see `CacheClient.reset`. Returns whether that succeeded;
        until a reset does, nothing is loaded or stored.

        Running requests continue with their blocks, but blocks that they compute on top of these
        are not stored.
        """
        return self._reset(Reset.CLEAR, cause)

    def empty(self) -> bool:
        """Discard every block, as `reset` does, but leave shared stores theirs. The weights have
        not changed: blocks that are stored later have the keys of before."""
        return self._reset(Reset.EMPTY)

    def weights_changed(self, *, sure: bool) -> bool:
        """The engine has other weights: discard every block, as `reset` does.

        The engine's own prefix cache may keep blocks of the old weights. Until the engine resets
        it, nothing is stored of the requests that the engine finds a prefix for. If it is `sure`
        that all blocks so far are of the weights of the model's files, those below host memory stay
        for other engines, and for engines that start later.
        """
        return self._reset(Reset.RENEW if sure else Reset.CLEAR, "weights")

    def pause(self) -> bool:
        """The engine pauses and keeps its weights; it has preempted or ended all requests. See
        `Reset.PAUSE`. Returns whether that succeeded; if not, call `reset`."""
        if self.is_off:
            return True
        with self._boundary.guard("pausing", "all blocks are discarded"):
            self._cache.reset(Reset.PAUSE)
            self.figures.note_activity()
            return True
        return False

    # The end.

    def turn_off(self) -> None:
        """Do nothing more in this process, because it may be unknown what workers copy. The cache
        is not polled any more, so no wrong byte is found. Never fails."""
        self.is_off = True

    def last_orders(self) -> Orders:
        """After `turn_off`: orders that end all that the engine waits for. Later calls return
        none."""
        orders = self._make_orders()
        self._promises.end_all(orders)
        return orders

    def close(self, flush_seconds: float) -> None:
        """Log the totals, and close the cache. See `EngineCache.close`."""
        with self._boundary.turn:
            self._is_closed = True
        self.figures.close()
        if self.is_off:
            # Nothing keeps the engine's steps from the blocks that stores under way read.
            self._cache.reset(Reset.STOP)
        self._engine.close(flush_seconds)
        log_totals(self._cache, self._boundary)

    # Behind the guards, and after an error in them.

    def _begin(self, request: EngineRequest, tables: Tables, tokens: int) -> None:
        tracked = self._track(request)
        if request.num_computed_tokens:
            # Its load has ended. Its blocks beyond the known ones are filled next.
            tracked.set_blocks(self._tables.of_cached(tables))
            self._loads.fetches.end(tracked)
            return
        match = tracked.match
        self._tables.fence(tables, 0 if match is None else match.local_tokens, self._orders)
        self._tables.begun.add(tracked.id)
        # What is computed behind blocks of old weights belongs to neither weights.
        old = (match is None or match.local_tokens > 0) and self._finds_old_blocks()
        first_fill = NEVER if old else self._stores.first_fill(tracked.options)
        tracked.begin(self._tables.of_cached(tables), first_fill)
        if match is not None:
            self._report(tracked, match, tokens)
        self._loads.begin(tracked, tokens, self._orders)

    def _report(self, tracked: TrackedRequest, match: Match, tokens: int) -> None:
        """The engine gave a request blocks, and loads `tokens` tokens."""
        tracked.fetched = limited(match.fetched, tokens)
        self._reports.allocated(
            tracked.request,
            tracked.options,
            match,
            tokens,
            keys=self._matcher.used_by(tracked, match.local_tokens + tokens),
            fetched=tracked.fetched if tracked.may_load else None,
            others=lambda: self._matcher.others_of(tracked, tracked.request.num_tokens),
        )

    def _refuse(self, request: EngineRequest, tables: Tables, tokens: int) -> None:
        """After `_begin` has failed: report the promised load as failed, if there was one, and
        treat the request's blocks as unknown."""
        tracked = self._track(request)
        cached = self._tables.of_cached(tables)
        self._stores.fence_all(self._orders)
        self._tables.begun.add(tracked.id)
        tracked.set_blocks(cached)
        if tokens:
            self._loads.refuse(tracked, cached[0], tokens, self._orders)
        tracked.lose_blocks()

    def _end(self, request: EngineRequest) -> None:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        self._abandon(tracked)
        if tracked.ran:
            matcher, tokens = self._matcher, request.num_computed_tokens
            self._cache.touch(matcher.blocks_of(tracked, tokens))
            self._reports.ended(
                request,
                lambda: matcher.keys_of(tracked, tokens),
                lambda: matcher.others_of(tracked, tokens),
                tracked.options,
            )
            self.figures.note_activity()

    def _build_orders(self, step: ScheduledStep) -> Orders:
        requests = self._requests
        if not requests:
            self._idle_steps.note(False)
        # Unless `match` has polled for this step.
        if not self._is_matching and (self._ended.waiting or self._cache.busy):
            self._poll()
        self._tables.follow(step, self._orders)
        if self._loads.unfinished:
            self._loads.continue_all(self._orders)
        if self._accesses is not None:
            self._accesses.order(step, self._orders)
        if self._stores.order_filled(step, requests, self._orders):
            self.figures.note_activity()
        self._loads.running_requests = len(step.tokens)
        # Where all requests decode, there is no prompt to measure.
        if step.total_tokens > len(step.tokens) + step.draft_tokens:
            self._orders.number = self._chooser.step_begins(spans_of(step.tokens, requests))
        return self._take_orders(step)

    def _lose_track(self) -> None:
        """After `_build_orders` has failed: the blocks of all requests are unknown until the engine
        gives them new ones, and loads that were not ordered as a whole fail."""
        for tracked in self._requests.values():
            self._loads.fail_rest(tracked, self._orders)
            tracked.lose_blocks()
        self._stores.fence_all(self._orders)
        if self._accesses is not None:
            self._accesses.lose(self._orders)

    def _take_orders(self, step: ScheduledStep) -> Orders:
        """The orders collected for this step so far; those of the next step begin with none. A
        second call for a step, after an error, returns the same."""
        if self._taken is None:
            self._loads.half_loaded.clear()  # the next step begins after the end of this one
            if self._loads.held:
                self._loads.unhold_all()
            self._tables.begun.clear()
            self._orders.proves = self._stores.step_is_complete()
            self._orders.has_forward = step.total_tokens > 0
            if self._orders.stores or self._orders.loads or self._orders.layerwise:
                self._ordered |= self._orders.transfer_ids
            self._taken, self._orders = self._orders, self._make_orders()
        return self._taken

    def _discard_wrong(self, invalid: AbstractSet[int]) -> None:
        """Discard what is stored of the engine's blocks `invalid`, or was computed on them."""
        with self._boundary.guard("discarding wrong blocks", "all blocks are discarded"):
            self._distrust(invalid)
            return
        self.weights_changed(sure=False)

    def _distrust(self, invalid: AbstractSet[int]) -> None:
        wrong = self._stores.distrust(invalid, self._requests.values())
        # The engine keeps them in its prefix cache until a request has computed them again. Others
        # would find them before, or for ever if that request is aborted.
        if self._engine.pool is None:
            self._has_wrong_blocks = True
        else:
            self._engine.pool.forget(wrong)

    def _reset(self, kind: Reset, cause: str = "request") -> bool:
        if self.is_off:
            return True
        self._cache.reset(Reset.SUSPEND)
        with self._boundary.guard("reset", "nothing is loaded or stored until one succeeds"):
            self._forget_blocks(kind, cause)
            return True
        return False

    def _forget_blocks(self, kind: Reset, cause: str) -> None:
        if cause == "weights" and self._engine.pool is not None:
            self._engine.pool.weights_changed(in_use=bool(self._requests))
        for tracked in self._requests.values():
            tracked.store_nothing()
            tracked.plan = None  # of keys of before, whose blocks lower tiers may have
        if kind is Reset.EMPTY:
            self._cache.reset(Reset.EMPTY)
        elif kind is Reset.RENEW or self._keys.epoch.end:
            # No other engine finds the blocks of later epochs. The keys first: an error after this
            # leaves no block to be found by those of before.
            self._keys.epoch.renew()
            self._cache.reset(Reset.RENEW, cause)
        else:
            self._cache.reset(Reset.CLEAR, cause)
            self._keys.epoch.renew()
        self.figures.note_activity()

    def _poll(self) -> None:
        """Handle what has ended. Callers first look whether anything may have, because mostly
        nothing has."""
        with self._boundary.guard(_POLLING, "copies that ended are seen later"):
            self.figures.note_activity()
            if self._lost_some:
                running = {*self._stores.under_way, *self._loads.running, *self._ordered}
                self._ended.end_lost(self._ordered | self._orders.transfer_ids, running)
                self._lost_some = False
            for transfer in self._ended.take():
                self._stores.ended(transfer)
                self._loads.ended(transfer)
                self._ordered.discard(transfer.id)
            return
        if self._boundary.lasts(_POLLING):
            self._cache.reset(Reset.STOP)
            self._boundary.gave_up(_POLLING, "FlexKV loads and stores nothing")

    def _may_begin(self) -> bool:
        """Whether an operator's call may change the cache now. Between the lookup of a request and
        the end of that step, the engine relies on what the lookup has found."""
        return not (self._is_matching or self._is_closed or self.is_off)

    def _after_error(self) -> None:
        self._cache.reset(Reset.RECOVER)
        self._lost_some = True

    def _finds_old_blocks(self) -> bool:
        pool = self._engine.pool
        return self._has_wrong_blocks if pool is None else pool.may_find_old_blocks

    def _track(self, request: EngineRequest) -> TrackedRequest:
        """The state of `request`, which has not ended. It begins with the first call."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None and tracked.request is request:
            return tracked
        if tracked is not None:
            self._abandon(tracked)  # an earlier one of the same id
        tracked = TrackedRequest(request, self._options.of(request))
        self._requests[tracked.id] = tracked
        self._reports.queued(request, tracked.options)
        return tracked

    def _abandon(self, tracked: TrackedRequest) -> None:
        """Forget a request that has ended, except for running copies."""
        self._loads.abandon(tracked, self._orders)
        self._requests.pop(tracked.id, None)
