# SPDX-License-Identifier: Apache-2.0
"""FlexKV beside another connector whose turn it is, as vLLM's MultiConnector drives it: FlexKV is
asked, told of the blocks, and told that it has nothing to load for them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from traffic import Traffic, loaded, make_stems, preempted, refused
from vllm.v1.request import RequestStatus
from world_config import IN_MULTI, IN_TREE, PLUGIN

from flexkv.types.mover import Direction

TOKENS = 8 * BLOCK_TOKENS


class OtherConnector:
    """Stands before FlexKV, and promises to load all of each prompt asynchronously."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.ended: set[str] = set()
        connector, worker = world.connector, world.ranks[0].flexkv
        match, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        get_finished = worker.get_finished

        def promise(request: Any, local_tokens: int) -> tuple[int, bool]:
            match(request, local_tokens)
            return request.num_tokens - local_tokens, True

        def take_blocks(request: Any, blocks: Any, tokens: int) -> None:
            allocated(request, blocks, 0)

        def report(finished: Any) -> tuple[set[str] | None, set[str] | None]:
            sent, received = get_finished(finished)
            ended, self.ended = self.ended, set()
            return sent, (received or set()) | ended

        monkeypatch.setattr(connector, "get_num_new_matched_tokens", promise)
        monkeypatch.setattr(connector, "update_state_after_alloc", take_blocks)
        monkeypatch.setattr(worker, "get_finished", report)


@pytest.mark.parametrize("entry", [PLUGIN, IN_TREE], ids=["plugin", "in-tree"])
@pytest.mark.parametrize(
    "status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR], ids=lambda s: s.name
)
def test_what_another_connector_has_not_loaded_yet_is_not_stored(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, status: RequestStatus, entry: str
) -> None:
    """vLLM counts the tokens of a load as computed as soon as it has begun. A request that ends
    then has nothing in its blocks."""
    world = make_world(entry=entry)
    prompt = random_prompt(random.Random(1), TOKENS)
    with monkeypatch.context() as patch:
        other = OtherConnector(world, patch)
        request_id = world.add(prompt)
        world.step()
        request = world.scheduler.requests[request_id]
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert request.num_computed_tokens == TOKENS
        world.scheduler.finish_requests([request_id], status)
        world.step()
        other.ended.add(request_id)
        world.run()
    again = world.generate(prompt)
    assert world.external_tokens[again] == 0
    world.check_outputs()


@pytest.mark.parametrize("entry", [PLUGIN, IN_TREE], ids=["plugin", "in-tree"])
def test_what_another_connector_loads_for_a_request_that_begins_anew_is_not_stored(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """It has run before vLLM took its blocks. What it stored then has failed."""
    world = make_world(entry=entry)
    rng = random.Random(2)
    prompt = random_prompt(rng, TOKENS)
    (late,) = world.slow_down(rng, polls=(0, 0))
    late.failing, late.failure_rate = frozenset({Direction.STORE}), 1.0
    request_id = world.add(prompt)
    world.step()
    assert world.outputs[request_id]
    late.failure_rate = 0.0
    assert world.restart(reset_connector=False)
    with monkeypatch.context() as patch:
        other = OtherConnector(world, patch)
        world.step()
        request = world.scheduler.requests[request_id]
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        world.abort(request_id)
        world.step()
        other.ended.add(request_id)
        world.run()
    again = world.generate(prompt)
    assert world.external_tokens[again] == 0
    world.check_outputs()


def test_inside_multi_connector_every_block_is_released(make_world: MakeWorld) -> None:
    """Where vLLM's own connector, without the plugin, is one of several."""
    rng = random.Random(3)
    world = make_world(entry=IN_MULTI, num_blocks=40, slots=40, block_tokens=48)
    world.slow_down(rng, failure_rate=0.05)
    Traffic(world, rng, make_stems(rng, 4)).run(60, until=[preempted, loaded, refused])
    assert not world.cache.busy
    world.assert_untracked()
    world.forget()  # refused while a request holds blocks
