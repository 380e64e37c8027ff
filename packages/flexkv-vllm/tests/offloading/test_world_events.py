# SPDX-License-Identifier: Apache-2.0
"""KV events under vLLM's own `OffloadingConnector`: vLLM describes the blocks that FlexKV names."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine_world import BLOCK_TOKENS, random_prompt
from offloading_world import MakeOffloadingWorld
from patience import wait_until
from served_offloading_world import ServedOffloadingWorld
from served_world import MakeService
from subscriber import DISK, HOST, Subscriber, drain

from flexkv_vllm.compat.events import event_hash

PROMPT = random_prompt(random.Random(1), 200)
BLOCKS = 200 // BLOCK_TOKENS


def test_blocks_are_named_with_their_medium(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world(events=True, disk_slots=60)
    subscriber = Subscriber(world)
    request = world.requests[world.generate(PROMPT, max_tokens=1)]
    drain(subscriber)
    names = {(0, event_hash(each)) for each in request.block_hashes[:BLOCKS]}
    assert subscriber.told == {HOST: names, DISK: names}


@pytest.mark.parametrize("chunk", [1, 3])
def test_vllm_describes_the_blocks_if_it_is_told_to(
    make_offloading_world: MakeOffloadingWorld, chunk: int
) -> None:
    settings = {"self_describing_kv_events": True}
    world = make_offloading_world(events=True, chunk=chunk, settings=settings)
    subscriber = Subscriber(world)
    request = world.requests[world.generate(PROMPT, max_tokens=1)]
    drain(subscriber)
    told = sorted(subscriber.stored, key=lambda each: PROMPT.index(each.token_ids[0]))
    size = chunk * BLOCK_TOKENS
    assert [each.token_ids for each in told] == [
        PROMPT[at * size : (at + 1) * size] for at in range(200 // size)
    ]
    names = [event_hash(each) for each in request.block_hashes]
    assert [name for each in told for name in each.block_hashes] == names[: len(told) * chunk]


def test_after_an_error_all_blocks_are_told_again(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_offloading_world(events=True)
    subscriber = Subscriber(world)
    world.generate(PROMPT, max_tokens=1)
    drain(subscriber)

    def lose(*_: Any) -> None:
        drain_changes()
        raise RuntimeError("broken by the test")

    drain_changes = world.cache.drain_changes
    monkeypatch.setattr(world.cache, "drain_changes", lose)
    world.generate(random_prompt(random.Random(2), 50), max_tokens=1)
    drain(subscriber)
    monkeypatch.undo()
    world.generate([1], max_tokens=1)
    drain(subscriber)
    world.step()
    subscriber.listen()
    assert len(subscriber.told[HOST]) == BLOCKS + 3


def test_a_reset_of_one_engine_of_a_service_is_told(
    make_service: MakeService, tmp_path: Path
) -> None:
    """The other engines keep the blocks, which this one finds no more."""
    service = make_service()
    world = ServedOffloadingWorld(tmp_path, events=True, settings={"service": service.root})
    try:
        world.settle()
        subscriber = Subscriber(world)
        world.generate(random_prompt(random.Random(6), 100), max_tokens=1)
        drain(subscriber)
        wait_until(lambda: len(subscriber.told[HOST]) == 6, lambda: drain(subscriber))
        world.manager.reset_cache()
        world.generate([1], max_tokens=1)
        wait_until(lambda: not subscriber.told[HOST], lambda: drain(subscriber))
    finally:
        world.close()
