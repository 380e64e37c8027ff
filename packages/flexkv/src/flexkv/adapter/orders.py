# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side orders from the workers, once per engine step, and what they report.

The engine carries both with its own messages of a step, so that they are ordered with its forward
passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CopyOrder:
    """One transfer for every rank to copy its shard of.

    Attributes:
        transfer_id: the `Transfer`'s id; grows.
        cell: where to report on the completion board.
        engine_blocks: the engine's block ids, in the order of the prefix.
        slots: arena slots, in the same order; each holds the same number of engine blocks.
        skip: engine blocks of the first slot that are not copied (a load that begins inside a
            FlexKV block because the engine has its beginning itself).
        last: of a load, whether the rest of the request's blocks does not follow in later steps.
        built_on: of a store, the layer-wise load that its blocks were computed on; 0 if none.
    """

    transfer_id: int
    cell: int
    engine_blocks: list[int]
    slots: list[int]
    skip: int = 0
    last: bool = True
    built_on: int = 0


@dataclass(slots=True)
class StepOrders:
    """Orders of one step.

    Attributes:
        loads: request id to what is copied into its blocks, which the forward does not touch.
        layerwise: loads that the forward of this step needs; it waits for them layer by layer.
        unfilled: blocks that such a load should have filled, but will not.
        failed_loads: request id to blocks that the engine expects to be loaded, but will not be;
            its load ends with that.
        stores: copied once the forward of this step is done.
        fences: ids of stores that must be done before this step's forward, whose blocks it may
            overwrite.
        releases: finished request to the stores that still read its blocks; the engine holds
            the blocks until the worker names the request.
        has_forward: whether the step computes anything.
        number: what the workers' `StepReport` of this step bears; 0 if its end need not be told.
    """

    loads: dict[str, CopyOrder] = field(default_factory=dict)
    layerwise: list[CopyOrder] = field(default_factory=list)
    unfilled: list[int] = field(default_factory=list)
    failed_loads: dict[str, list[int]] = field(default_factory=dict)
    stores: list[CopyOrder] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    releases: dict[str, list[int]] = field(default_factory=dict)
    has_forward: bool = False
    number: int = 0


@dataclass(slots=True)
class StepReport:
    """What the workers tell the scheduler side of a step that has ended.

    Attributes:
        number: of the step, if its end was to be told; see `StepOrders`.
        load_rate: bytes per second of the fastest load that was seen to end, by the clock of what
            copied; 0 if none was.
    """

    number: int
    load_rate: float
