# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: which blocks are loaded and stored, decided once for all ranks.

Runs inside vLLM's scheduler loop. Nothing here waits for anything.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flexkv import KVCache, Transfer
from flexkv_vllm.edge import Edge
from flexkv_vllm.orders import CopyOrder, StepOrders

logger = logging.getLogger("flexkv.vllm")

if TYPE_CHECKING:
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


@dataclass(slots=True)
class TrackedRequest:
    """What is known of a request that vLLM gave blocks to.

    Attributes:
        request: vLLM's own object; read, never changed.
        next_fill: tokens with which the first block that was not considered for storing is full.
        engine_blocks: ids of the blocks that hold its tokens, in order.
        stores: ids of its stores under way, which read its blocks.
        loading: vLLM waits for a load, so the blocks do not hold yet what it counts as computed.
    """

    request: Request
    next_fill: int
    engine_blocks: list[int] = field(default_factory=list)
    stores: set[int] = field(default_factory=set)
    loading: bool = False


class SchedulerSide:
    """All that vLLM's scheduler calls. One per engine; single-threaded.

    Args:
        cache: the engine's cache.
        sizes: of blocks.
        store_time: when to store.
        prompt_only: leave out tokens that speculative decoding may have rejected.
        edge: where errors of single requests end.
    """

    def __init__(
        self,
        cache: KVCache,
        sizes: BlockSizes,
        store_time: StoreTime,
        prompt_only: bool,
        edge: Edge,
    ) -> None:
        self._cache = cache
        self._sizes = sizes
        self._store_time = store_time
        self._prompt_only = prompt_only
        self._edge = edge
        self._requests: dict[str, TrackedRequest] = {}
        self._local_tokens: dict[str, int] = {}
        self._storing: dict[int, TrackedRequest] = {}
        self._finishing: dict[str, TrackedRequest] = {}
        self._orders = StepOrders()

    @property
    def tracked_requests(self) -> int:
        return len(self._requests)

    def match(self, request: Request, local_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond `local_tokens` can be loaded, and that it will be done
        asynchronously. vLLM may ask any number of times before it acts."""
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        self._poll()
        first = local_tokens // self._sizes.block_tokens
        hits = self._cache.lookup(self._keys(request, first))
        tokens = (first + hits) * self._sizes.block_tokens - local_tokens
        if hits == 0 or tokens <= 0:
            return 0, False
        self._local_tokens[request.request_id] = local_tokens
        return tokens, True

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM gave `request` all `blocks`; the `tokens` that `match` promised are to be loaded.

        vLLM calls again with 0 tokens when the load has ended.
        """
        request_id = request.request_id
        engine_blocks = list(blocks.get_block_ids()[0])
        tracked = self._requests.get(request_id)
        if tracked is None:
            tracked = TrackedRequest(request, self._sizes.block_tokens)
            self._requests[request_id] = tracked
        tracked.engine_blocks = engine_blocks
        local_tokens = self._local_tokens.pop(request_id, 0)
        if tokens:
            self._order_load(tracked, local_tokens, tokens)

    def refuse_load(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """As `allocated`, but without a load: vLLM is told that it failed."""
        size = self._sizes.engine_block_tokens
        local = self._local_tokens.pop(request.request_id, 0) // size
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
        self._local_tokens.pop(request_id, None)
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
        """Forget every block, as when the model's weights change."""
        self._cache.clear()

    def log_counters(self, failures: Mapping[str, int]) -> None:
        """Write to the log what the cache did, and what went wrong at the edge."""
        counts = self._cache.counters.as_dict() | dict(failures)
        text = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        logger.info("FlexKV ends: %s", text or "never used")

    def _poll(self) -> None:
        if not self._cache.pending_transfers:
            return
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
        return keys

    def _order_load(self, tracked: TrackedRequest, local_tokens: int, tokens: int) -> None:
        size = self._sizes
        start = local_tokens // size.engine_block_tokens
        stop = (local_tokens + tokens) // size.engine_block_tokens
        engine_blocks = tracked.engine_blocks[start:stop]
        tracked.loading = True
        first = start // size.engine_blocks
        last = -(-stop // size.engine_blocks)
        transfer = self._cache.load(self._keys(tracked.request, first, last))
        request_id = tracked.request.request_id
        if transfer is None:
            self._orders.failed_loads[request_id] = engine_blocks
            return
        skip = start - first * size.engine_blocks
        self._orders.loads[request_id] = _copy_order(transfer, engine_blocks, skip)

    def _follow(self, output: SchedulerOutput) -> None:
        """Keep up with the blocks that vLLM gave and took in this step."""
        for request_id in output.preempted_req_ids or ():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self._orders.fences.extend(tracked.stores)
                tracked.engine_blocks = []
                tracked.next_fill = self._sizes.block_tokens
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
        if not positions:
            return
        transfer = self._cache.store(keys, positions)
        if transfer is None:
            return
        step = self._sizes.engine_blocks
        engine_blocks = [
            block
            for position in positions[: len(transfer.blocks)]
            for block in tracked.engine_blocks[position * step : (position + 1) * step]
        ]
        self._orders.stores.append(_copy_order(transfer, engine_blocks))
        tracked.stores.add(transfer.id)
        self._storing[transfer.id] = tracked


def _copy_order(transfer: Transfer, engine_blocks: list[int], skip: int = 0) -> CopyOrder:
    return CopyOrder(transfer.id, transfer.cell, engine_blocks, transfer.slots, skip)
