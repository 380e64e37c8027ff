# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: which blocks are loaded and stored, decided once for all ranks.

Runs inside vLLM's scheduler loop. Nothing here waits for anything.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flexkv import KVCache
from flexkv.adapter.cost import Span
from flexkv.adapter.fetches import Fetches
from flexkv.adapter.figures import CacheFigures
from flexkv.adapter.fills import FillCalendar, StoreTime
from flexkv.adapter.groups import Groups
from flexkv.adapter.guard import Edge
from flexkv.adapter.idle import IdleSteps
from flexkv.adapter.keys import BlockKeys
from flexkv.adapter.load_choice import LoadChooser
from flexkv.adapter.loading import Loads
from flexkv.adapter.matching import Matcher
from flexkv.adapter.metrics import Samples
from flexkv.adapter.orders import StepReport
from flexkv.adapter.request import NEVER, Match, TrackedRequest
from flexkv.adapter.request_options import OptionsReader, pin_owner
from flexkv.adapter.storing import StoreBatch, Stores
from flexkv.eviction import RequestContext
from flexkv.mover import Direction
from flexkv_vllm.block_tables import BlockTables
from flexkv_vllm.compat.core import offered_states
from flexkv_vllm.events import BlockEvents
from flexkv_vllm.orders import StepMetadata
from flexkv_vllm.pool import Pool

logger = logging.getLogger("flexkv.vllm")

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class SchedulerSide:
    """All that vLLM's scheduler calls. One per engine; single-threaded.

    Args:
        cache: the engine's cache.
        groups: the model's KV cache groups.
        store_time: when to store.
        load_ahead: see `Fetches`.
        chooser: says what is worth loading, and how.
        edge: where errors of single requests end.
        keys: of the blocks.
        events: tells which blocks can be loaded, if anybody listens.
    """

    def __init__(
        self,
        cache: KVCache,
        groups: Groups,
        *,
        store_time: StoreTime,
        load_ahead: bool,
        chooser: LoadChooser,
        edge: Edge,
        keys: BlockKeys,
        events: BlockEvents | None = None,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._store_time = store_time
        self._edge = edge
        self._events = events
        self._options = OptionsReader()
        self._figures = CacheFigures(cache, edge, lambda: self._options.ignored)
        self._keys = keys
        self._chooser = chooser
        self._running = 0
        self._fetches = Fetches(cache, load_ahead and groups.plain, chooser.fetched)
        describe = None if events is None else events.describe
        self._matcher = Matcher(
            cache, groups, keys, self._fetches, chooser=chooser, describe=describe
        )
        self._loads = Loads(cache, self._fetches, groups, self._keys, edge)
        self._stores = Stores(cache, groups, self._keys, edge=edge, describe=describe)
        self._calendar = FillCalendar()
        self._requests: dict[str, TrackedRequest] = {}
        self._tables = BlockTables(groups, self._stores, self._requests, self._scheduled)
        self._idle_steps = IdleSteps()
        self._orders = StepMetadata()

    @property
    def tracked_requests(self) -> int:
        return len(self._requests)

    @property
    def loaded_groups(self) -> tuple[int, ...]:
        """vLLM's numbers of the KV cache groups whose blocks are cached."""
        return tuple(group.index for group in self._groups.members)

    def bind_pool(self, pool: BlockPool) -> None:
        """vLLM's blocks, and what its own prefix cache has of them."""
        self._keys.hash_tokens = getattr(pool, "hash_block_size", self._keys.hash_tokens)
        engine_pool = Pool(pool)
        self._matcher.bind_pool(engine_pool)
        self._loads.bind_pool(engine_pool)

    def queued(self, request: Request) -> None:
        """vLLM has put `request` in its queue: what only lower tiers have can come meanwhile."""
        tracked = self._track(request)
        if self._cache.has_lower_tiers and tracked.may_load:
            self._poll()
            self._matcher.prefetch(tracked)

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `local_tokens` can be loaded, and whether it will be done
        asynchronously. None while a lower tier reads: vLLM asks again, and holds no blocks for the
        request until then. vLLM may ask any number of times before it acts."""
        tracked = self._track(request)
        tracked.match = None
        if self._loads.shares_half_loaded(request, local_tokens):
            return None, False
        if not tracked.may_load:
            tracked.match = Match(local_tokens)
            return 0, False
        self._poll()
        found = self._matcher.match(tracked, local_tokens)
        if found is None:
            return None, False
        tokens, match = found
        in_host = not self._fetches.is_waiting(tracked)
        blocks = -(-tokens // self._groups.members[0].block_tokens)
        if (
            tokens
            and in_host
            and self._chooser.is_layerwise(blocks, self._running, tracked.options.load_mode)
        ):
            tokens, match = self._for_this_step(request, tokens, match)
        tracked.match = match
        if tokens == 0:
            self._fetches.end(tracked)
        return tokens, tokens > 0 and not match.layerwise

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM gave `request` all `blocks`; the `tokens` that `match` promised are to be loaded.

        vLLM calls again with 0 tokens when the load has ended.
        """
        tracked = self._track(request)
        tables = blocks.get_block_ids()
        if request.num_computed_tokens:
            # Its load has ended. What it has beside the blocks known so far is filled next.
            tracked.set_blocks(self._tables.of_cached(tables))
            self._fetches.end(tracked)
            return
        match = tracked.match
        self._tables.fence(tables, 0 if match is None else match.local_tokens, self._orders)
        self._tables.begun.add(tracked.id)
        tracked.begin(self._tables.of_cached(tables), self._stores.first_fill(tracked.options))
        if match is not None:
            tracked.disk_tokens = min(match.disk_tokens, tokens)
            tracked.junction = match.junction
            hit_tokens = match.local_tokens + tokens
            self._cache.record(
                self._matcher.blocks_of(tracked, hit_tokens),
                RequestContext(request.num_prompt_tokens, hit_tokens),
            )
            asked = request.num_tokens - match.local_tokens
            self._figures.asked(asked, tokens, tracked.disk_tokens)
            for reason, left in match.left:
                self._figures.left(reason, left)
                self._chooser.left(reason)
        if tokens == 0 or match is None:
            self._fetches.end(tracked)
        if tokens:
            local_tokens, layerwise = (
                (0, False) if match is None else (match.local_tokens, match.layerwise)
            )
            self._loads.begin(tracked, local_tokens, tokens, self._orders, layerwise=layerwise)

    def hit_tokens(self, request: Request, tokens: int) -> tuple[int, int]:
        """Of the `tokens` that are loaded for `request`, those that were in host memory, and those
        that came from disk."""
        tracked = self._requests.get(request.request_id)
        disk = 0 if tracked is None else min(tracked.disk_tokens, tokens)
        return tokens - disk, disk

    def refuse(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """In place of `allocated`, which failed: vLLM is told that the load failed, if there was to
        be one, and nothing is known of the request's blocks."""
        tracked = self._track(request)
        match = tracked.match or Match(0)
        tables = blocks.get_block_ids()
        self._stores.fence_all(self._orders)
        self._tables.begun.add(tracked.id)
        tracked.set_blocks(self._tables.of_cached(tables))
        if tokens:
            group = self._groups.members[0]
            start = match.local_tokens // group.engine_block_tokens
            stop = -(-(match.local_tokens + tokens) // group.engine_block_tokens)
            self._loads.refuse(
                tracked,
                list(tables[group.index][start:stop]),
                match.local_tokens,
                self._orders,
                layerwise=match.layerwise,
            )
        tracked.lose_blocks()

    def step_ended(self, report: StepReport | None) -> None:
        """A step is over. The workers may have something to report of it."""
        self._chooser.step_ended(0 if report is None else report.number)
        if report is not None:
            self._chooser.loaded(report.load_rate)
        self._poll()

    def build_orders(self, output: SchedulerOutput) -> StepMetadata:
        """The orders of the step that `output` describes; what was collected is handed over."""
        self._idle_steps.note(bool(self._requests))
        self._poll()
        self._tables.follow(output, self._orders)
        self._loads.continue_all(self._orders)
        if self._store_time is StoreTime.STEP:
            self._store_filled(output)
        self._note_step(output)
        return self.take_orders(output)

    def lose_track(self) -> None:
        """In place of what `build_orders` has not done: nothing is known of any request's blocks
        until vLLM gives it some anew, and loads that were not ordered whole fail."""
        for tracked in self._requests.values():
            self._loads.fail_rest(tracked, self._orders)
            tracked.lose_blocks()
        self._stores.fence_all(self._orders)

    def take_orders(self, output: SchedulerOutput) -> StepMetadata:
        """What was collected for this step so far; collecting begins anew."""
        self._loads.step_is_complete()
        self._tables.begun.clear()
        orders, self._orders = self._orders, StepMetadata()
        orders.has_forward = output.total_num_scheduled_tokens > 0
        return orders

    def _note_step(self, output: SchedulerOutput) -> None:
        """For the chooser: what this step computes."""
        self._running = len(output.num_scheduled_tokens)
        spans = []
        guesses = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        # Where all requests decode there is no prompt to look for.
        if output.total_num_scheduled_tokens > self._running + guesses:
            for request_id, count in output.num_scheduled_tokens.items():
                tracked = self._requests.get(request_id)
                if tracked is not None:
                    start = tracked.request.num_computed_tokens
                    spans.append(Span(start, start + count))
        self._orders.number = self._chooser.step_begins(spans)

    def finished(self, request: Request, tables: Sequence[Sequence[int]]) -> bool:
        """`request` has ended with the blocks `tables`, by vLLM's groups. True if vLLM must hold
        them until the workers release it."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return False
        self._end(tracked)
        if tracked.ran:
            if self._store_time is StoreTime.FINISH:
                tracked.set_blocks(self._tables.of_cached(tables))
                batch: StoreBatch = {}
                self._stores.add_filled(tracked, request.num_computed_tokens, batch)
                self._stores.order(batch, self._orders)
            self._cache.touch(self._matcher.blocks_of(tracked, request.num_computed_tokens))
            self._figures.note_activity()
        return self.must_hold(tracked.id)

    def forget(self, request_id: str) -> bool:
        """In place of `finished`, which failed: nothing more is stored of the request."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            self._end(tracked)
        return self.must_hold(request_id)

    def must_hold(self, request_id: str) -> bool:
        """Whether vLLM must hold the blocks of a request that has ended, since stores read them and
        no fence keeps others from writing there."""
        fenced = self._store_time is StoreTime.STEP
        return not fenced and self._stores.hold(request_id, self._orders)

    def suspend(self) -> None:
        """Load and store nothing until a `reset` succeeds."""
        self._cache.suspend()

    def reset(self) -> None:
        """Forget every block, as when the model's weights change.

        Requests that have computed something go on with it, but nothing that they compute on top of
        it is stored.
        """
        for tracked in self._requests.values():
            tracked.next_fill = NEVER
        self._cache.clear()
        self._figures.note_activity()

    @property
    def tells_events(self) -> bool:
        """Whether anybody listens to `take_events`."""
        return self._events is not None

    def take_events(self) -> list[KVCacheEvent]:
        """What vLLM's subscribers are to be told."""
        return [] if self._events is None else self._events.take()

    @property
    def wants_step(self) -> bool:
        """Whether vLLM is to step though no request needs it: a copy ends, or is reported."""
        return self._idle_steps.wanted(self._cache.busy or self._figures.active)

    @property
    def has_samples(self) -> bool:
        """Whether `take_samples` may have something."""
        return self._figures.active

    def take_samples(self) -> Samples:
        """What was counted since the last call."""
        return self._figures.take()

    def close(self, flush_seconds: float) -> bool:
        """End the cache; see `KVCache.close`."""
        return self._cache.close(flush_seconds)

    def log_counters(self, failures: Mapping[str, int]) -> None:
        """Write to the log what the cache did, and what went wrong at the edge."""
        counts = self._cache.counters.as_dict() | dict(failures)
        text = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        logger.info("FlexKV ends: %s", text or "never used")

    def _poll(self) -> None:
        if not self._cache.busy:
            return
        self._figures.note_activity()
        for transfer in self._cache.poll():
            if transfer.direction is Direction.STORE:
                self._stores.ended(transfer)
            else:
                self._loads.ended(transfer)

    def _for_this_step(self, request: Request, tokens: int, match: Match) -> tuple[int, Match]:
        """The same hit for a load beside the forward of this step, in which vLLM wants to compute a
        token at least. The block that this one is in is loaded all the same: it holds the same."""
        last = request.num_tokens - 1 - match.local_tokens
        return min(tokens, last), dataclasses.replace(match, layerwise=True)

    def _track(self, request: Request) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is not None and tracked.request is request:
            return tracked
        if tracked is not None:
            self._end(tracked)  # an earlier one of the same id
        tracked = TrackedRequest(request, self._options.of(request))
        self._requests[tracked.id] = tracked
        if tracked.options.unpin:
            self._cache.unpin(pin_owner(request, tracked.options))
        return tracked

    def _end(self, tracked: TrackedRequest) -> None:
        """The request has ended: all that is known of it goes, but for copies under way."""
        self._loads.abandon(tracked, self._orders)
        self._requests.pop(tracked.id, None)

    def _store_filled(self, output: SchedulerOutput) -> None:
        """Order stores of the blocks that this step fills."""
        requests, batch = self._requests, StoreBatch()
        scheduled = output.num_scheduled_tokens
        for tracked in self._calendar.take_due(scheduled, requests):
            if tracked.next_fill == NEVER:
                continue
            tokens = scheduled.get(tracked.id)
            if tokens is None:
                self._calendar.watch(tracked, 1)
                continue
            computed = tracked.request.num_computed_tokens + tokens
            if computed >= tracked.next_fill:
                self._stores.add_filled(tracked, computed, batch)
            self._calendar.watch(tracked, tracked.next_fill - computed)
        if not self._groups.plain:
            for request_id, offers in offered_states(output).items():
                if request_id in requests:
                    self._stores.add_states(requests[request_id], offers, batch)
        if batch:
            self._stores.order(batch, self._orders)
            self._figures.note_activity()

    def _scheduled(self, tracked: TrackedRequest) -> None:
        """vLLM schedules a request with blocks that it may fill."""
        if self._store_time is StoreTime.STEP:
            self._calendar.watch(tracked, 1)
