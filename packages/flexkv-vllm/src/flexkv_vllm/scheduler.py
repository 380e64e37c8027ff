# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: which blocks are loaded and stored, decided once for all ranks.

Runs inside vLLM's scheduler loop. Nothing here waits for anything.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexkv import KVCache
from flexkv_vllm.edge import Edge
from flexkv_vllm.events import BlockEvents
from flexkv_vllm.fetches import Fetches
from flexkv_vllm.figures import CacheFigures
from flexkv_vllm.identity import adapter_stamp
from flexkv_vllm.loading import Loading
from flexkv_vllm.orders import CopyOrder, StepOrders
from flexkv_vllm.stats import Samples
from flexkv_vllm.tracked import NEVER, Match, TrackedRequest
from flexkv_vllm.wishes import WishBook, Wishes

logger = logging.getLogger("flexkv.vllm")

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class StoreTime(enum.Enum):
    """When blocks are copied out."""

    STEP = "step"
    """In the step that fills them. Needs to hear of preemptions before blocks are reused."""
    FINISH = "finish"
    """When the request has finished, while vLLM holds its blocks. Safe without that."""


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Tokens of one engine block, and engine blocks of one FlexKV block."""

    engine_block_tokens: int
    engine_blocks: int

    @property
    def block_tokens(self) -> int:
        return self.engine_block_tokens * self.engine_blocks


class SchedulerSide:
    """All that vLLM's scheduler calls. One per engine; single-threaded.

    Args:
        cache: the engine's cache.
        sizes: of blocks.
        store_time: when to store.
        prompt_only: leave out tokens that speculative decoding may have rejected.
        load_ahead: see `Fetches`.
        edge: where errors of single requests end.
        events: tells which blocks can be loaded, if anybody listens.
    """

    def __init__(
        self,
        cache: KVCache,
        sizes: BlockSizes,
        *,
        store_time: StoreTime,
        prompt_only: bool,
        load_ahead: bool,
        edge: Edge,
        events: BlockEvents | None = None,
    ) -> None:
        self._cache = cache
        self._sizes = sizes
        self._store_time = store_time
        self._prompt_only = prompt_only
        self._edge = edge
        self._events = events
        self._wishes = WishBook()
        self._figures = CacheFigures(cache, edge, lambda: self._wishes.ignored)
        self._fetches = Fetches(cache, load_ahead)
        self._loadings: dict[str, Loading] = {}
        self._pool: BlockPool | None = None
        self._requests: dict[str, TrackedRequest] = {}
        self._matches: dict[str, Match] = {}
        self._storing: dict[int, TrackedRequest] = {}
        self._finishing: dict[str, TrackedRequest] = {}
        self._orders = StepOrders()

    @property
    def tracked_requests(self) -> int:
        return len(self._requests)

    def bind_pool(self, pool: BlockPool) -> None:
        """The engine's own prefix cache: what it has need not be prefetched."""
        self._pool = pool

    def queued(self, request: Request) -> None:
        """vLLM has put `request` in its queue: what only lower tiers have can come meanwhile."""
        wishes = self._wishes.of(request)
        if not wishes.load or getattr(request, "skip_reading_prefix_cache", False):
            return
        self._poll()
        keys = self._keys(request, 0)
        start = self._cached_by_engine(keys)
        stop = self._last_block(start * self._sizes.block_tokens, wishes)
        self._fetches.begin_early(request.request_id, keys[start:stop])
        self._describe_awaited(request, start, keys[start:stop])

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `local_tokens` can be loaded, and that it will be done
        asynchronously. None while a lower tier reads: vLLM asks again, and holds no blocks for the
        request until then. vLLM may ask any number of times before it acts."""
        wishes = self._wishes.of(request)
        if not wishes.load or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        self._poll()
        request_id = request.request_id
        first = local_tokens // self._sizes.block_tokens
        keys = self._keys(request, first, self._last_block(local_tokens, wishes))
        hits = self._fetches.offer(request_id, keys, first)
        self._describe_awaited(request, first, keys)
        if hits is None:
            return None, False
        tokens = (first + hits) * self._sizes.block_tokens - local_tokens
        if hits == 0 or tokens <= 0:
            self._fetches.end(request_id)
            self._matches[request_id] = Match(local_tokens)
            return 0, False
        disk_tokens = self._awaited_tokens(request_id, keys[:hits], tokens)
        self._matches[request_id] = Match(local_tokens, disk_tokens)
        return tokens, True

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM gave `request` all `blocks`; the `tokens` that `match` promised are to be loaded.

        vLLM calls again with 0 tokens when the load has ended.
        """
        request_id = request.request_id
        engine_blocks = list(blocks.get_block_ids()[0])
        tracked = self._requests.get(request_id)
        if tracked is None:
            wishes = self._wishes.of(request)
            tracked = TrackedRequest(request, wishes, self._first_fill(wishes))
            self._requests[request_id] = tracked
        tracked.engine_blocks = engine_blocks
        match = self._matches.get(request_id)
        if match is not None:
            tracked.disk_tokens = min(match.disk_tokens, tokens)
        if tokens:
            self._begin_load(tracked, 0 if match is None else match.local_tokens, tokens)
        elif not tracked.loading:
            self._fetches.end(request_id)
        if match is not None:
            del self._matches[request_id]
            asked = request.num_tokens - match.local_tokens
            self._figures.asked(asked, tokens, tracked.disk_tokens)

    def hit_tokens(self, request: Request, tokens: int) -> tuple[int, int]:
        """Of the `tokens` that are loaded for `request`, those that were in host memory, and those
        that came from disk."""
        tracked = self._requests.get(request.request_id)
        disk = 0 if tracked is None else min(tracked.disk_tokens, tokens)
        return tokens - disk, disk

    def refuse_load(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """As `allocated`, but without a load: vLLM is told that it failed."""
        self._end_loading(request.request_id)
        size = self._sizes.engine_block_tokens
        match = self._matches.pop(request.request_id, None)
        local = 0 if match is None else match.local_tokens // size
        engine_blocks = list(blocks.get_block_ids()[0])
        self._orders.failed_loads[request.request_id] = engine_blocks[
            local : local + -(-tokens // size)
        ]
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            tracked.loading = True

    def step_ended(self, received: Iterable[str]) -> None:
        """A step is over; all ranks have ended the loads of the requests `received`."""
        for request_id in received:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.loading = False
        self._poll()

    def build_orders(self, output: SchedulerOutput) -> StepOrders:
        """The orders of the step that `output` describes; what was collected is handed over."""
        self._poll()
        self._follow(output)
        if self._loadings:
            self._order_parts()
        if self._store_time is StoreTime.STEP:
            requests = self._requests
            for request_id, scheduled in output.num_scheduled_tokens.items():
                tracked = requests.get(request_id)
                if tracked is None:
                    continue
                computed = tracked.request.num_computed_tokens + scheduled
                # In most steps no block fills up: this is all that they cost per request.
                if computed >= tracked.next_fill:
                    self._store_filled(tracked, computed)
        return self.take_orders(output)

    def take_orders(self, output: SchedulerOutput) -> StepOrders:
        """What was collected for this step so far; collecting begins anew."""
        orders, self._orders = self._orders, StepOrders()
        orders.has_forward = output.total_num_scheduled_tokens > 0
        return orders

    def finished(self, request: Request, engine_blocks: list[int]) -> bool:
        """`request` has ended with `engine_blocks`. True if vLLM must hold them for now."""
        request_id = request.request_id
        self._matches.pop(request_id, None)
        self._wishes.forget(request_id)
        if request_id in self._loadings:
            # What was ordered ends before vLLM gives the blocks to somebody else.
            self._orders.failed_loads[request_id] = []
        self._end_loading(request_id)
        tracked = self._requests.pop(request_id, None)
        if tracked is None or tracked.loading:
            return False  # vLLM itself holds the blocks of a load under way
        if self._store_time is StoreTime.FINISH:
            tracked.engine_blocks = list(engine_blocks)
        self._finishing[request_id] = tracked
        self._store_filled(tracked, request.num_computed_tokens)
        self._poll()
        return self.hold(request_id)

    def hold(self, request_id: str) -> bool:
        """True if stores still read the blocks of the finished request: vLLM must hold them until
        the workers release it. Cannot fail."""
        tracked = self._finishing.pop(request_id, None)
        if tracked is None or not tracked.stores:
            return False
        self._orders.releases[request_id] = sorted(tracked.stores)
        return True

    def reset(self) -> None:
        """Forget every block, as when the model's weights change.

        Requests that have computed something go on with it, but nothing that they compute on top of
        it is stored.
        """
        self._cache.clear()
        for tracked in self._requests.values():
            # Without blocks it was preempted, and will compute everything anew.
            if tracked.engine_blocks:
                tracked.next_fill = NEVER
        self._figures.note_activity()

    @property
    def tells_events(self) -> bool:
        """Whether anybody listens to `take_events`."""
        return self._events is not None

    def take_events(self) -> list[KVCacheEvent]:
        """What vLLM's subscribers are to be told."""
        return [] if self._events is None else self._events.take()

    @property
    def has_samples(self) -> bool:
        """Whether `take_samples` may have something."""
        return self._figures.active

    def take_samples(self) -> Samples:
        """What was counted since the last call."""
        return self._figures.take()

    def close(self) -> bool:
        """End the lower tiers. False if one hangs, and the arena must stay mapped."""
        return self._cache.close()

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
            tracked = self._storing.pop(transfer.id, None)
            if tracked is not None:
                tracked.stores.discard(transfer.id)

    def _keys(self, request: Request, start: int, stop: int | None = None) -> Sequence[bytes]:
        """Keys of FlexKV blocks `start` to `stop`: the hash of a block's last engine block, which
        covers the whole prefix up to there."""
        step = self._sizes.engine_blocks
        end = None if stop is None else stop * step
        keys: Sequence[bytes] = request.block_hashes[(start + 1) * step - 1 : end : step]
        if request.lora_request is not None:
            stamp = adapter_stamp(request.lora_request)
            return [key + stamp for key in keys]
        return keys

    def _cached_by_engine(self, keys: Sequence[bytes]) -> int:
        """How many FlexKV blocks from the first on the engine has itself."""
        pool = self._pool
        if pool is None:
            return 0
        return next(
            (i for i, key in enumerate(keys) if not pool.get_cached_block(key, [0])), len(keys)
        )

    def _last_block(self, local_tokens: int, wishes: Wishes) -> int | None:
        """Where the blocks of a request end that may be loaded; None if the request says nothing
        about that."""
        if wishes.max_load_tokens is None:
            return None
        return (local_tokens + wishes.max_load_tokens) // self._sizes.block_tokens

    def _first_fill(self, wishes: Wishes) -> int:
        """`next_fill` of a request of which nothing was considered yet."""
        return self._sizes.block_tokens if wishes.store or wishes.pin else NEVER

    def _describe_awaited(self, request: Request, start: int, keys: Sequence[bytes]) -> None:
        """For events: blocks that are fetched for `request` are told in full once they are there.
        `keys` are those from position `start` on."""
        if self._events is None:
            return
        awaited = self._fetches.awaited(request.request_id)
        if awaited:
            found = ((start + i, key) for i, key in enumerate(keys) if key in awaited)
            self._events.describe(request, found)

    def _awaited_tokens(self, request_id: str, keys: Sequence[bytes], tokens: int) -> int:
        """How many of the `tokens` that end with the last block of `keys` had to be fetched."""
        awaited = self._fetches.awaited(request_id)
        if not awaited:
            return 0
        size = self._sizes.block_tokens
        fetched = sum(key in awaited for key in keys) * size
        if keys[0] in awaited:
            # The engine has the beginning of the first one itself.
            fetched -= len(keys) * size - tokens
        return fetched

    def _begin_load(self, tracked: TrackedRequest, local_tokens: int, tokens: int) -> None:
        size = self._sizes
        start = local_tokens // size.engine_block_tokens
        stop = (local_tokens + tokens) // size.engine_block_tokens
        tracked.loading = True
        first = start // size.engine_blocks
        last = -(-stop // size.engine_blocks)
        request_id = tracked.request.request_id
        self._loadings[request_id] = Loading(
            self._keys(tracked.request, first, last),
            tracked.engine_blocks[start:stop],
            start - first * size.engine_blocks,
            size.engine_blocks,
        )
        self._order_part(request_id)

    def _order_parts(self) -> None:
        """Order what has come of loads that were not ordered whole."""
        for request_id in list(self._loadings):
            if request_id in self._orders.loads:
                continue  # one part in a step
            with self._edge.guard("loading the rest of a prefix", "vLLM is told that it failed"):
                self._order_part(request_id)
                continue
            self._fail_rest(request_id)

    def _order_part(self, request_id: str) -> None:
        loading = self._loadings[request_id]
        more_may_come = self._fetches.is_waiting(request_id)
        order = loading.next_part(self._cache, more_may_come)
        if order is not None:
            self._orders.loads[request_id] = order
            if order.last:
                self._end_loading(request_id)
        elif not more_may_come:
            self._fail_rest(request_id)

    def _fail_rest(self, request_id: str) -> None:
        self._orders.failed_loads[request_id] = self._loadings[request_id].rest
        self._end_loading(request_id)

    def _end_loading(self, request_id: str) -> None:
        self._loadings.pop(request_id, None)
        self._fetches.end(request_id)

    def _follow(self, output: SchedulerOutput) -> None:
        """Keep up with the blocks that vLLM gave and took in this step."""
        for request_id in output.preempted_req_ids or ():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self._orders.fences.extend(tracked.stores)
                tracked.engine_blocks = []
                tracked.next_fill = self._first_fill(tracked.wishes)
        for new in output.scheduled_new_reqs:
            self._set_blocks(new.req_id, new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_blocks is None:
                continue
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            if request_id in cached.resumed_req_ids:
                tracked.engine_blocks = list(new_blocks[0])
            else:
                tracked.engine_blocks.extend(new_blocks[0])

    def _set_blocks(self, request_id: str, engine_blocks: Iterable[int]) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.engine_blocks = list(engine_blocks)

    def _store_filled(self, tracked: TrackedRequest, computed_tokens: int) -> None:
        """Order stores of the blocks that are full once `computed_tokens` are computed."""
        request = tracked.request
        # The last prompt token belongs to what a draft model may have seen differently.
        limit = request.num_prompt_tokens - 1 if self._prompt_only else request.num_tokens
        stop = min(
            min(computed_tokens, limit) // self._sizes.block_tokens,
            len(request.block_hashes) // self._sizes.engine_blocks,
            len(tracked.engine_blocks) // self._sizes.engine_blocks,
        )
        start = tracked.next_fill // self._sizes.block_tokens - 1
        if stop <= start:
            return
        tracked.next_fill = (stop + 1) * self._sizes.block_tokens
        with self._edge.guard("storing blocks", "they are not cached"):
            self._order_store(tracked, start, stop)

    def _order_store(self, tracked: TrackedRequest, start: int, stop: int) -> None:
        keys = self._keys(tracked.request, 0, stop)
        positions = self._cache.missing(keys, start)
        if positions and tracked.wishes.store:
            self._begin_store(tracked, keys, positions)
        if tracked.wishes.pin:
            self._cache.pin(keys[start:])
            self._figures.note_activity()

    def _begin_store(
        self, tracked: TrackedRequest, keys: Sequence[bytes], positions: Sequence[int]
    ) -> None:
        self._figures.note_activity()
        transfer = self._cache.store(keys, positions)
        if transfer is None:
            return
        stored = positions[: len(transfer.blocks)]
        if self._events is not None:
            self._events.describe(tracked.request, ((i, keys[i]) for i in stored))
        step = self._sizes.engine_blocks
        engine_blocks = [
            block
            for position in stored
            for block in tracked.engine_blocks[position * step : (position + 1) * step]
        ]
        order = CopyOrder(transfer.id, transfer.cell, engine_blocks, transfer.slots)
        self._orders.stores.append(order)
        tracked.stores.add(transfer.id)
        self._storing[transfer.id] = tracked
