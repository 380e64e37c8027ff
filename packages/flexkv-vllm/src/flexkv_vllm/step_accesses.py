# SPDX-License-Identifier: Apache-2.0
"""Records the blocks that each of vLLM's steps uses, and after which step a load may fill them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv.engine.orders import EVERYTHING, StepOrders
from flexkv.engine.scheduler.access_log import access_log
from flexkv.engine.scheduler.groups import Groups
from flexkv_vllm.compat.core import blocks_beside_requests, knows_used_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


class StepAccesses:
    """Records the blocks of all requests, for models with one group of full attention.

    Workers know blocks from `SchedulerOutput` alone, so a step can use no others. With asynchronous
    scheduling, vLLM may schedule a step with a request before it knows that the request has ended.
    The request is then in `finished_req_ids` of a later step.
    """

    def __init__(self) -> None:
        self._uses = access_log()

    def order(self, output: SchedulerOutput, orders: StepOrders) -> None:
        """Number the step that `output` describes, and set the step that each of its loads must
        follow. Called once per step.

        Args:
            output: vLLM's description of the step.
            orders: the orders of the step; changed.
        """
        uses = self._uses
        uses.begin_step([*output.finished_req_ids, *(output.preempted_req_ids or ())])
        uses.touched(blocks_beside_requests(output))
        orders.step = uses.step
        # Before this step's blocks are recorded, because a layer-wise load fills some of them.
        for order in [*orders.loads.values(), *orders.layerwise]:
            order.follows = uses.last_use(order.engine_blocks)
        for new in output.scheduled_new_reqs:
            (blocks,) = new.block_ids
            uses.give(new.req_id, blocks)
        cached = output.scheduled_cached_reqs
        uses.follow(cached.req_ids, cached.new_block_ids, cached.resumed_req_ids)
        uses.check(output.num_scheduled_tokens)

    def lose(self, orders: StepOrders) -> None:
        """After an error, make the loads of this step and of all later ones follow all steps."""
        self._uses.lose()
        for order in [*orders.loads.values(), *orders.layerwise]:
            order.follows = EVERYTHING


def make_step_accesses(vllm_config: VllmConfig, groups: Groups) -> StepAccesses | None:
    """Make a `StepAccesses`; None if vLLM does not list all blocks that a step uses."""
    # A draft model computes after the step, perhaps on blocks that vLLM does not list.
    knows = groups.plain and knows_used_blocks() and not vllm_config.speculative_config
    return StepAccesses() if knows else None
