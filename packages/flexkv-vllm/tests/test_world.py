# SPDX-License-Identifier: Apache-2.0
"""FlexKV under vLLM's real scheduler; every byte that a request computes on is checked."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_world import MakeWorld, random_prompt
from kv_pages import BLOCK_TOKENS, HEAD_BYTES, HEADS, LAYERS
from patience import PATIENCE_SECONDS
from traffic import SEEDS, Traffic, loaded, make_stems, preempted, refused
from world_config import IN_MULTI, IN_TREE, PLUGIN

from flexkv.types.mover import Direction, Status
from packages.inside import arena_of
from packages.inside_adapters import mover_of

BOTH = pytest.mark.parametrize("entry", [PLUGIN, IN_TREE], ids=["plugin", "in-tree"])


@pytest.mark.parametrize(
    "entry", [PLUGIN, IN_TREE, IN_MULTI], ids=["plugin", "in-tree", "in-multi"]
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("block_tokens", [16, 48])
def test_a_forgotten_prefix_comes_back(
    make_world: MakeWorld, entry: str, ranks: int, block_tokens: int
) -> None:
    world = make_world(entry=entry, ranks=ranks, block_tokens=block_tokens)
    prompt = random_prompt(random.Random(1), 300)
    first = world.generate(prompt)
    world.forget()
    second = world.generate(prompt)
    assert world.outputs[second] == world.outputs[first]
    assert world.external_tokens[first] == 0
    assert world.external_tokens[second] == 300 // block_tokens * block_tokens


@pytest.mark.parametrize("length", [1, 15, 16, 17, 47, 48, 49, 96, 128, 129, 300])
def test_partial_hits_of_every_length_class(make_world: MakeWorld, length: int) -> None:
    world = make_world(block_tokens=48)
    rng = random.Random(length)
    prompt = random_prompt(rng, 300)
    world.generate(prompt)
    world.forget()
    mixed = world.generate(prompt[:length] + random_prompt(rng, 100))
    assert world.external_tokens[mixed] == length // 48 * 48


@pytest.mark.parametrize("length", [15, 47, 48, 49, 95, 96, 97, 288, 300])
def test_the_beginning_of_a_stored_prompt_is_a_hit(make_world: MakeWorld, length: int) -> None:
    """A hit of all tokens leaves none to compute; vLLM then computes the last one again."""
    world = make_world(block_tokens=48)
    prompt = random_prompt(random.Random(length), 300)
    world.generate(prompt)
    world.forget()
    assert world.external_tokens[world.generate(prompt[:length])] == length // 48 * 48
    world.check_outputs()


@pytest.mark.parametrize("length", [1, 47, 48, 49, 300])
def test_the_rest_behind_a_hit_is_stored(make_world: MakeWorld, length: int) -> None:
    world = make_world(block_tokens=48)
    rng = random.Random(length)
    prompt = random_prompt(rng, 300)
    world.generate(prompt)
    world.forget()
    mixed = prompt[:length] + random_prompt(rng, 100)
    world.generate(mixed)
    world.forget()
    assert world.external_tokens[world.generate(mixed)] == len(mixed) // 48 * 48
    world.check_outputs()


def test_a_load_may_begin_inside_a_block(make_world: MakeWorld) -> None:
    """vLLM has the first engine block of a FlexKV block itself, the rest must be loaded."""
    world = make_world(block_tokens=64)
    prompt = random_prompt(random.Random(3), 256)
    world.generate(prompt)
    world.forget()
    world.generate(prompt[:40], max_tokens=1)
    again = world.generate(prompt)
    assert world.external_tokens[again] == 256 - 32


def test_the_answer_is_part_of_the_next_prompt(make_world: MakeWorld) -> None:
    world = make_world()
    rng = random.Random(4)
    prompt = random_prompt(rng, 100)
    turn = world.generate(prompt, max_tokens=50)
    world.forget()
    second = world.generate(prompt + world.outputs[turn] + random_prompt(rng, 20))
    # The last token of the answer was never computed on.
    assert world.external_tokens[second] == (100 + 50 - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_salts_share_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    prompt = random_prompt(random.Random(5), 200)
    world.generate(prompt, salt="one")
    world.forget()
    assert world.external_tokens[world.generate(prompt, salt="two")] == 0
    world.forget()
    assert world.external_tokens[world.generate(prompt)] == 0
    world.forget()
    assert world.external_tokens[world.generate(prompt, salt="one")] == 192


def test_a_reset_leaves_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    prompt = random_prompt(random.Random(6), 200)
    world.generate(prompt)
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    assert world.external_tokens[world.generate(prompt)] == 0


def test_a_tiny_arena_keeps_the_beginning_of_a_prefix(make_world: MakeWorld) -> None:
    world = make_world(slots=4)
    prompt = random_prompt(random.Random(7), 300)
    world.generate(prompt)
    world.forget()
    assert world.external_tokens[world.generate(prompt)] == 4 * BLOCK_TOKENS


def test_abort_during_a_load_gives_everything_back(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=32)
    world.slow_down(random.Random(8))
    prompt = random_prompt(random.Random(8), 300)
    world.generate(prompt)
    for _ in range(10):
        world.forget()
        request_id = world.add(prompt)
        world.step()
        world.abort(request_id)
        world.run()
        assert not world.cache.busy
    # Every engine block is free again: a request that needs nearly all of them runs.
    world.generate(random_prompt(random.Random(9), 31 * BLOCK_TOKENS - 8))
    world.assert_untracked()


def test_blocks_of_an_unfinished_load_are_not_stored(make_world: MakeWorld) -> None:
    """vLLM counts them as computed when the request is aborted, but they hold nothing yet."""
    world = make_world()
    rng = random.Random(14)
    world.slow_down(rng, polls=(3, 6))
    for _ in range(10):
        prompt = random_prompt(rng, 300)
        world.generate(prompt)
        world.forget()
        request_id = world.add(prompt)
        world.step()
        assert world.connector.reset_cache()
        world.abort(request_id)
        world.run()
        assert world.cache.ready_blocks == 0


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_loads_are_recomputed_or_fail_their_request_only(
    make_world: MakeWorld, policy: str
) -> None:
    world = make_world(policy=policy)
    prompt = random_prompt(random.Random(10), 300)
    first = world.generate(prompt)
    world.forget()
    world.slow_down(random.Random(10), failure_rate=1.0)
    second = world.generate(prompt)
    assert world.outputs[second] == (world.outputs[first] if policy == "recompute" else [])
    assert world.cache.counters.failed_loads == 1
    third = world.generate(random_prompt(random.Random(11), 100))
    assert len(world.outputs[third]) == 4


def test_an_error_while_ordering_a_load_is_told_to_vllm(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    prompt = random_prompt(random.Random(12), 300)
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


def test_turned_off_it_does_nothing(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_FLEXKV", "0")
    world = make_world()
    prompt = random_prompt(random.Random(13), 300)
    world.generate(prompt)
    world.forget()
    assert world.external_tokens[world.generate(prompt)] == 0
    assert world.side is None


@BOTH
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@SEEDS
def test_random_traffic_never_computes_on_a_wrong_byte(
    make_world: MakeWorld, entry: str, ranks: int, asynchronous: bool, seed: int
) -> None:
    """Shared prefixes, few engine blocks (preemptions), few slots (evictions), aborts, resets,
    late and failing copies, all at once."""
    rng = random.Random(seed)
    world = make_world(
        entry=entry,
        ranks=ranks,
        num_blocks=40,
        slots=(30, 100)[seed % 2],
        block_tokens=rng.choice([16, 32]),
        budget=96,
        lag=rng if asynchronous else None,
    )
    world.slow_down(rng, failure_rate=0.05)
    Traffic(world, rng, make_stems(rng, 4)).run(120, until=[preempted, loaded, refused])
    world.settle()
    world.assert_untracked()


def test_ranks_that_hold_the_same_head_store_a_part_each_and_load_all(
    make_world: MakeWorld,
) -> None:
    world = make_world(ranks=2 * HEADS)
    prompt = random_prompt(random.Random(21), 6 * BLOCK_TOKENS + 3)
    world.generate(prompt)
    world.settle()
    for rank in world.ranks:
        for pages in rank.pages.values():
            pages.fill_(0x55)
    world.forget()
    assert world.external_tokens[world.generate(prompt)] == 6 * BLOCK_TOKENS
    world.check_outputs()
    for rank in world.ranks:
        worker: Any = rank.side
        for pages in rank.pages.values():
            pages.fill_(0x55)
        slot = arena_of(worker).slot_view(0)
        slot[:] = bytes(len(slot))
        offset = arena_of(worker).shard_offset(0, rank.number)
        ticket = mover_of(worker).submit(Direction.STORE, [0], [offset])
        assert mover_of(worker).wait(ticket, PATIENCE_SECONDS) is Status.DONE
        assert bytes(slot).count(0x55) == BLOCK_TOKENS * LAYERS * HEAD_BYTES // 2
        slot.release()
