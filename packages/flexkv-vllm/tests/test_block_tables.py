# SPDX-License-Identifier: Apache-2.0
"""Stores whose blocks a step of vLLM's gives to others."""

from __future__ import annotations

import random

import pytest
from engine_world import BLOCK_TOKENS, MakeWorld, random_prompt

from flexkv.engine.scheduler.scheduled_step import ScheduledStep
from flexkv_vllm.orders import StepMetadata
from packages.inside_adapters import stores_under_way, tables_of


def step_that_gives(*blocks: list[int]) -> ScheduledStep:
    """A step in which requests that nobody tracks get blocks."""
    ids = [f"request {i}" for i in range(len(blocks))]
    return ScheduledStep({}, 0, request_ids=ids, new_blocks=[(each,) for each in blocks])


@pytest.mark.parametrize(
    ("others", "fenced"), [([], True), ([[]], True), ([[90]], False), ([[90], []], True)]
)
def test_stores_are_fenced_where_their_blocks_may_be_written_to(
    make_world: MakeWorld, others: list[list[int]], fenced: bool
) -> None:
    """The first step gives a block that the store reads; the others give none of these. An entry
    without blocks may be about any."""
    world = make_world(num_blocks=100, slots=100, budget=512)
    world.slow_down(random.Random(1), polls=(1_000_000, 1_000_000))
    world.add(random_prompt(random.Random(2), 4 * BLOCK_TOKENS + 1), max_tokens=40)
    world.step()
    ((transfer_id, running),) = stores_under_way(world.side).items()
    orders = StepMetadata()
    given = others or [[max(running.engine_blocks)]]
    tables_of(world.side).follow(step_that_gives(*given), orders)
    assert orders.fences == ([transfer_id] if fenced else [])
