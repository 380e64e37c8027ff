# SPDX-License-Identifier: Apache-2.0
"""Loads beside the forward that needs them, under vLLM's real scheduler."""

from __future__ import annotations

import random

import pytest
from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from traffic import SEEDS, Traffic, loaded, make_stems, preempted, refused
from world_config import IN_TREE

from flexkv import ConfigError
from flexkv.types.mover import Direction
from flexkv_vllm.compat.core import binds_pool
from packages.inside import chooser_of, compute_on_device
from packages.inside_adapters import tracked_requests

pytestmark = pytest.mark.skipif(not binds_pool(), reason="layer by layer from vLLM 0.22 on")

LAYERWISE = {"load_mode": "layerwise"}
MODES = pytest.mark.parametrize("mode", ["layerwise", "auto"])


def layerwise_loads(world: World) -> int:
    """Requests whose forward was to run beside their load."""
    return sum(tracked.match is not None and tracked.match.layerwise for tracked in seen(world))


def seen(world: World) -> list:
    return list(tracked_requests(world.side).values())


@MODES
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("length", [17, 100, 288, 300])
def test_a_forgotten_prefix_comes_back_in_one_step(
    make_world: MakeWorld, mode: str, ranks: int, length: int
) -> None:
    world = make_world(ranks=ranks, block_tokens=48, budget=512, settings={"load_mode": mode})
    prompt = random_prompt(random.Random(length), length)
    first = world.generate(prompt)
    world.forget()
    second = world.add(prompt)
    world.step()
    hit = length // 48 * 48
    # vLLM computes one token at least.
    cut = min(hit, length - 1)
    assert world.outputs[second] == world.outputs[first][:1]
    assert world.external_tokens[second] == cut
    assert layerwise_loads(world) == (1 if cut else 0)
    world.run()
    world.check_outputs()


@pytest.mark.parametrize("slow", [True, False], ids=["slow", "fast"])
def test_auto_goes_by_what_loading_takes(make_world: MakeWorld, slow: bool) -> None:
    """A load that others would feel is not beside their forward, though it is worth it."""
    world = make_world(settings={"load_mode": "auto"})
    compute_on_device(chooser_of(world.side))
    rng = random.Random(1)
    prompt = random_prompt(rng, 200)
    world.generate(prompt)
    world.forget()
    world.believe(1e3 if slow else 1e15)
    world.add(random_prompt(rng, 30), max_tokens=50)
    world.step()
    second = world.add(prompt)
    world.step()
    assert (world.outputs[second] == []) == slow
    assert layerwise_loads(world) == (0 if slow else 1)
    world.run()
    world.check_outputs()
    assert world.external_tokens[second] == 192


@pytest.mark.parametrize("setting", ["async", "layerwise", "auto"])
def test_a_request_says_how_it_is_loaded(make_world: MakeWorld, setting: str) -> None:
    world = make_world(settings={"load_mode": setting}, budget=512)
    prompt = random_prompt(random.Random(2), 200)
    world.generate(prompt)
    for mode in ("async", "layerwise"):
        world.forget()
        again = world.add(prompt, params={"flexkv.load_mode": mode})
        world.step()
        assert layerwise_loads(world) == (mode == "layerwise" and setting != "async")
        world.run()
        assert world.external_tokens[again] == 192
    world.check_outputs()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_failed_loads_are_recomputed_or_fail_their_request_only(
    make_world: MakeWorld, policy: str, ranks: int
) -> None:
    world = make_world(policy=policy, ranks=ranks, settings=LAYERWISE)
    prompt = random_prompt(random.Random(10), 300)
    first = world.generate(prompt)
    world.forget()
    rng = random.Random(11)
    late = world.slow_down(rng)[-1]
    late.failure_rate = 1.0
    second = world.generate(prompt)
    assert world.outputs[second] == (world.outputs[first] if policy == "recompute" else [])
    late.failure_rate = 0.0
    assert world.cache.counters.failed_loads == 1
    third = world.generate(random_prompt(rng, 100))
    assert len(world.outputs[third]) == 4


def test_nothing_computed_on_a_failed_load_is_stored(make_world: MakeWorld) -> None:
    world = make_world(settings=LAYERWISE, budget=512)
    rng = random.Random(12)
    prompt = random_prompt(rng, 160)
    world.generate(prompt)
    stored = world.cache.counters.stored_blocks
    world.forget()
    late = world.slow_down(rng)[0]
    late.failing, late.failure_rate = frozenset({Direction.LOAD}), 1.0
    world.add(prompt + random_prompt(rng, 160))
    world.step()
    late.failure_rate = 0.0
    world.run()
    world.check_outputs()
    assert world.cache.counters.failed_loads == 1
    assert world.cache.counters.stored_blocks == stored


def test_a_block_is_shared_only_when_it_is_loaded(make_world: MakeWorld) -> None:
    """vLLM would let a second request of the same step compute on what the first one loads."""
    world = make_world(settings=LAYERWISE)
    rng = random.Random(14)
    prompt = random_prompt(rng, 300)
    world.generate(prompt)
    world.forget()
    late = world.slow_down(rng)[0]
    late.failure_rate = 1.0
    first = world.add(prompt[:200])
    # Less than the budget of a step is left for what the first one has to compute anew.
    others = [world.add(prompt[:180] + random_prompt(rng, 10)) for _ in range(3)]
    world.step()
    assert world.scheduler.requests[first].num_computed_tokens == 0
    assert all(world.scheduler.requests[each].num_computed_tokens == 0 for each in others)
    late.failure_rate = 0.0
    world.run()
    world.check_outputs()


def test_the_last_block_of_a_prompt_is_shared_only_when_it_is_loaded(
    make_world: MakeWorld,
) -> None:
    """vLLM computes the last token of this block anew, and shares the block in the same step."""
    world = make_world(settings=LAYERWISE)
    rng = random.Random(16)
    prompt = random_prompt(rng, 2 * BLOCK_TOKENS)
    world.generate(prompt, max_tokens=1)
    world.forget()
    world.generate(prompt[:BLOCK_TOKENS] + random_prompt(rng, 1), max_tokens=1)
    late = world.slow_down(rng)[0]
    late.failing, late.failure_rate = frozenset({Direction.LOAD}), 1.0
    first = world.add(prompt)
    longer = prompt + random_prompt(rng, 2 * BLOCK_TOKENS)
    world.add(longer)
    world.step()
    late.failure_rate = 0.0
    world.abort(first)
    world.run()
    world.forget()
    world.generate(longer)
    world.check_outputs()


@pytest.mark.parametrize("way", ["copy", "order"])
def test_what_a_failed_load_left_is_nobodys_hit(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """vLLM keeps such blocks in its own prefix cache, for the request to fill them. One that is
    aborted never does."""
    world = make_world(settings=LAYERWISE, budget=512)
    rng = random.Random(15)
    prompt = random_prompt(rng, 300)
    world.generate(prompt)
    world.forget()
    late = world.slow_down(rng)[0]
    late.failure_rate = 1.0
    with monkeypatch.context() as patch:
        if way == "order":
            patch.setattr(world.cache, "load", lambda keys: None)
        request_id = world.add(prompt + random_prompt(rng, 100))
        world.step()
    world.abort(request_id)
    late.failure_rate = 0.0
    world.run()
    world.generate(prompt + random_prompt(rng, 10))
    world.check_outputs()


def test_an_error_while_ordering_a_load_is_told_to_vllm(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(settings=LAYERWISE)
    prompt = random_prompt(random.Random(13), 300)
    first = world.generate(prompt)
    world.forget()

    def broken(*_: object) -> None:
        raise RuntimeError("broken by the test")

    with monkeypatch.context() as patch:
        patch.setattr(world.cache, "load", broken)
        world.add(prompt)
        for _ in range(5):
            world.step()
    world.run()
    assert all(tokens == world.outputs[first] for tokens in world.outputs.values())


@MODES
def test_behind_vllms_own_connector_it_is_refused(make_world: MakeWorld, mode: str) -> None:
    with pytest.raises(ConfigError, match=f"load_mode is '{mode}'.*CUDA graphs skip its layer"):
        make_world(settings={"load_mode": mode}, entry=IN_TREE)


@MODES
@pytest.mark.parametrize("ranks", [1, 2])
@SEEDS
def test_random_traffic_never_computes_on_a_wrong_byte(
    make_world: MakeWorld, mode: str, ranks: int, seed: int
) -> None:
    rng = random.Random(seed)
    world = make_world(
        ranks=ranks,
        num_blocks=40,
        slots=(30, 100)[seed % 2],
        disk_slots=(0, 100)[(seed + ranks) % 2],
        block_tokens=rng.choice([16, 32]),
        budget=96,
        settings={"load_mode": mode},
    )
    world.slow_down(rng, failure_rate=0.05)
    Traffic(world, rng, make_stems(rng, 4)).run(120, until=[preempted, loaded, refused])
    world.settle()
    world.assert_untracked()
