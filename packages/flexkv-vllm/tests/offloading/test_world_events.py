# SPDX-License-Identifier: Apache-2.0
"""KV events under vLLM's own `OffloadingConnector`: subscribers are told all about the blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from disk_world import drive_of
from engine_world import BLOCK_TOKENS, random_prompt
from offloading_world import HYBRID, MakeOffloadingWorld, OffloadingWorld
from patience import wait_until
from served_offloading_world import ServedOffloadingWorld
from served_world import MakeService
from subscriber import DISK, HOST, Subscriber, drain

from flexkv_vllm.compat.events import event_hash


def expected(prompt: list[int], request: Any, chunk: int) -> list[tuple[Any, ...]]:
    """Hash, parent and tokens of each complete block of a prompt in one group."""
    names = [event_hash(each) for each in request.block_hashes]
    blocks = len(prompt) // (chunk * BLOCK_TOKENS)
    return [
        (
            [names[(at + 1) * chunk - 1]],
            names[at * chunk - 1] if at else None,
            prompt[at * chunk * BLOCK_TOKENS : (at + 1) * chunk * BLOCK_TOKENS],
        )
        for at in range(blocks)
    ]


def told(subscriber: Subscriber, medium: str, chunk: int = 1) -> list[tuple[Any, ...]]:
    """The same of what was stored in a medium, in the order of the prompt."""
    events = [each for each in subscriber.stored if each.medium == medium]
    assert all(each.block_size == chunk * BLOCK_TOKENS for each in events)
    known = [(each.block_hashes, each.parent_block_hash, each.token_ids) for each in events]
    ordered: list[tuple[Any, ...]] = []
    parent = None
    while len(ordered) < len(known):
        (one,) = (each for each in known if each[1] == parent)
        ordered.append(one)
        parent = one[0][-1]
    return ordered


def await_descriptions(world: OffloadingWorld) -> None:
    """Run steps until the blocks that were on disk are told."""
    index = drive_of(world).index
    wait_until(lambda: index.noted_slots == index.num_slots and not index.has_changes, world.step)


@pytest.mark.parametrize("describes", [False, True])
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_stored_block_is_told_in_full(
    make_offloading_world: MakeOffloadingWorld, chunk: int, describes: bool
) -> None:
    """Whether or not vLLM is to describe the blocks itself."""
    settings = {"self_describing_kv_events": True} if describes else {}
    world = make_offloading_world(events=True, chunk=chunk, disk_slots=60, settings=settings)
    subscriber = Subscriber(world)
    prompt = random_prompt(random.Random(1), 200)
    request = world.requests[world.generate(prompt, salt="salt", max_tokens=1)]
    drain(subscriber)
    for medium in (HOST, DISK):
        assert told(subscriber, medium, chunk) == expected(prompt, request, chunk)
    own = {each.kv_cache_spec_kind for each in subscriber.stored}
    assert own == {"full_attention"}
    assert subscriber.stored[0].extra_keys is not None
    tracker = world.connector.connector_scheduler._events_tracker
    assert not tracker._pending_event_metadata


@HYBRID
def test_every_group_is_told_in_full(
    make_offloading_world: MakeOffloadingWorld, windows: tuple[int, ...]
) -> None:
    world = make_offloading_world(events=True, windows=windows)
    subscriber = Subscriber(world)
    world.generate(random_prompt(random.Random(2), 200))
    drain(subscriber)
    assert {each.group_idx for each in subscriber.stored} == set(range(1 + len(windows)))
    assert all(len(each.token_ids) == BLOCK_TOKENS for each in subscriber.stored)


@pytest.mark.parametrize("chunk", [1, 3])
def test_after_a_restart_the_disk_is_told_in_full(
    make_offloading_world: MakeOffloadingWorld, chunk: int
) -> None:
    prompt = random_prompt(random.Random(3), 200)
    first = make_offloading_world(events=True, chunk=chunk, disk_slots=60)
    request = first.requests[first.generate(prompt, max_tokens=1)]
    drain(Subscriber(first))
    first.close()
    world = make_offloading_world(events=True, chunk=chunk, disk_slots=60)
    subscriber = Subscriber(world)
    await_descriptions(world)
    drain(subscriber)
    assert told(subscriber, DISK, chunk) == expected(prompt, request, chunk)


def test_a_block_that_was_stored_without_events_is_told_in_full_when_it_is_fetched(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    prompt = random_prompt(random.Random(4), 200)
    first = make_offloading_world(disk_slots=60)
    request = first.requests[first.generate(prompt, max_tokens=1)]
    first.settle()
    first.close()
    world = make_offloading_world(events=True, disk_slots=60)
    subscriber = Subscriber(world)
    await_descriptions(world)
    drain(subscriber)
    assert {each.block_size for each in subscriber.stored} == {0}
    subscriber.stored.clear()
    world.generate(prompt)
    drain(subscriber)
    for medium in (HOST, DISK):
        found = told(subscriber, medium)
        assert found[: 200 // BLOCK_TOKENS] == expected(prompt, request, 1)


@pytest.mark.parametrize("cleared", [False, True])
def test_after_a_reset_of_vllms_own_cache_all_blocks_are_told_again(
    make_offloading_world: MakeOffloadingWorld, cleared: bool
) -> None:
    world = make_offloading_world(events=True, disk_slots=60)
    subscriber = Subscriber(world)
    prompt = random_prompt(random.Random(5), 200)
    request = world.requests[world.generate(prompt, max_tokens=1)]
    drain(subscriber)
    subscriber.stored.clear()
    assert world.scheduler.reset_prefix_cache(reset_connector=cleared)
    world.generate([1], max_tokens=1)
    await_descriptions(world)
    drain(subscriber)
    if cleared:
        assert subscriber.told == {HOST: set(), DISK: set()}
        assert subscriber.cleared == {HOST: set(), DISK: set()}
    else:
        for medium in (HOST, DISK):
            assert told(subscriber, medium) == expected(prompt, request, 1)


def test_a_reset_of_one_engine_of_a_service_is_told(
    make_service: MakeService, tmp_path: Path
) -> None:
    """The other engines keep the blocks, which this one finds no more."""
    service = make_service()
    settings = {"service": service.root, "always_load": True}
    world = ServedOffloadingWorld(tmp_path, events=True, settings=settings)
    try:
        world.settle()
        subscriber = Subscriber(world)
        prompt = random_prompt(random.Random(6), 100)
        request = world.requests[world.generate(prompt, max_tokens=1)]
        drain(subscriber)
        wait_until(lambda: len(subscriber.told[HOST]) == 6, lambda: drain(subscriber))
        assert told(subscriber, HOST) == expected(prompt, request, 1)
        world.manager.reset_cache()
        world.generate([1], max_tokens=1)
        wait_until(lambda: not subscriber.told[HOST], lambda: drain(subscriber))
    finally:
        world.close()
