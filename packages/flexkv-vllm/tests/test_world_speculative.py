# SPDX-License-Identifier: Apache-2.0
"""FlexKV with speculative decoding, under vLLM's real scheduler: some guesses are wrong, and vLLM
asks what has ended before it lets the stores of the same step begin."""

from __future__ import annotations

import random

import pytest
from engine_world import MakeWorld, random_prompt
from kv_pages import BLOCK_TOKENS
from patience import wait_until
from traffic import Traffic, loaded, make_stems, preempted, refused
from world_config import IN_TREE, PLUGIN

from flexkv import Direction
from flexkv_vllm.compat import binds_pool

LAYERWISE = pytest.mark.skipif(not binds_pool(), reason="layer by layer from vLLM 0.22 on")


@pytest.mark.parametrize("entry", [PLUGIN, IN_TREE], ids=["plugin", "in-tree"])
def test_only_what_no_guess_had_a_part_in_is_stored(make_world: MakeWorld, entry: str) -> None:
    """A draft model sees the last token of a prompt beside the first of the answer."""
    rng = random.Random(1)
    world = make_world(guesses=rng, entry=entry)
    prompt = random_prompt(rng, 10 * BLOCK_TOKENS)
    first = world.generate(prompt, max_tokens=50)
    world.settle()
    hashes = world.requests[first].block_hashes
    assert set(world.cache._index._ready) == set(hashes[:9])
    world.forget()
    second = world.generate(prompt, max_tokens=50)
    assert world.external_tokens[second] == 9 * BLOCK_TOKENS
    world.check_outputs()


@LAYERWISE
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_step_could_not_load_is_told_with_that_step(
    make_world: MakeWorld, policy: str, ranks: int
) -> None:
    rng = random.Random(2)
    world = make_world(
        guesses=rng, settings={"load_mode": "layerwise"}, policy=policy, ranks=ranks, budget=512
    )
    prompt = random_prompt(rng, 300)
    first = world.generate(prompt, max_tokens=8)
    world.forget()
    late = world.slow_down(rng)[-1]
    late.failing, late.failure_rate = frozenset({Direction.LOAD}), 1.0
    second = world.generate(prompt, max_tokens=8)
    assert late.refused == 1
    assert world.outputs[second] == (world.outputs[first] if policy == "recompute" else [])


def test_blocks_are_held_until_their_store_has_begun_and_ended(make_world: MakeWorld) -> None:
    """Behind vLLM's own connector, which passes on no fences. The store of an ended request and its
    release come with one step's orders."""
    rng = random.Random(3)
    world = make_world(guesses=rng, entry=IN_TREE, num_blocks=40, budget=512)
    (late,) = world.slow_down(rng, polls=(10**9, 10**9))
    prompt = random_prompt(rng, 20 * BLOCK_TOKENS)
    other = world.add(random_prompt(rng, 20), max_tokens=100)
    ended = world.add(prompt, max_tokens=1)
    wait_until(world.requests[ended].is_finished, world.step)
    # Could run if the blocks were free.
    world.add(random_prompt(rng, 25 * BLOCK_TOKENS), max_tokens=1)
    for _ in range(3):
        world.step()
    assert not world.requests[other].is_finished()
    assert ended in world.scheduler.requests
    late.polls = (0, 0)
    late.catch_up()
    world.run()
    world.forget()
    again = world.generate(prompt)
    assert world.external_tokens[again] == 19 * BLOCK_TOKENS
    world.check_outputs()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("entry", "mode", "windows"),
    [
        (PLUGIN, "async", ()),
        (PLUGIN, "async", (70,)),
        pytest.param(PLUGIN, "layerwise", (), marks=LAYERWISE),
        (IN_TREE, "async", ()),
    ],
    ids=["async", "hybrid", "layerwise", "in-tree"],
)
def test_random_traffic_never_computes_on_a_wrong_byte(
    make_world: MakeWorld, entry: str, mode: str, windows: tuple[int, ...], seed: int
) -> None:
    rng = random.Random(seed)
    world = make_world(
        entry=entry,
        guesses=rng,
        windows=windows,
        ranks=1 + seed % 2,
        num_blocks=60 if windows else 40,
        slots=(30, 100)[seed % 2],
        budget=96,
        settings={"load_mode": mode},
    )
    world.slow_down(rng, failure_rate=0.05)
    Traffic(world, rng, make_stems(rng, 4)).run(60, until=[preempted, loaded, refused])
