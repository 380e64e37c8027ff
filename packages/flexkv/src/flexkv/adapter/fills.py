# SPDX-License-Identifier: Apache-2.0
"""Orders stores at their time: with the step that fills a block, or when its request finishes."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

from flexkv.adapter.engine_cache import EngineCache
from flexkv.adapter.orders import StepOrders
from flexkv.adapter.request import NEVER, TrackedRequest
from flexkv.adapter.storing import StoreBatch, Stores

States = Mapping[str, Iterable[tuple[int, int, int]]]
"""Recurrent states that are complete after a step: by request, group, block and tokens."""


class StoreTime(enum.Enum):
    """The time at which a request's blocks are stored."""

    STEP = "step"
    """Each block is stored in the step that fills it. The engine must report preemptions before it
    reuses blocks."""
    FINISH = "finish"
    """All blocks are stored when the request has finished, while the engine holds them. The engine
    need not report preemptions."""


class FillCalendar:
    """Requests by the step in which their next block is full if they compute one token per step.

    A decoding request computes one token or none in a step, so its block is never full earlier.
    Requests that compute more tokens are due in every step.
    """

    def __init__(self) -> None:
        self._step = 0
        self._due: dict[int, dict[TrackedRequest, None]] = {}

    def watch(self, tracked: TrackedRequest, tokens: int) -> None:
        """Make a request due once it has computed `tokens` more tokens, at least one, after the
        step of the last `take_due`."""
        step = self._step + max(1, tokens)
        if tracked.due_step != step:
            tracked.due_step = step
            self._due.setdefault(step, {})[tracked] = None

    def take_due(
        self, scheduled: Mapping[str, int], requests: Mapping[str, TrackedRequest]
    ) -> list[TrackedRequest]:
        """Begin the next step and take its due requests. The caller calls `watch` again for each.

        Args:
            scheduled: tokens that the step computes, by request.
            requests: all tracked requests, by id.
        """
        self._step += 1
        step = self._step
        due = [
            tracked
            for tracked in self._due.pop(step, ())
            if tracked.due_step == step and requests.get(tracked.id) is tracked
        ]
        if sum(scheduled.values()) > len(scheduled):
            several = [requests.get(each) for each, tokens in scheduled.items() if tokens > 1]
            due += [each for each in several if each is not None and each.due_step != step]
        return due


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
        self._by_step = time is StoreTime.STEP
        self._calendar = FillCalendar()

    def scheduled(self, tracked: TrackedRequest) -> None:
        """Follow a request that the engine schedules, with blocks that it may fill."""
        if self._by_step:
            self._calendar.watch(tracked, 1)

    def step(
        self,
        scheduled: Mapping[str, int],
        states: States,
        requests: Mapping[str, TrackedRequest],
        orders: StepOrders,
    ) -> bool:
        """Order stores of the blocks that a step fills.

        Args:
            scheduled: tokens that the step computes, by request.
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
        for tracked in self._calendar.take_due(scheduled, requests):
            if tracked.next_fill == NEVER:
                continue
            tokens = scheduled.get(tracked.id)
            if tokens is None:
                self._calendar.watch(tracked, 1)
                continue
            computed = tracked.request.num_computed_tokens + tokens
            if computed >= tracked.next_fill:
                self.stores.add_filled(tracked, computed, batch)
            self._calendar.watch(tracked, tracked.next_fill - computed)
        if not self._plain:
            for request_id, offers in states.items():
                if request_id in requests:
                    self.stores.add_states(requests[request_id], offers, batch)
        self.stores.order(batch, orders)
        return bool(batch)

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
            batch: StoreBatch = {}
            self.stores.add_filled(tracked, tracked.request.num_computed_tokens, batch)
            self.stores.order(batch, orders)

    def must_hold(self, request_id: str, orders: StepOrders) -> bool:
        """Whether the engine must hold the blocks of an ended request, because stores read them and
        no fence keeps other requests from writing to them."""
        return not self._by_step and self.stores.hold(request_id, orders)
