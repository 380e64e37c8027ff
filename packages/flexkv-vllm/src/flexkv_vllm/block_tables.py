# SPDX-License-Identifier: Apache-2.0
"""The blocks that vLLM gives to requests and takes from them, and the states in them, followed step
by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from flexkv.engine.orders import StepOrders
from flexkv.engine.scheduler.fills import States
from flexkv.engine.scheduler.groups import Groups
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.engine.scheduler.storing import Stores
from flexkv.engine.scheduler.tables import extend_tables
from flexkv_vllm.compat.core import offered_states, overwritten_blocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class BlockTables:
    """Keeps the blocks of tracked requests up to date, and fences stores whose blocks vLLM gives to
    others.

    Args:
        groups: the groups of the model.
        stores: the stores of the engine's requests.
        requests: the tracked requests, by id.
        scheduled: called with a request that vLLM schedules with all its blocks.

    Attributes:
        begun: requests that were given blocks since the last step.
    """

    def __init__(
        self,
        groups: Groups,
        stores: Stores,
        requests: Mapping[str, TrackedRequest],
        scheduled: Callable[[TrackedRequest], None],
    ) -> None:
        self.begun: set[str] = set()
        self._groups = groups
        self._stores = stores
        self._requests = requests
        self._scheduled = scheduled
        self._extend = extend_tables()
        self._members = tuple(group.index for group in groups.members)

    def of_cached(self, tables: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The block tables of the cached groups, from those of all vLLM's groups."""
        return [tables[group.index] for group in self._groups.members]

    def fence(self, tables: Sequence[Sequence[int]], tokens: int, orders: StepOrders) -> None:
        """vLLM gave blocks, by its groups, to a request whose first `tokens` tokens are in them; it
        will write to the rest."""
        if not self._stores.under_way:
            return
        if not any(tables):
            self._stores.fence_all(orders)  # as in `follow`
            return
        sizes = {group.index: group.engine_block_tokens for group in self._groups.members}
        # Where there are none of our blocks, all count as new.
        firsts = (tokens // sizes.get(index, tokens + 1) for index in range(len(tables)))
        written = (table[first:] for table, first in zip(tables, firsts, strict=True))
        self._stores.fence(itertools.chain.from_iterable(written), orders)

    def follow(self, output: SchedulerOutput, orders: StepOrders) -> None:
        """Keep up with the blocks that vLLM gave and took in this step."""
        for request_id in output.preempted_req_ids or ():
            tracked = self._requests.get(request_id)
            # vLLM may have preempted it before this step, and restarted it in this step.
            if tracked is not None and request_id not in self.begun:
                tracked.lose_blocks()
        for new in output.scheduled_new_reqs:
            self.fence(new.block_ids, new.num_computed_tokens, orders)
            self._has(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        ids, given, resumed = cached.req_ids, cached.new_block_ids, cached.resumed_req_ids
        if resumed:
            computed = cached.num_computed_tokens
            for request_id, blocks, tokens in zip(ids, given, computed, strict=True):
                if request_id in resumed and blocks:
                    self.fence(blocks, tokens, orders)
                    self._has(request_id, blocks)
        written, complete = self._extend(self._requests, ids, given, resumed, self._members)
        if not complete:
            # Another connector loads one, and vLLM does not report which blocks it fills.
            self._stores.fence_all(orders)
        if written and self._stores.under_way:
            self._stores.fence(written, orders)
        if self._stores.under_way and (overwritten := overwritten_blocks(output)):
            self._stores.discard(overwritten)

    @staticmethod
    def states_after(output: SchedulerOutput) -> States:
        """The recurrent states that are complete after a step."""
        return offered_states(output)

    def _has(self, request_id: str, tables: Sequence[Sequence[int]]) -> None:
        """vLLM schedules a request with all these blocks."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.set_blocks(self.of_cached(tables))
            tracked.ran = True
            self._scheduled(tracked)
