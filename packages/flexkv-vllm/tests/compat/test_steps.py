# SPDX-License-Identifier: Apache-2.0
"""What a step of vLLM's says of the blocks that it uses."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from engine_world import MakeWorld, random_prompt
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from world_config import Drafts

from flexkv.engine.orders import EVERYTHING, CopyOrder
from flexkv.engine.scheduler.tables import StepAccesses
from flexkv_vllm.compat import steps
from flexkv_vllm.compat.steps import read_step
from flexkv_vllm.orders import StepMetadata
from packages.inside import accesses_of
from packages.inside_adapters import side_stores


def step(new: dict[str, list[int]] | None = None, **changes: Any) -> SchedulerOutput:
    """A step with requests that vLLM schedules for the first time."""
    made = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=[],
            mm_features=[],
            sampling_params=None,
            pooling_params=None,
            block_ids=(blocks,),
            num_computed_tokens=0,
            lora_request=None,
        )
        for name, blocks in (new or {}).items()
    ]
    output = dataclasses.replace(SchedulerOutput.make_empty(), scheduled_new_reqs=made)
    return dataclasses.replace(output, **changes)


def more(request_id: str, blocks: list[int], *, resumed: bool = False) -> CachedRequestData:
    return CachedRequestData(
        req_ids=[request_id],
        resumed_req_ids={request_id} if resumed else set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[(blocks,)],
        num_computed_tokens=[0],
        num_output_tokens=[0],
    )


def follows(uses: StepAccesses, output: SchedulerOutput, *blocks: int) -> int:
    """The step that a load into some blocks follows, ordered with `output`; and so does a
    layer-wise load."""
    orders = StepMetadata()
    orders.loads["load"] = CopyOrder(1, 0, list(blocks), [0])
    orders.layerwise.append(CopyOrder(2, 1, list(blocks), [1]))
    uses.order(read_step(output), orders)
    assert orders.layerwise[0].follows == orders.loads["load"].follows
    return orders.loads["load"].follows


def test_blocks_of_ended_and_preempted_requests_were_used_until_then() -> None:
    uses = StepAccesses()
    assert follows(uses, step({"a": [1, 2], "b": [3]}), 1) == 0  # filled in the same step
    assert follows(uses, step(scheduled_cached_reqs=more("b", [4])), 4) == 0
    assert follows(uses, step(), 4) == EVERYTHING
    assert follows(uses, step(finished_req_ids={"a"}), 1, 2) == 3
    assert follows(uses, step(preempted_req_ids={"b"}), 3, 4) == 4
    resumed = step(scheduled_cached_reqs=more("b", [5], resumed=True))
    assert follows(uses, resumed, 1, 3) == 4
    assert follows(uses, step(), 5) == EVERYTHING
    assert follows(uses, step(), 1, 6) == 3


def test_a_request_that_starts_again_has_its_new_blocks_only() -> None:
    uses = StepAccesses()
    follows(uses, step({"a": [1, 2]}), 9)
    again = step(scheduled_cached_reqs=more("a", [2, 3], resumed=True))
    follows(uses, again, 9)
    assert follows(uses, step(), 1) == 1
    assert follows(uses, step(), 2) == EVERYTHING


def test_zeroed_and_copied_blocks_are_in_use() -> None:
    uses = StepAccesses()
    assert follows(uses, step(new_block_ids_to_zero=[7]), 6, 7) == 1
    copies = step(kv_cache_block_copies=[KVCacheBlockCopy(src_block_id=8, dst_block_id=9)])
    assert follows(uses, copies, 8) == 2
    assert follows(uses, step(), 9) == 2
    assert follows(uses, step(), 7) == 1


def test_a_step_over_unknown_blocks_ends_all_knowledge() -> None:
    for strange in (
        step(num_scheduled_tokens={"unseen": 1}),
        step(scheduled_cached_reqs=more("unseen", [3])),
    ):
        uses = StepAccesses()
        follows(uses, strange, 1)
        assert follows(uses, step(), 1) == EVERYTHING


def test_after_an_error_loads_follow_everything() -> None:
    uses = StepAccesses()
    orders = StepMetadata()
    orders.loads["load"] = CopyOrder(1, 0, [1], [0])
    orders.layerwise.append(CopyOrder(2, 1, [2], [1]))
    uses.order(read_step(step()), orders)
    uses.lose(orders)
    assert {each.follows for each in [*orders.loads.values(), *orders.layerwise]} == {EVERYTHING}
    assert follows(uses, step(), 3) == EVERYTHING


def test_an_error_while_a_step_is_made_lets_later_loads_follow_everything(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    prompt = random_prompt(random.Random(1), 100)
    world.generate(prompt)

    def broken(*_: object) -> None:
        raise RuntimeError("broken by the test")

    assert accesses_of(world.side).last_use([60]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(side_stores(world.side), "order_filled", broken)
        world.add(prompt)
        world.step()
    assert accesses_of(world.side).last_use([60]) == EVERYTHING
    world.run()


@pytest.mark.parametrize(
    "options",
    [{"windows": (64,)}, {"drafts": Drafts.OWN_GROUP}, {"guesses": True}],
    ids=["window", "draft-model", "speculative"],
)
def test_models_whose_uses_are_not_known_follow_everything(
    make_world: MakeWorld, options: dict[str, Any]
) -> None:
    if "guesses" in options:
        options = {"guesses": random.Random(1)}
    assert accesses_of(make_world(**options).side) is None


def test_a_vllm_with_unknown_fields_follows_everything(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert accesses_of(make_world().side) is not None
    monkeypatch.setattr(steps, "_NAME_BLOCKS", set())
    assert accesses_of(make_world().side) is None
