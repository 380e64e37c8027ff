# SPDX-License-Identifier: Apache-2.0
"""What vLLM waits for and no worker knows of yet, in case that an error loses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexkv_vllm.orders import StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Load:
    """A load that vLLM was promised.

    Attributes:
        start: tokens before the load.
        waits: whether vLLM computes the request only after the end of the load.
        blocks: the request's blocks; None until vLLM has allocated them.
    """

    start: int
    waits: bool
    blocks: KVCacheBlocks | None = None


class Promises:
    """Loads whose order has not been given as a whole, and ended requests whose blocks vLLM holds
    until a worker releases them.

    Workers report the end of each order. If the scheduler side fails before it has given one, vLLM
    would wait for ever, or compute on blocks that nothing fills. Nothing here can fail, apart from
    `orders_after_all`.

    Args:
        group: vLLM's number of the group whose blocks the workers report.
        block_tokens: tokens of a block of this group.

    Attributes:
        loads: the loads, by the request's id.
    """

    def __init__(self, group: int = 0, block_tokens: int = 1) -> None:
        self._group = group
        self._block_tokens = block_tokens
        self.loads: dict[str, _Load] = {}
        self._held: dict[str, None] = {}

    def matched(self, request: Request, start: int, answer: tuple[int | None, bool]) -> None:
        """vLLM gets this answer to its lookup for a request that has `start` tokens."""
        if answer[0]:
            self.loads[request.request_id] = _Load(start, answer[1])
        else:
            self.loads.pop(request.request_id, None)

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM has allocated `blocks`, and expects the load of `tokens` tokens."""
        load = self.loads.get(request.request_id)
        if load is not None:
            if tokens:
                load.blocks = blocks
            else:
                del self.loads[request.request_id]

    def ended(self, request_id: str, holds: bool) -> None:
        """A request has ended; `holds` says whether vLLM holds its blocks for stores. vLLM holds
        them for a load in any case."""
        load = self.loads.get(request_id)
        if load is not None and load.blocks is None:
            del self.loads[request_id]
        if holds:
            self._held[request_id] = None

    def ordered(self, orders: StepMetadata) -> None:
        """vLLM passes these orders to the workers."""
        if self.loads:
            for request_id in list(self.loads):
                load, order = self.loads[request_id], orders.loads.get(request_id)
                is_complete = request_id in orders.failed_loads or (order and order.last)
                if load.blocks is not None and (is_complete or not load.waits):
                    del self.loads[request_id]
        for request_id in orders.releases:
            self._held.pop(request_id, None)

    def orders_after_all(self) -> StepMetadata:
        """Orders that end all of this: the loads fail. Later calls return none."""
        orders = StepMetadata()
        loads, self.loads = self.loads, {}
        held, self._held = self._held, {}
        for request_id, load in loads.items():
            if load.blocks is None:
                continue  # vLLM looks it up again
            blocks = self._filled(load.blocks.get_block_ids(), load.start)
            if load.waits:
                orders.failed_loads[request_id] = blocks
            else:
                orders.unfilled.extend(blocks)
        orders.releases.update((request_id, []) for request_id in held)
        return orders

    def _filled(self, tables: Sequence[Sequence[int]], start: int) -> list[int]:
        """The blocks behind the first `start` tokens."""
        return list(tables[self._group][start // self._block_tokens :])
