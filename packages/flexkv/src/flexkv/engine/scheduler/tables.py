# SPDX-License-Identifier: Apache-2.0
"""Follows the engine's blocks, step by step: which request has them, and which step used them last.

Parts are among the kernels, because an engine's step waits for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from flexkv.engine.orders import EVERYTHING, StepOrders
from flexkv.engine.scheduler.access_log import access_log
from flexkv.engine.scheduler.groups import Groups
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.engine.scheduler.scheduled_step import ScheduledStep, Tables
from flexkv.engine.scheduler.storing import Stores
from flexkv.system.native import kernels

ExtendTables: TypeAlias = Callable[
    [
        Mapping[str, TrackedRequest],
        Sequence[str],
        Sequence[Sequence[Sequence[int]] | None],
        AbstractSet[str],
        Sequence[int],
    ],
    tuple[list[int], bool],
]
"""See `flexkv_kernels/steps.pyi`. The kernels look for the name here."""


def extend_tables() -> ExtendTables:
    """The function that extends the tables of requests. Raises ConfigError if the kernels are not
    installed."""
    function: ExtendTables = kernels("steps").extend_tables
    return function


class BlockTables:
    """Keeps the blocks of tracked requests up to date, and fences stores whose blocks the engine
    gives to others. `begun` are the requests that were given blocks since the last step."""

    def __init__(
        self,
        groups: Groups,
        stores: Stores,
        requests: Mapping[str, TrackedRequest],
    ) -> None:
        self.begun: set[str] = set()
        self._groups = groups
        self._stores = stores
        self._requests = requests
        self._extend = extend_tables()
        self._members = tuple(group.index for group in groups.members)

    def of_cached(self, tables: Tables) -> list[Sequence[int]]:
        """The tables of the cached groups, from those of all the engine's groups."""
        return list(map(tables.__getitem__, self._members))

    def fence(self, tables: Tables, tokens: int, orders: StepOrders) -> None:
        """The engine gave blocks to a request whose first `tokens` tokens are in them; it will
        write to the rest."""
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

    def follow(self, step: ScheduledStep, orders: StepOrders) -> None:
        """Keep up with the blocks that the engine gave and took in this step."""
        for request_id in step.preempted:
            tracked = self._requests.get(request_id)
            # The engine may have preempted it before this step, and restarted it in this step.
            if tracked is not None and request_id not in self.begun:
                tracked.lose_blocks()
        for request_id, tables, tokens in step.placed:
            self.fence(tables, tokens, orders)
            self._has(request_id, tables)
        written, complete = self._extend(
            self._requests, step.request_ids, step.new_blocks, step.replaced, self._members
        )
        if not complete:
            # Another connector loads one, and the engine does not report which blocks it fills.
            self._stores.fence_all(orders)
        if self._stores.under_way:
            if written:
                self._stores.fence(written, orders)
            if step.overwritten:
                self._stores.discard(step.overwritten)

    def _has(self, request_id: str, tables: Tables) -> None:
        """The engine schedules a request with all these blocks."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.set_blocks(self.of_cached(tables))
            tracked.ran = True
            self._stores.scheduled(tracked)


class StepAccesses:
    """Records the blocks of all requests, for models with one group of full attention.

    Workers know blocks from the engine's description of a step alone, so a step can use no others.
    An engine that schedules ahead may schedule a step with a request before it knows that the
    request has ended. The request then counts as ended in a later step.
    """

    def __init__(self) -> None:
        self._uses = access_log()

    def order(self, step: ScheduledStep, orders: StepOrders) -> None:
        """Number a step, and set the step that each of its loads must follow."""
        uses = self._uses
        uses.begin_step([*step.ended, *step.preempted])
        uses.touched(step.touched)
        orders.step = uses.step
        # Before this step's blocks are recorded, because a layer-wise load fills some of them.
        for order in [*orders.loads.values(), *orders.layerwise]:
            order.follows = uses.last_use(order.engine_blocks)
        for request_id, (blocks,), _ in step.placed:
            uses.give(request_id, blocks)
        uses.follow(step.request_ids, step.new_blocks, step.replaced)
        uses.check(step.tokens)

    def lose(self, orders: StepOrders) -> None:
        """After an error, make the loads of this step and of all later ones follow all steps."""
        self._uses.lose()
        for order in [*orders.loads.values(), *orders.layerwise]:
            order.follows = EVERYTHING
