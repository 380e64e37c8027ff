# SPDX-License-Identifier: Apache-2.0
"""FlexKV with pipeline parallelism: each stage has some of the layers, and while the last one runs
a step the first has begun the next."""

from __future__ import annotations

import random

import pytest
from engine_world import MakeWorld, random_prompt
from kv_pages import BLOCK_TOKENS
from traffic import SEEDS, Traffic, loaded, make_stems, preempted, refused
from world_config import IN_TREE, PLUGIN

from flexkv_vllm.compat.core import fails_by_request, passes_stages_on
from packages.inside import index_of
from packages.tier_blocks import ready_blocks

pytestmark = pytest.mark.skipif(not passes_stages_on(), reason="refused with this vLLM")
HYBRID = pytest.mark.skipif(not fails_by_request(), reason="several groups from vLLM 0.30 on")


@pytest.mark.parametrize("entry", [PLUGIN, IN_TREE], ids=["plugin", "in-tree"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_stage_gets_its_own_layers_back(make_world: MakeWorld, entry: str, ranks: int) -> None:
    world = make_world(stages=2, ranks=ranks, entry=entry)
    prompt = random_prompt(random.Random(1), 300)
    first = world.generate(prompt)
    stored = set(world.requests[first].block_hashes[: 300 // BLOCK_TOKENS])
    world.forget()
    assert set(ready_blocks(index_of(world.cache))) == stored
    second = world.generate(prompt)
    assert world.external_tokens[second] == 288
    assert world.outputs[second] == world.outputs[first]
    world.check_outputs()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_what_is_on_disk_serves_as_many_stages_of_any_size(
    make_world: MakeWorld, ranks: int
) -> None:
    prompt = random_prompt(random.Random(2), 300)
    world = make_world(stages=2, ranks=2, disk_slots=100)
    first = world.generate(prompt)
    world.close()
    for stages, expected in ((2, 288), (1, 0)):
        other = make_world(stages=stages, ranks=ranks, disk_slots=100)
        second = other.generate(prompt)
        assert other.external_tokens[second] == expected
        assert other.outputs[second] == world.outputs[first]
        other.close()


@SEEDS
@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize(
    ("entry", "windows"),
    [(PLUGIN, ()), pytest.param(PLUGIN, (70,), marks=HYBRID), (IN_TREE, ())],
    ids=["full", "hybrid", "in-tree"],
)
def test_random_traffic_never_computes_on_a_wrong_byte(
    make_world: MakeWorld, entry: str, windows: tuple[int, ...], ahead: bool, seed: int
) -> None:
    rng = random.Random(seed)
    world = make_world(
        stages=2,
        ranks=1 + seed % 2,
        entry=entry,
        windows=windows,
        lag=rng if ahead else None,
        num_blocks=60 if windows else 40,
        slots=(30, 100)[seed % 2],
        budget=96,
    )
    world.slow_down(rng, failure_rate=0.05)
    Traffic(world, rng, make_stems(rng, 4)).run(60, until=[preempted, loaded, refused])
