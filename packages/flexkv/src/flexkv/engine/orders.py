# SPDX-License-Identifier: Apache-2.0
"""The scheduler side's orders to the workers, once per engine step, and the workers' reports.

The engine carries both in its own messages of a step, so they are ordered with its forward passes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

EVERYTHING = sys.maxsize
"""In place of a step's number, it stands for all work that the engine has given to its device."""


@dataclass(slots=True)
class CopyOrder:
    """One transfer, of which every rank copies its shard.

    Attributes:
        transfer_id: the `Transfer`'s id; grows.
        cell: where to report on the completion board.
        engine_blocks: the engine's block ids, in the order of the prefix.
        slots: arena slots, in the same order; each holds the same number of engine blocks.
        skip: engine blocks of the first slot that are not copied (a load that begins inside a
            FlexKV block because the engine has its beginning itself).
        last: for a load, whether no more blocks of the request follow in later steps.
        built_on: for a store, the layer-wise load that its blocks were computed on; 0 if none.
        follows: for a load, the number of the last step that may read or write its blocks, as in
            `StepOrders.step`. The copy waits for no later step.
    """

    transfer_id: int
    cell: int
    engine_blocks: list[int]
    slots: Sequence[int]
    skip: int = 0
    last: bool = True
    built_on: int = 0
    follows: int = EVERYTHING


@dataclass(slots=True)
class StepOrders:
    """Orders of one step.

    Attributes:
        loads: request id to the loads into its blocks, which the forward pass does not touch.
        layerwise: loads that the forward pass of this step waits for, layer by layer.
        unfilled: blocks that such a load should have filled, but will not.
        failed_loads: request id to blocks that the engine expects to be loaded, but will not be;
            this ends its load.
        fences: ids of stores that must end before this step's forward pass, which may overwrite
            their blocks.
        number: number for the workers' `StepReport` of this step; 0 if its end is not measured.
        proves: number of the step if its end proves blocks, see `Stores`; 0 if it proves none.
        step: number of the step, which grows by 1; 0 where loads follow everything.
    """

    loads: dict[str, CopyOrder] = field(default_factory=dict)
    layerwise: list[CopyOrder] = field(default_factory=list)
    unfilled: list[int] = field(default_factory=list)
    failed_loads: dict[str, list[int]] = field(default_factory=dict)
    stores: list[CopyOrder] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    has_forward: bool = False
    number: int = 0
    proves: int = 0
    step: int = 0

    @property
    def transfer_ids(self) -> set[int]:
        """Ids of the transfers that the workers copy by these orders."""
        orders = itertools.chain(self.loads.values(), self.layerwise, self.stores)
        return {order.transfer_id for order in orders}


@dataclass(slots=True)
class StepReport:
    """The workers' report of a step that has ended. `load_rate` is that of the fastest load that
    ended, in bytes per second by the clock of the thread or device that copied; 0 if none ended."""

    number: int
    load_rate: float
    proves: int = 0
