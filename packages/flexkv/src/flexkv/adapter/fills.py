# SPDX-License-Identifier: Apache-2.0
"""When blocks are stored: with the steps that fill them, or when their request has finished."""

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
    """When blocks are copied out."""

    STEP = "step"
    """In the step that fills them. Needs to hear of preemptions before blocks are reused."""
    FINISH = "finish"
    """When the request has finished, while the engine holds its blocks. Safe without that."""


class FillCalendar:
    """Requests by the step in which a block of theirs is full if each computes one token a step.

    In a step a request that decodes computes one token or none: it is never full earlier. Those
    that compute more are looked at in every step.
    """

    def __init__(self) -> None:
        self._step = 0
        self._due: dict[int, dict[TrackedRequest, None]] = {}

    def watch(self, tracked: TrackedRequest, tokens: int) -> None:
        """A block of the request is full with so many more tokens, one at least, than it has after
        the last step that `take_due` was called for."""
        step = self._step + max(1, tokens)
        if tracked.due_step != step:
            tracked.due_step = step
            self._due.setdefault(step, {})[tracked] = None

    def take_due(
        self, scheduled: Mapping[str, int], requests: Mapping[str, TrackedRequest]
    ) -> list[TrackedRequest]:
        """Requests to look at in the next step, to `watch` again after that.

        Args:
            scheduled: tokens that the step computes, by request.
            requests: all that are tracked.
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
        stores: those under way.
    """

    def __init__(self, engine: EngineCache, time: StoreTime) -> None:
        self.stores = Stores(engine)
        self._plain = engine.groups.plain
        self._by_step = time is StoreTime.STEP
        self._calendar = FillCalendar()

    def scheduled(self, tracked: TrackedRequest) -> None:
        """The engine schedules a request with blocks that it may fill."""
        if self._by_step:
            self._calendar.watch(tracked, 1)

    def step(
        self,
        scheduled: Mapping[str, int],
        states: States,
        requests: Mapping[str, TrackedRequest],
        orders: StepOrders,
    ) -> bool:
        """Order stores of the blocks that a step fills. Whether there are any.

        Args:
            scheduled: tokens that the step computes, by request.
            states: that are complete after it; of no use for a model of plain attention.
            requests: all that are tracked.
            orders: of the step.
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
        """A request has finished with these blocks, by cached group, which the engine holds."""
        if not self._by_step:
            tracked.set_blocks(tables)
            batch: StoreBatch = {}
            self.stores.add_filled(tracked, tracked.request.num_computed_tokens, batch)
            self.stores.order(batch, orders)

    def must_hold(self, request_id: str, orders: StepOrders) -> bool:
        """Whether the engine must hold the blocks of a request that has ended, since stores read
        them and no fence keeps others from writing there."""
        return not self._by_step and self.stores.hold(request_id, orders)
