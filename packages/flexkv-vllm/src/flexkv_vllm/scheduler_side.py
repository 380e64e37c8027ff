# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: which blocks are loaded and stored, decided once for all ranks.

Runs inside vLLM's scheduler loop. Nothing here waits for anything.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from flexkv.engine.choice.load_choice import LoadChooser
from flexkv.engine.scheduler.engine_cache import EngineCache
from flexkv.engine.scheduler.fills import StepStores, StoreTime
from flexkv.engine.scheduler.idle import IdleSteps
from flexkv.engine.scheduler.prefix_loads import PrefixLoads
from flexkv.engine.scheduler.request import NEVER, HitTokens, Requests, TrackedRequest
from flexkv.engine.scheduler.tables import BlockTables, StepAccesses
from flexkv.engine.side_figures import CacheFigures
from flexkv_vllm.compat.steps import read_step
from flexkv_vllm.events import BlockEvents
from flexkv_vllm.orders import StepMetadata, WorkerReport
from flexkv_vllm.pool import Pool

logger = logging.getLogger("flexkv.vllm")

_POLLING = "polling the cache"

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class SchedulerSide:
    """All that vLLM's scheduler calls. One per engine; single-threaded.

    Args:
        engine: the engine's cache; owned.
        chooser: decides whether and how to load hits.
        store_time: when to store.
        load_ahead: see `Fetches`.
        allowed: parameters that requests may set; None for all.
        events: reports the loadable blocks; None when nobody listens.
        lists_blocks: whether each step lists all blocks that it uses, so that loads into others
            need not follow it.

    Attributes:
        figures: figures of the cache.
        tells_events: whether anybody listens to `take_events`.
    """

    def __init__(
        self,
        engine: EngineCache,
        chooser: LoadChooser,
        store_time: StoreTime,
        *,
        load_ahead: bool,
        allowed: Collection[str] | None = None,
        events: BlockEvents | None = None,
        lists_blocks: bool = False,
    ) -> None:
        self.tells_events = events is not None
        self._engine = engine
        self._cache = engine.cache
        self._chooser = chooser
        self._groups = engine.groups
        self._keys = engine.keys
        self._events = events
        self._uses = StepAccesses() if lists_blocks and engine.groups.plain else None
        self._orders = StepMetadata()
        self._taken: tuple[SchedulerOutput, StepMetadata] | None = None
        self._ended = engine.ended
        self._ordered: set[int] = set()  # ids of the transfers under way that workers know
        self._lost_some = False
        engine.boundary.after_error = self._after_error
        self._requests = Requests(self._cache, self._abandon, allowed)
        options = self._requests.options
        self.figures = CacheFigures(
            self._cache, engine.boundary, lambda: options.ignored, lambda: chooser.prefill_cost
        )
        self._loads = PrefixLoads(engine, chooser, self.figures, load_ahead)
        self._fills = StepStores(engine, store_time)
        self._stores = self._fills.stores
        self._tables = BlockTables(
            self._groups, self._stores, self._requests.by_id, self._fills.scheduled
        )
        self._idle_steps = IdleSteps()
        self._pool: Pool | None = None
        self._has_wrong_blocks = False

    @property
    def loaded_groups(self) -> tuple[int, ...]:
        """vLLM's numbers of the KV cache groups whose blocks are cached."""
        return tuple(group.index for group in self._groups.members)

    @property
    def reported_group(self) -> tuple[int, int]:
        """The cached group by whose blocks failed loads are reported: vLLM's number of it, and the
        tokens of its blocks."""
        first = self._groups.members[0]
        return first.index, first.engine_block_tokens

    def bind_pool(self, pool: BlockPool) -> None:
        """Set vLLM's block pool with its own prefix cache."""
        self._keys.hash_tokens = getattr(pool, "hash_block_size", self._keys.hash_tokens)
        self._pool = Pool(pool)
        self._loads.bind_pool(self._pool)

    def queued(self, request: Request) -> None:
        """vLLM has queued `request`: begin to fetch blocks that only lower tiers have."""
        tracked = self._requests.track(request)
        if self._cache.has_lower_tiers and tracked.may_load:
            self._loads.prefetch(tracked)

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `local_tokens` can be loaded, and whether asynchronously.

        None while a lower tier reads: vLLM asks again, and holds no blocks for the request until
        then. vLLM may ask any number of times before it acts.
        """
        tracked = self._requests.track(request)
        self._poll()
        return self._loads.match(tracked, local_tokens, len(self._requests.by_id) - 1)

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM gave `request` all `blocks`; the `tokens` that `match` promised are to be loaded.

        vLLM calls again with 0 tokens when the load has ended.
        """
        tracked = self._requests.track(request)
        tables = blocks.get_block_ids()
        if request.num_computed_tokens:
            # Its load has ended. Its blocks beyond the known ones are filled next.
            tracked.set_blocks(self._tables.of_cached(tables))
            self._loads.loaded(tracked)
            return
        match = tracked.match
        self._tables.fence(tables, 0 if match is None else match.local_tokens, self._orders)
        self._tables.begun.add(tracked.id)
        # What is computed behind blocks of old weights belongs to neither weights.
        old = (match is None or match.local_tokens > 0) and self._finds_old_blocks()
        first_fill = NEVER if old else self._stores.first_fill(tracked.options)
        tracked.begin(self._tables.of_cached(tables), first_fill)
        self._loads.begin(tracked, tokens, self._orders)

    def hit_tokens(self, request: Request, tokens: int) -> HitTokens:
        """See `Requests.hit_tokens`."""
        return self._requests.hit_tokens(request.request_id, tokens)

    def refuse(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """After `allocated` has failed: report the promised load as failed, if there was one, and
        treat the request's blocks as unknown."""
        tracked = self._requests.track(request)
        tables = self._tables.of_cached(blocks.get_block_ids())
        self._stores.fence_all(self._orders)
        self._tables.begun.add(tracked.id)
        tracked.set_blocks(tables)
        if tokens:
            self._loads.refuse(tracked, tables[0], tokens, self._orders)
        tracked.lose_blocks()

    def distrust(self, invalid: AbstractSet[int]) -> None:
        """Discard what is stored of vLLM's blocks `invalid`, or was computed on them: a connector,
        FlexKV or another, should have filled them in a step that has ended, but has not."""
        wrong = self._fills.distrust(invalid, self._requests.by_id.values())
        # vLLM keeps them in its prefix cache until a request has computed them again. Others would
        # find them before, or for ever if that request is aborted.
        if self._pool is None:
            self._has_wrong_blocks = True
        else:
            self._pool.forget(wrong)

    def step_ended(self, report: WorkerReport | None) -> None:
        """A step has ended, after `distrust`; the workers may have reports about it."""
        if report is not None:
            self._stores.step_ended(report.proves)
            self._chooser.loaded(report.load_rate)
        self._chooser.timer.ended(0 if report is None else report.number)
        self._poll()

    def build_orders(self, output: SchedulerOutput) -> StepMetadata:
        """The orders of the step that `output` describes, with those collected so far."""
        step, requests = read_step(output), self._requests.by_id
        self._idle_steps.note(bool(requests))
        self._poll()
        self._tables.follow(step, self._orders)
        if self._loads.unfinished:
            self._loads.continue_all(self._orders)
        if self._uses is not None:
            self._uses.order(step, self._orders)
        if self._fills.step(step.tokens, step.total_tokens, step.states, requests, self._orders):
            self.figures.note_activity()
        self._loads.running_requests = len(step.tokens)
        # Where all requests decode, there is no prompt to measure.
        if step.total_tokens > len(step.tokens) + step.draft_tokens:
            self._orders.number = self._loads.step_begins(step.tokens, requests)
        return self.take_orders(output)

    def lose_track(self) -> None:
        """After `build_orders` has failed: the blocks of all requests are unknown until vLLM gives
        them new ones, and loads that were not ordered as a whole fail."""
        for tracked in self._requests.by_id.values():
            self._loads.fail_rest(tracked, self._orders)
            tracked.lose_blocks()
        self._stores.fence_all(self._orders)
        if self._uses is not None:
            self._uses.lose(self._orders)

    def take_orders(self, output: SchedulerOutput) -> StepMetadata:
        """The orders collected for this step so far; those of the next step begin with none. A
        second call for a step, after an error, returns the same."""
        if self._taken is None or self._taken[0] is not output:
            self._loads.half_loaded.clear()  # the next step begins after the end of this one
            self._tables.begun.clear()
            self._orders.proves = self._stores.step_is_complete()
            self._orders.has_forward = output.total_num_scheduled_tokens > 0
            if self._orders.stores or self._orders.loads or self._orders.layerwise:
                self._ordered |= self._orders.transfer_ids
            self._taken, self._orders = (output, self._orders), StepMetadata()
        return self._taken[1]

    def finished(self, request: Request, tables: Sequence[Sequence[int]]) -> bool:
        """`request` has ended with the blocks `tables`, by vLLM's groups. True if vLLM must hold
        them until the workers release it."""
        tracked = self._requests.by_id.get(request.request_id)
        if tracked is None:
            return False
        self._requests.end(tracked)
        if tracked.ran:
            self._fills.finished(tracked, self._tables.of_cached(tables), self._orders)
            self._loads.used(tracked, request.num_computed_tokens)
            self.figures.note_activity()
        return self.must_hold(tracked.id)

    def forget(self, request_id: str) -> bool:
        """After `finished` has failed: store no more blocks of the request."""
        tracked = self._requests.by_id.get(request_id)
        if tracked is not None:
            self._requests.end(tracked)
        return self.must_hold(request_id)

    def must_hold(self, request_id: str) -> bool:
        """Whether vLLM must hold the blocks of an ended request, because stores read them and no
        fence prevents other requests from writing to them."""
        return self._fills.must_hold(request_id, self._orders)

    def suspend(self) -> None:
        """Load and store nothing until a `reset` succeeds."""
        self._cache.suspend()

    def reset(self, cause: str = "request") -> None:
        """Discard every block, as when the model's weights change. `cause`: see `KVCache.clear`.

        Running requests continue with their blocks, but blocks that they compute on top of these
        are not stored.
        """
        for tracked in self._requests.by_id.values():
            tracked.store_nothing()
        self._cache.clear(cause)
        self.figures.note_activity()

    def pause(self) -> None:
        """See `KVCache.pause`. vLLM has preempted or ended all requests."""
        self._cache.pause()
        self.figures.note_activity()

    def weights_changed(self) -> None:
        """The engine has other weights: discard every block.

        vLLM's own prefix cache may keep blocks of the old weights. Until vLLM resets it, nothing
        is stored of the requests that vLLM finds a prefix for.
        """
        if self._pool is not None:
            self._pool.weights_changed(in_use=bool(self._requests.by_id))
        self.reset("weights")

    @property
    def has_figures(self) -> bool:
        """Whether to take the figures now."""
        return self.figures.is_due(bool(self._requests.by_id))

    def take_events(self) -> list[KVCacheEvent]:
        """The events for vLLM's subscribers."""
        return [] if self._events is None else self._events.take()

    @property
    def wants_step(self) -> bool:
        """Whether vLLM must step without requests, so that a copy ends or is reported, or so that
        all events are told."""
        if self._events is not None and self._events.pending:
            return True
        return self._idle_steps.wanted(self._cache.busy or self.figures.active)

    def close(self, flush_seconds: float, *, off: bool) -> None:
        """See `EngineCache.close`. `off`: FlexKV is turned off, so nothing keeps vLLM's steps from
        the blocks that stores under way read. They are not published."""
        if off:
            self._cache.stop()
        self._engine.close(flush_seconds)

    def log_counters(self, failures: Mapping[str, int]) -> None:
        """Log the totals of the cache and the errors at the boundary."""
        counts = self._cache.counters.as_dict() | dict(failures)
        text = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        logger.info("FlexKV ends: %s", text or "never used")

    def _poll(self) -> None:
        if not (self._ended.waiting or self._cache.busy):
            return
        with self._engine.boundary.guard(_POLLING, "copies that ended are seen later"):
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
        if self._engine.boundary.lasts(_POLLING):
            self._cache.stop()
            self._engine.boundary.gave_up(_POLLING, "FlexKV loads and stores nothing")

    def _after_error(self) -> None:
        self._cache.recover()
        self._lost_some = True

    def _finds_old_blocks(self) -> bool:
        if self._pool is None:
            return self._has_wrong_blocks
        return self._pool.may_find_old_blocks

    def _abandon(self, tracked: TrackedRequest) -> None:
        self._loads.abandon(tracked, self._orders)
