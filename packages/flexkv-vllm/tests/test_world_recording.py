# SPDX-License-Identifier: Apache-2.0
"""What `flexkv plan` says of a recording is what vLLM's real scheduler and FlexKV's cache hit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_world import MakeWorld, random_prompt
from kv_pages import BLOCK_TOKENS

from flexkv.plan.curve import LRUCurve
from flexkv.plan.read import read_trace
from flexkv.plan.replay import Setup, replay
from flexkv.plan.trace import Trace

ENGINE_BLOCKS = 48
"""Of vLLM's own cache, of which one is never used: a prompt and a little more."""
REQUESTS = 120
POINTS = 0.02


def chats(rng: random.Random) -> list[list[int]]:
    """Prompts of conversations that grow and come back, behind a common beginning, and others."""
    system = random_prompt(rng, 2 * BLOCK_TOKENS)
    open_chats = [[*system, *random_prompt(rng, rng.randint(20, 120))] for _ in range(8)]
    prompts = []
    for _ in range(REQUESTS):
        if rng.random() < 0.2:
            prompts.append(random_prompt(rng, rng.randint(60, 300)))
            continue
        chat = rng.choice(open_chats)
        if len(chat) > 500:
            chat[:] = [*system, *random_prompt(rng, 40)]
        chat += random_prompt(rng, rng.randint(10, 80))
        prompts.append(list(chat))
    return prompts


@pytest.fixture(scope="module")
def recordings() -> dict[int, tuple[Trace, float, float]]:
    """By slots: the recording, and the shares that the engine and FlexKV hit by its figures."""
    return {}


@pytest.mark.parametrize("slots", [60, 120, 240])
def test_the_curve_of_a_recording_is_what_the_cache_hit(
    make_world: MakeWorld,
    tmp_path: Path,
    recordings: dict[int, tuple[Trace, float, float]],
    slots: int,
) -> None:
    path = tmp_path / "trace.jsonl"
    world = make_world(
        num_blocks=ENGINE_BLOCKS,
        slots=slots,
        context=1024,
        settings={"trace": str(path), "always_load": True, "eviction_policy": "lru"},
    )
    prompts = chats(random.Random(3))
    for prompt in prompts:
        world.generate(prompt, max_tokens=3)
        world.settle()
    tokens = sum(map(len, prompts))
    loaded = sum(world.external_tokens.values())
    world.close()
    read = read_trace(str(path))
    trace, measured = read.trace, read.measured
    assert measured is not None
    assert len(trace.requests) == REQUESTS
    assert measured.prompt_tokens == trace.prompt_tokens == tokens
    assert measured.hit_tokens == loaded > 0
    own = measured.engine_tokens / tokens
    real = measured.hit_tokens / tokens
    recordings[slots] = trace, own, real
    # Any recording says what a cache of another size would have hit.
    for other, _, _ in recordings.values():
        curve = LRUCurve(other, None, ENGINE_BLOCKS - 1)
        assert curve.at(slots).hit_rate == pytest.approx(real, abs=POINTS)
        assert curve.engine_tokens / tokens == pytest.approx(own, abs=POINTS)
        outcome = replay(other, Setup(slots, engine_blocks=ENGINE_BLOCKS - 1))
        assert outcome.hit_rate == pytest.approx(real, abs=POINTS)


def test_the_sizes_make_a_difference(
    recordings: dict[int, tuple[Trace, float, float]],
) -> None:
    """Else the comparison would hold for any curve."""
    if len(recordings) < 3:
        pytest.skip("needs all sizes")
    rates = [recordings[slots][2] for slots in (60, 120, 240)]
    assert rates[1] - rates[0] > 4 * POINTS
    assert rates[2] - rates[1] > 4 * POINTS
