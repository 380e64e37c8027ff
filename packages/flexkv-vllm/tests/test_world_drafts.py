# SPDX-License-Identifier: Apache-2.0
"""Draft models that keep KV beside the model's, under vLLM's real scheduler."""

from __future__ import annotations

import random

import pytest
from engine_world import MakeWorld, random_prompt
from traffic import SEEDS, Traffic, loaded, make_stems, preempted
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from world_config import Drafts

from flexkv_vllm.compat.core import fails_by_request

pytestmark = pytest.mark.skipif(
    not fails_by_request() or "is_eagle_group" not in KVCacheGroupSpec.__dataclass_fields__,
    reason="this vLLM keeps one KV cache group for connectors, or does not tell which has drafts",
)

WINDOWS = pytest.mark.parametrize("windows", [(), (70,)], ids=["full", "hybrid"])


@WINDOWS
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drafts", Drafts)
def test_the_models_own_prefix_comes_back(
    make_world: MakeWorld, windows: tuple[int, ...], ranks: int, drafts: Drafts
) -> None:
    world = make_world(windows=windows, ranks=ranks, drafts=drafts, num_blocks=128)
    prompt = random_prompt(random.Random(1), 300)
    first = world.generate(prompt)
    world.forget()
    second = world.generate(prompt)
    assert world.outputs[second] == world.outputs[first]
    assert world.external_tokens[second] == 288
    assert len(world.side.cached_groups) == 1 + len(windows)


@WINDOWS
@pytest.mark.parametrize("drafts", [Drafts.OWN_GROUP, Drafts.SHARED_GROUP])
@SEEDS
def test_random_traffic_never_computes_on_a_wrong_byte(
    make_world: MakeWorld, windows: tuple[int, ...], drafts: Drafts, seed: int
) -> None:
    rng = random.Random(seed)
    world = make_world(
        windows=windows, drafts=drafts, num_blocks=60, slots=(40, 100)[seed % 2], budget=96
    )
    world.slow_down(rng, failure_rate=0.05)
    Traffic(world, rng, make_stems(rng, 4)).run(80, until=[preempted, loaded])
    world.settle()
    world.assert_untracked()
