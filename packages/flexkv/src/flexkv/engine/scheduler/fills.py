# SPDX-License-Identifier: Apache-2.0
"""Orders stores at their time: with the step that fills a block, or when its request finishes."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from flexkv.engine.orders import StepOrders
from flexkv.engine.scheduler.engine_cache import EngineCache
from flexkv.engine.scheduler.full_blocks import full_blocks
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.engine.scheduler.scheduled_step import States
from flexkv.engine.scheduler.storing import StoreBatch, Stores, first_of


class StoreTime(enum.Enum):
    """The time at which a request's blocks are stored."""

    STEP = "step"
    """Each block is stored in the step that fills it. The engine must report preemptions before it
    reuses blocks."""
    FINISH = "finish"
    """All blocks are stored when the request has finished, while the engine holds them. The engine
    need not report preemptions."""


class StepStores:
    """Orders the stores of one engine's requests at their time.

    Args:
        engine: the engine's cache.
        time: when to store.

    Attributes:
        stores: the stores under way.
    """

    def __init__(self, engine: EngineCache, time: StoreTime) -> None:
        self.stores = Stores(engine)
        self._plain = engine.groups.plain
        self._first = engine.groups.members[0]
        self._keys = engine.keys
        self._boundary = engine.boundary
        self._by_step = time is StoreTime.STEP
        self._calendar = full_blocks(engine.groups)

    def scheduled(self, tracked: TrackedRequest) -> None:
        """Follow a request that the engine schedules, with blocks that it may fill."""
        self.stores.began(tracked)
        if self._by_step:
            self._calendar.watch(tracked, 1)

    def distrust(self, invalid: AbstractSet[int], requests: Iterable[TrackedRequest]) -> set[int]:
        """The engine's blocks `invalid` were not loaded, as a step reports that has ended. Store
        nothing of them, nor of what was computed behind them.

        Args:
            invalid: the blocks; another connector may have been to load them.
            requests: all tracked requests.

        Returns:
            All wrong blocks of the engine.
        """
        wrong = self.stores.distrust(invalid)
        for tracked in requests:
            places = [first_of(wrong, table) for table in tracked.engine_blocks]
            if places == list(map(len, tracked.engine_blocks)):
                continue
            size = self._first.engine_block_tokens
            if self._plain and tracked.request.num_computed_tokens <= places[0] * size:
                # The engine computes them again. Blocks that have a slot are not stored twice.
                tracked.fill_again(self.stores.first_fill(tracked.options))
                if self._by_step:
                    self._calendar.watch(tracked, 1)
            else:
                tracked.store_nothing()
        return wrong

    def step(
        self,
        scheduled: Mapping[str, int],
        computed: int,
        states: States,
        requests: Mapping[str, TrackedRequest],
        orders: StepOrders,
    ) -> bool:
        """Order stores of the blocks that a step fills.

        Args:
            scheduled: tokens that the step computes, by request.
            computed: the sum of these tokens.
            states: recurrent states that are complete after the step; ignored for a model of plain
                attention.
            requests: all tracked requests, by id.
            orders: the orders of the step; changed.

        Returns:
            Whether the step fills blocks to store.
        """
        if not self._by_step:
            return False
        batch: StoreBatch = {}
        consequence = "those of this step are not cached"
        with self._boundary.guard("finding full blocks", consequence, loses=False):
            size, several = self._keys.hash_tokens, computed > len(scheduled)
            filled = self._calendar.take(scheduled, requests, size, several)
            if filled:
                self.stores.add_filled(filled, batch)
        if not self._plain:
            for request_id, offers in states.items():
                if request_id in requests:
                    self.stores.add_states(requests[request_id], offers, batch)
        if not batch:
            return False
        self.stores.order(batch, orders)
        return True

    def finished(
        self, tracked: TrackedRequest, tables: Sequence[Sequence[int]], orders: StepOrders
    ) -> None:
        """Order the stores of a finished request, if blocks are stored at this time.

        Args:
            tracked: the request.
            tables: its engine blocks by cached group, which the engine holds.
            orders: the orders of the step; changed.
        """
        if not self._by_step:
            tracked.set_blocks(tables)
            computed, size = tracked.request.num_computed_tokens, self._keys.hash_tokens
            filled = self._calendar.filled(tracked, computed, size)
            if filled is not None:
                batch: StoreBatch = {}
                self.stores.add_filled([(tracked, *filled)], batch)
                self.stores.order(batch, orders)

    def must_hold(self, request_id: str, orders: StepOrders) -> bool:
        """Whether the engine must hold the blocks of an ended request, because stores read them and
        no fence keeps other requests from writing to them."""
        return not self._by_step and self.stores.hold(request_id, orders)
