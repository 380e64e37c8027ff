# SPDX-License-Identifier: Apache-2.0
"""All that a step fills is stored with one transfer; what becomes of one request's blocks is its
own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from engine_world import BLOCK_TOKENS, MakeWorld, World, random_prompt
from patience import wait_until

from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.types.mover import Direction
from packages.inside import index_of
from packages.inside_adapters import (
    failures_of,
    keys_of_side,
    side_stores,
    stores_under_way,
)
from packages.tier_blocks import ready_blocks

NEVER_BY_ITSELF = (1_000_000, 1_000_000)


def external(world: World, prompt: list[int]) -> int:
    """Tokens of the prompt that are loaded, where vLLM itself has none."""
    world.forget()
    return world.external_tokens[world.generate(prompt, max_tokens=1)]


@pytest.mark.parametrize("windows", [(), (40,)], ids=["full", "hybrid"])
def test_a_step_stores_with_one_transfer(make_world: MakeWorld, windows: tuple[int, ...]) -> None:
    world = make_world(num_blocks=200, slots=200, budget=512, windows=windows)
    rng = random.Random(1)
    shared = random_prompt(rng, 3 * BLOCK_TOKENS)
    prompts = [shared + random_prompt(rng, 2 * BLOCK_TOKENS + i) for i in (1, 2, 3)]
    for prompt in prompts:
        world.add(prompt, max_tokens=20)
    world.step()
    world.settle()
    assert world.cache.counters.stores == 1
    world.run()
    world.check_outputs()
    assert [external(world, prompt) for prompt in prompts] == 3 * [5 * BLOCK_TOKENS]


@pytest.mark.parametrize("budget", [512, 64], ids=["at-once", "step-by-step"])
@pytest.mark.parametrize("windows", [(), (40,)], ids=["full", "hybrid"])
def test_each_prefix_of_a_store_begins_anew(
    make_world: MakeWorld, windows: tuple[int, ...], budget: int
) -> None:
    """A block that is said to build on another request's would keep that one in host memory. One
    that is said to begin a prefix would outlive the blocks that it builds on."""
    world = make_world(num_blocks=100, slots=100, budget=budget, windows=windows)
    rng = random.Random(7)
    requests = [world.add(random_prompt(rng, 4 * BLOCK_TOKENS + 1)) for _ in range(3)]
    world.run()
    ready = ready_blocks(index_of(world.cache))
    for request_id in requests:
        keys = world.requests[request_id].block_hashes[:4]
        parents = [ready[key].parent for key in keys]
        assert [None if each is None else each.key for each in parents] == [None, *keys[:3]]


def test_answers_of_requests_that_fill_blocks_in_other_steps_are_stored(
    make_world: MakeWorld,
) -> None:
    world = make_world(num_blocks=200, slots=200, budget=256)
    rng = random.Random(2)
    prompts = [random_prompt(rng, 20 + 5 * i) for i in range(6)]
    requests = [world.add(prompt, max_tokens=60) for prompt in prompts]
    world.run()
    world.check_outputs()
    for prompt, request_id in zip(prompts, requests, strict=True):
        text = prompt + world.outputs[request_id]
        # The last token was sampled, never computed on.
        full = (len(text) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert external(world, [*text, 1]) == full


@pytest.mark.parametrize("windows", [(), (40,)], ids=["full", "hybrid"])
def test_an_error_with_one_request_leaves_the_blocks_of_the_others_in_the_store(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, windows: tuple[int, ...]
) -> None:
    world = make_world(num_blocks=200, slots=200, budget=512, windows=windows)
    rng = random.Random(4)
    prompts = [random_prompt(rng, 4 * BLOCK_TOKENS + 1) for _ in range(3)]
    requests = [world.add(prompt, max_tokens=1) for prompt in prompts]
    keys = keys_of_side(world.side)
    of = type(keys).of

    def fail_for_second(tracked: TrackedRequest, *args: Any) -> Sequence[bytes]:
        if tracked.id == requests[1] and tracked.ran:
            raise RuntimeError("its adapter's files are gone")
        return of(keys, tracked, *args)

    with monkeypatch.context() as patched:
        patched.setattr(keys, "of", fail_for_second)
        world.run()
    assert failures_of(side_stores(world.side))["storing blocks"] == 1
    world.settle()
    assert [external(world, each) for each in prompts] == [4 * BLOCK_TOKENS, 0, 4 * BLOCK_TOKENS]


def test_overwritten_blocks_leave_those_of_others_in_their_store(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=100, slots=100, budget=512)
    rng = random.Random(3)
    (late,) = world.slow_down(rng, polls=NEVER_BY_ITSELF)
    first, second = (random_prompt(rng, 4 * BLOCK_TOKENS + 1) for _ in range(2))
    torn, whole = world.add(first, max_tokens=1), world.add(second, max_tokens=1)
    world.step()
    (store,) = stores_under_way(world.side).values()
    assert {run.request.request_id for run in store.runs} == {torn, whole}
    table = next(run.engine_blocks for run in store.runs if run.request.request_id == torn)
    side_stores(world.side).discard(table)
    late.polls = (0, 0)
    late.catch_up()
    world.run()
    assert [external(world, second), external(world, first)] == [4 * BLOCK_TOKENS, 0]


def test_a_store_that_fails_is_a_miss_of_all_its_requests(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=100, slots=100, budget=512)
    rng = random.Random(4)
    (late,) = world.slow_down(rng, polls=(0, 0), failure_rate=1.0)
    prompts = [random_prompt(rng, 4 * BLOCK_TOKENS + 1) for _ in range(2)]
    for prompt in prompts:
        world.add(prompt, max_tokens=1)
    world.run()
    late.failure_rate = 0.0
    assert late.refused == 1
    assert [external(world, prompt) for prompt in prompts] == [0, 0]
    assert [external(world, prompt) for prompt in prompts] == 2 * [4 * BLOCK_TOKENS]


def test_a_layerwise_load_that_fails_keeps_nothing_of_others_from_being_stored(
    make_world: MakeWorld,
) -> None:
    world = make_world(num_blocks=100, slots=100, budget=512, settings={"load_mode": "layerwise"})
    rng = random.Random(5)
    loaded = random_prompt(rng, 4 * BLOCK_TOKENS + 1)
    other = random_prompt(rng, 4 * BLOCK_TOKENS + 1)
    world.generate(loaded, max_tokens=1)
    world.forget()
    (late,) = world.slow_down(rng, polls=(0, 0), failure_rate=1.0)
    late.failing = frozenset({Direction.LOAD})
    longer = loaded + random_prompt(rng, 3 * BLOCK_TOKENS)
    world.add(longer, max_tokens=1)
    world.add(other, max_tokens=1)
    world.step()
    late.failure_rate = 0.0
    world.run()
    world.check_outputs()
    assert late.refused > 0
    assert external(world, other) == 4 * BLOCK_TOKENS


def test_after_a_layerwise_load_stores_are_as_those_of_others(make_world: MakeWorld) -> None:
    """A transfer of its own for each request would cost the scheduler its time."""
    world = make_world(num_blocks=100, slots=100, budget=512, settings={"load_mode": "layerwise"})
    rng = random.Random(6)
    prompts = [random_prompt(rng, 3 * BLOCK_TOKENS + 1) for _ in range(2)]
    for prompt in prompts:
        world.generate(prompt, max_tokens=1)
    world.forget()
    requests = [world.add(prompt, max_tokens=40) for prompt in prompts]
    wait_until(lambda: all(world.outputs[each] for each in requests), world.step)
    world.settle()
    stores, blocks = world.cache.counters.stores, world.cache.counters.stored_blocks
    while world.cache.counters.stored_blocks == blocks:
        world.step()
        world.settle()
    counters = world.cache.counters
    assert (counters.stores - stores, counters.stored_blocks - blocks) == (1, 2)


def offered(world: World, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys of the blocks that are offered to host memory from now on."""
    keys: list[bytes] = []
    store = world.cache.store

    def noted(chain: Sequence[bytes], positions: Sequence[int], *rest: Any, **more: Any) -> Any:
        keys.extend(chain[i] for i in positions)
        return store(chain, positions, *rest, **more)

    monkeypatch.setattr(world.cache, "store", noted)
    return keys


@pytest.mark.parametrize("known", [0, 1], ids=["all-loaded", "one-known-to-vllm"])
def test_loaded_blocks_are_not_offered_to_host_memory_again(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    """Those that vLLM had itself are: host memory may lack them."""
    world = make_world(num_blocks=100, slots=100, budget=512)
    prompt = random_prompt(random.Random(3), 8 * BLOCK_TOKENS + 5)
    world.generate(prompt)
    world.forget()
    if known:
        world.generate(prompt[: known * BLOCK_TOKENS + 1], max_tokens=1)
    keys = offered(world, monkeypatch)
    request_id = world.generate(prompt, max_tokens=BLOCK_TOKENS + 1)
    assert world.external_tokens[request_id] == (8 - known) * BLOCK_TOKENS
    hashes = world.requests[request_id].block_hashes[:9]
    assert keys == (hashes if known else hashes[8:])


def test_blocks_whose_load_has_failed_are_stored_again(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=100, slots=100, budget=512)
    rng = random.Random(4)
    prompt = random_prompt(rng, 8 * BLOCK_TOKENS + 5)
    world.generate(prompt)
    world.forget()
    (late,) = world.slow_down(rng, failure_rate=1.0)
    late.failing = frozenset({Direction.LOAD})
    world.generate(prompt)
    late.failure_rate = 0.0
    assert late.refused
    assert external(world, prompt) == 8 * BLOCK_TOKENS
