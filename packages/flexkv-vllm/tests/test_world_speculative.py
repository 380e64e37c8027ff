# SPDX-License-Identifier: Apache-2.0
"""FlexKV with speculative decoding, under vLLM's real scheduler: some guesses are wrong, and vLLM
asks what has ended before it lets the stores of the same step begin."""

from __future__ import annotations

import random

import pytest
from engine_world import MakeWorld, random_prompt
from kv_pages import BLOCK_TOKENS
from traffic import SEEDS, Traffic, loaded, make_stems, preempted, refused
from vllm.v1.core.sched.output import SchedulerOutput
from world_config import IN_TREE, PLUGIN

from flexkv.types.mover import Direction
from flexkv_vllm.compat.core import binds_pool
from packages.inside import index_of
from packages.tier_blocks import ready_blocks, writing_blocks

LAYERWISE = pytest.mark.skipif(not binds_pool(), reason="layer by layer from vLLM 0.22 on")


AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
"""Whether steps are scheduled before the guesses of the last one were judged."""


def lag(ahead: bool) -> random.Random | None:
    return random.Random(7) if ahead else None


@AHEAD
def test_each_step_stores_what_was_accepted_before_it(make_world: MakeWorld, ahead: bool) -> None:
    """What a step computes of its own guesses is stored by a later one, if they were right."""
    rng = random.Random(1)
    world = make_world(guesses=rng, lag=lag(ahead))
    prompt = random_prompt(rng, 10 * BLOCK_TOKENS)
    first = world.add(prompt, max_tokens=100)
    request = world.requests[first]
    accepted, index, schedule = 0, index_of(world.cache), world.scheduler.schedule

    def note_what_is_accepted() -> SchedulerOutput:
        nonlocal accepted
        output = schedule()
        if first in output.num_scheduled_tokens:
            accepted = request.num_tokens
        return output

    world.scheduler.schedule = note_what_is_accepted
    while not request.is_finished():
        decodes = request.num_output_tokens > 0
        world.step()
        if decodes:
            stored = {*ready_blocks(index), *writing_blocks(index)}
            assert stored == set(request.block_hashes[: accepted // BLOCK_TOKENS])
    world.run()
    world.settle()
    assert accepted // BLOCK_TOKENS > len(prompt) // BLOCK_TOKENS
    assert set(ready_blocks(index)) == set(request.block_hashes[: accepted // BLOCK_TOKENS])
    world.forget()
    second = world.generate(world.texts[first].upto(len(prompt) + 100), max_tokens=50)
    assert world.external_tokens[second] == accepted // BLOCK_TOKENS * BLOCK_TOKENS
    world.check_outputs()


@pytest.mark.parametrize(("ahead", "window"), [(False, 3), (True, 8)], ids=["in-turn", "ahead"])
def test_what_was_left_behind_before_it_was_accepted_is_not_stored(
    make_world: MakeWorld, ahead: bool, window: int
) -> None:
    """A step's guesses may be right beyond a window that ends with them: as vLLM schedules the next
    step it gives the blocks before the window away. The world looks which blocks are read."""
    rng = random.Random(4)
    world = make_world(guesses=rng, windows=(window,), lag=lag(ahead))
    first = world.generate(random_prompt(rng, 3), max_tokens=200)
    world.settle()
    hashes = world.requests[first].block_hashes
    ready = ready_blocks(index_of(world.cache))
    stored = [[each + group in ready for each in hashes] for group in (b"", b"\1")]
    assert all(stored[0][:-1])
    assert True in stored[1]
    assert False in stored[1][:-1]


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


@SEEDS
@pytest.mark.parametrize(
    ("entry", "mode", "windows"),
    [
        (PLUGIN, "async", ()),
        (PLUGIN, "async", (70,)),
        # A block may be behind the window before it is known to be right.
        (PLUGIN, "async", (3,)),
        pytest.param(PLUGIN, "layerwise", (), marks=LAYERWISE),
        (IN_TREE, "async", ()),
    ],
    ids=["async", "hybrid", "narrow", "layerwise", "in-tree"],
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


@SEEDS
@pytest.mark.parametrize(
    ("entry", "windows"),
    [(PLUGIN, ()), (PLUGIN, (70,)), (PLUGIN, (3,)), (IN_TREE, ())],
    ids=["full", "hybrid", "narrow", "in-tree"],
)
def test_random_traffic_scheduled_ahead_never_computes_on_a_wrong_byte(
    make_world: MakeWorld, entry: str, windows: tuple[int, ...], seed: int
) -> None:
    rng = random.Random(seed)
    world = make_world(
        entry=entry,
        guesses=rng,
        lag=rng,
        windows=windows,
        ranks=1 + seed % 2,
        num_blocks=60 if windows else 40,
        slots=(30, 100)[seed % 2],
        budget=96,
    )
    world.slow_down(rng, failure_rate=0.05)
    Traffic(world, rng, make_stems(rng, 4)).run(60, until=[preempted, loaded, refused])
