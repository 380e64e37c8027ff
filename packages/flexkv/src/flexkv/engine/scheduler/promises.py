# SPDX-License-Identifier: Apache-2.0
"""What an engine waits for and no worker knows of yet, in case that an error loses it."""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.engine.orders import StepOrders
from flexkv.engine.scheduler.groups import Group
from flexkv.engine.scheduler.scheduled_step import Tables


@dataclass(slots=True)
class _Load:
    """A load that the engine was promised.

    Attributes:
        start: tokens before the load.
        waits: whether the engine computes the request only after the end of the load.
        tables: the request's blocks; None until the engine has allocated them.
    """

    start: int
    waits: bool
    tables: Tables | None = None


class Promises:
    """Loads whose order has not been given as a whole, and ended requests whose blocks the engine
    holds until a worker releases them.

    Workers report the end of each order. If the scheduler side fails before it has given one, the
    engine would wait for ever, or compute on blocks that nothing fills. Nothing here can fail,
    apart from `end_all`.

    Args:
        group: the group by whose blocks workers report failed loads.

    Attributes:
        loads: the loads, by the request's id.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.loads: dict[str, _Load] = {}
        self._held: dict[str, None] = {}

    def matched(self, request_id: str, start: int, answer: tuple[int | None, bool]) -> None:
        """The engine gets this answer to its lookup for a request that has `start` tokens."""
        if answer[0]:
            self.loads[request_id] = _Load(start, answer[1])
        else:
            self.loads.pop(request_id, None)

    def allocated(self, request_id: str, tables: Tables, tokens: int) -> None:
        """The engine has allocated blocks, and expects the load of `tokens` tokens."""
        load = self.loads.get(request_id)
        if load is not None:
            if tokens:
                load.tables = tables
            else:
                del self.loads[request_id]

    def ended(self, request_id: str, holds: bool) -> None:
        """A request has ended; `holds` says whether the engine holds its blocks for stores. The
        engine holds them for a load in any case."""
        load = self.loads.get(request_id)
        if load is not None and load.tables is None:
            del self.loads[request_id]
        if holds:
            self._held[request_id] = None

    def ordered(self, orders: StepOrders) -> None:
        """The engine passes these orders to the workers."""
        if self.loads:
            for request_id in list(self.loads):
                load, order = self.loads[request_id], orders.loads.get(request_id)
                is_complete = request_id in orders.failed_loads or (order and order.last)
                if load.tables is not None and (is_complete or not load.waits):
                    del self.loads[request_id]
        for request_id in orders.releases:
            self._held.pop(request_id, None)

    def end_all(self, orders: StepOrders) -> None:
        """Add to `orders` what ends all of this: the loads fail. Later calls add nothing."""
        loads, self.loads = self.loads, {}
        held, self._held = self._held, {}
        for request_id, load in loads.items():
            if load.tables is None:
                continue  # the engine looks it up again
            first = load.start // self._group.engine_block_tokens
            blocks = list(load.tables[self._group.index][first:])
            if load.waits:
                orders.failed_loads[request_id] = blocks
            else:
                orders.unfilled.extend(blocks)
        orders.releases.update((request_id, []) for request_id in held)
