# SPDX-License-Identifier: Apache-2.0
"""FlexKV's offloading spec under vLLM's real scheduler and `OffloadingConnector`; every byte that a
request computes on is checked."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_world import random_prompt
from kv_pages import BLOCK_TOKENS
from offloading_release import HYBRID, WINDOW
from offloading_world import MakeOffloadingWorld, OffloadingWorld
from patience import wait_until
from policy_checks import CheckedPolicy, UseOrderPolicy
from traffic import SEEDS, Traffic, loaded, make_stems, preempted, refused
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from flexkv.client import Reset
from flexkv.eviction import POLICIES, RequestContext
from flexkv.types.mover import Direction
from flexkv_vllm.offloading.manager import ArenaBlocks
from packages.inside import fail_resets, index_of
from packages.tier_blocks import ready_blocks


def hit_tokens(world: OffloadingWorld, prompt: list[int]) -> int:
    return world.external_tokens[world.generate(prompt)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_forgotten_prefix_comes_back(
    make_offloading_world: MakeOffloadingWorld, ranks: int, chunk: int
) -> None:
    world = make_offloading_world(ranks=ranks, chunk=chunk)
    prompt = random_prompt(random.Random(1), 300)
    first = world.generate(prompt)
    world.forget()
    second = world.generate(prompt)
    assert world.outputs[second] == world.outputs[first]
    assert world.external_tokens[first] == 0
    block = chunk * BLOCK_TOKENS
    assert world.external_tokens[second] == 300 // block * block
    world.check_outputs()


@pytest.mark.parametrize("local", [False, True], ids=["loaded", "vLLM has it"])
def test_a_scheduled_request_hits_each_block_once(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    policy = CheckedPolicy(UseOrderPolicy())
    for name in POLICIES:
        monkeypatch.setitem(POLICIES, name, lambda slots: policy)
    world = make_offloading_world()
    touch_often(world)
    rng = random.Random(31)
    stem = random_prompt(rng, 4 * BLOCK_TOKENS)
    world.generate(stem + random_prompt(rng, 5))
    world.settle()
    stored = set(policy.hits)
    if not local:
        world.forget()
    own = BLOCK_TOKENS + 5
    request_id = world.generate(stem + random_prompt(rng, own), max_tokens=2 * BLOCK_TOKENS)
    world.settle()
    # vLLM shows whole blocks only.
    hit = RequestContext(5 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, request_id, stores=True)
    prompt, context = policy.prompts[-1]
    assert (set(prompt[:4]), len(prompt), context) == (stored, 5, hit)
    assert policy.answers[request_id] == 2 * BLOCK_TOKENS
    assert len(stored) == 4
    assert {key: policy.hits[key] for key in stored} == {key: [hit] for key in stored}


def touch_often(world: OffloadingWorld) -> None:
    """As vLLM 0.26 to 0.30: its connector touches a request's blocks at each lookup and each store,
    and so before the request runs, too. Later ones touch none."""
    manager = world.manager
    lookup, prepare_store = manager.lookup, manager.prepare_store

    def touch_and_lookup(key: Any, context: Any) -> Any:
        manager.touch([key], context)
        return lookup(key, context)

    def touch_and_store(keys: Any, context: Any) -> Any:
        manager.touch(keys, context)
        return prepare_store(keys, context)

    manager.lookup, manager.prepare_store = touch_and_lookup, touch_and_store


def test_auto_sees_the_requests_of_one_group(
    make_offloading_world: MakeOffloadingWorld, made_policies: list[str]
) -> None:
    make_offloading_world(settings={"eviction_policy": "auto"})
    assert made_policies == ["hazard"]


def test_auto_needs_the_prompts_of_all_groups(
    make_offloading_world: MakeOffloadingWorld, made_policies: list[str]
) -> None:
    make_offloading_world(windows=(WINDOW,), settings={"eviction_policy": "auto"})
    assert made_policies == ["lru"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_of_a_hybrid_model_come_back(
    make_offloading_world: MakeOffloadingWorld, ranks: int
) -> None:
    """The full layer as a whole, of the sliding one as much as its window needs."""
    world = make_offloading_world(ranks=ranks, windows=(WINDOW,))
    prompt = random_prompt(random.Random(2), 300)
    world.generate(prompt)
    blocks = 300 // BLOCK_TOKENS
    world.settle()
    assert blocks < world.cache.counters.stored_blocks < 2 * blocks
    world.forget()
    assert hit_tokens(world, prompt) == blocks * BLOCK_TOKENS
    assert world.cache.counters.loaded_blocks == blocks + -(-(WINDOW - 1) // BLOCK_TOKENS)
    world.check_outputs()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 49, 96, 129, 300])
@pytest.mark.parametrize("chunk", [1, 3])
def test_partial_hits_of_every_length_class(
    make_offloading_world: MakeOffloadingWorld, length: int, chunk: int
) -> None:
    world = make_offloading_world(chunk=chunk)
    rng = random.Random(length)
    prompt = random_prompt(rng, 300)
    world.generate(prompt)
    world.forget()
    block = chunk * BLOCK_TOKENS
    assert hit_tokens(world, prompt[:length] + random_prompt(rng, 100)) == length // block * block


def test_a_load_may_begin_inside_a_block(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world(chunk=4)
    prompt = random_prompt(random.Random(3), 256)
    world.generate(prompt)
    world.forget()
    world.generate(prompt[:40], max_tokens=1)
    assert hit_tokens(world, prompt) == 256 - 32


@pytest.mark.parametrize(
    ("length", "windows"),
    [(300, ()), (301, ()), (300, (WINDOW,))],
)
def test_what_was_never_computed_is_not_kept(
    make_offloading_world: MakeOffloadingWorld, length: int, windows: tuple[int, ...]
) -> None:
    """The engine does not compute on the last token of an answer. Of 304 tokens it would fill a
    block."""
    world = make_offloading_world(windows=windows)
    rng = random.Random(4)
    prompt = random_prompt(rng, length)
    prompt += world.outputs[world.generate(prompt)]
    world.forget()
    assert hit_tokens(world, prompt + random_prompt(rng, 100)) == (len(prompt) - 1) // 16 * 16
    world.check_outputs()


def test_salts_share_nothing(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world()
    prompt = random_prompt(random.Random(5), 200)
    world.generate(prompt, salt="one")
    world.forget()
    assert world.external_tokens[world.generate(prompt, salt="two")] == 0
    world.forget()
    assert world.external_tokens[world.generate(prompt, salt="one")] == 192


def test_requests_may_only_what_the_settings_allow(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world(settings={"request_options": "load"})
    world.generate(random_prompt(random.Random(6), 200), params={"flexkv.store": False})
    world.settle()
    assert world.cache.ready_blocks == 200 // BLOCK_TOKENS


def test_options_of_requests(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world()
    prompt = random_prompt(random.Random(6), 200)
    world.generate(prompt, params={"flexkv.store": False})
    world.settle()
    assert world.cache.ready_blocks == 0
    world.forget()
    world.generate(prompt)
    world.forget()
    unwilling = world.generate(prompt, params={"flexkv.load": False})
    assert world.external_tokens[unwilling] == 0
    world.forget()
    elsewhere = world.generate(prompt, params={"kv_load_tiers": [{"medium": "storage"}]})
    assert world.external_tokens[elsewhere] == 0
    world.forget()
    assert hit_tokens(world, prompt) == 192


def test_a_tiny_arena_keeps_the_beginning_of_a_prefix(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world(slots=4)
    prompt = random_prompt(random.Random(7), 300)
    world.generate(prompt)
    world.settle()
    assert world.cache.counters.refused_blocks > 0
    world.forget()
    assert hit_tokens(world, prompt) == 4 * BLOCK_TOKENS


def test_abort_during_a_load_gives_everything_back(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world(num_blocks=32)
    world.slow_down(random.Random(8))
    prompt = random_prompt(random.Random(8), 300)
    world.generate(prompt)
    for _ in range(10):
        world.forget()
        request_id = world.add(prompt)
        world.step()
        world.abort(request_id)
        world.run()
        world.settle()
    # Every engine block is free again: a request that needs nearly all of them runs.
    world.generate(random_prompt(random.Random(9), 31 * BLOCK_TOKENS - 8))
    world.assert_untracked()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_of_an_aborted_request_is_kept_what_was_computed(
    make_offloading_world: MakeOffloadingWorld, steps: int
) -> None:
    budget = 8 * BLOCK_TOKENS
    world = make_offloading_world(budget=budget)
    prompt = random_prompt(random.Random(16), 300)
    request_id = world.add(prompt)
    for _ in range(steps):
        world.step()
    world.abort(request_id)
    world.generate(random_prompt(random.Random(17), 10))
    world.forget()
    assert hit_tokens(world, prompt) == steps * budget
    world.check_outputs()
    world.assert_untracked()


@HYBRID
def test_a_load_that_fails_is_tried_again(
    make_offloading_world: MakeOffloadingWorld,
    monkeypatch: pytest.MonkeyPatch,
    windows: tuple[int, ...],
) -> None:
    world = make_offloading_world(windows=windows, ranks=2)
    prompt = random_prompt(random.Random(10), 300)
    first = world.generate(prompt)
    world.forget()
    mover = world.slow_down(random.Random(10))[-1]
    submit, mover.failure_rate = mover.submit, 1.0

    def fail_twice(*args: Any, **options: Any) -> int:
        if mover.refused == 2:
            mover.failure_rate = 0.0
        return submit(*args, **options)

    monkeypatch.setattr(mover, "submit", fail_twice)
    second = world.generate(prompt)
    assert mover.refused == 2
    assert world.outputs[second] == world.outputs[first]
    assert world.external_tokens[second] == 300 // BLOCK_TOKENS * BLOCK_TOKENS
    world.check_outputs()


@pytest.mark.parametrize("expedited", [False, True])
def test_a_load_that_fails_for_good_is_reported_as_such(
    make_offloading_world: MakeOffloadingWorld, *, expedited: bool
) -> None:
    """vLLM then ends: its connector knows no other answer. It computes on an expedited load before
    it asks how the load has ended."""
    world = make_offloading_world()
    world.generate(random_prompt(random.Random(10), 20))
    world.settle()
    mover = world.slow_down(random.Random(10))[-1]
    mover.failure_rate = 1.0
    transfer = world.cache.load(list(ready_blocks(index_of(world.cache))))
    pages = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
    worker = world.ranks[0].worker
    worker.submit_load(9, ArenaBlocks(transfer.cell, transfer.slots), pages, expedited=expedited)
    worker.submit_load(10, ArenaBlocks(), pages)
    ended: dict[int, bool] = {}
    wait_until(
        lambda: len(ended) == 2,
        lambda: ended.update({each.job_id: each.success for each in worker.get_finished()}),
    )
    assert ended == {9: False, 10: False}
    assert mover.refused == (1 if expedited else 3)


def test_a_load_that_fails_is_not_tried_again_while_pages_are_unmapped(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world()
    world.generate(random_prompt(random.Random(10), 20))
    world.settle()
    mover = world.slow_down(random.Random(10))[-1]
    mover.failure_rate = 1.0
    transfer = world.cache.load(list(ready_blocks(index_of(world.cache))))
    pages = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
    worker = world.ranks[0].worker
    worker.submit_load(9, ArenaBlocks(transfer.cell, transfer.slots), pages)
    worker.unregister_kv_caches()
    assert [worker.get_finished() for _ in range(3)] == [[]] * 3
    assert mover.refused == 1
    mover.failure_rate = 0.0
    worker.restore_kv_caches()
    ended: list[bool] = []
    wait_until(
        lambda: bool(ended), lambda: ended.extend(each.success for each in worker.get_finished())
    )
    assert ended == [True]


def test_a_failed_store_is_a_miss(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world()
    movers = world.slow_down(random.Random(12), failure_rate=1.0)
    prompt = random_prompt(random.Random(12), 300)
    world.generate(prompt)
    world.settle()
    assert movers[0].refused == world.cache.counters.failed_stores > 0
    assert world.cache.ready_blocks == 0
    world.forget()
    assert hit_tokens(world, prompt) == 0


def test_errors_of_the_cache_stop_nothing(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_offloading_world()
    prompt = random_prompt(random.Random(13), 300)
    first = world.generate(prompt)

    def broken(*_: object) -> None:
        raise RuntimeError("broken by the test")

    for name in ("presence", "store", "clear"):
        world.forget()
        with monkeypatch.context() as patch:
            if name == "clear":
                fail_resets(patch, world.cache, Reset.CLEAR, RuntimeError("broken by the test"))
            else:
                patch.setattr(type(world.cache), name, broken)
            world.add(prompt)
            for _ in range(5):
                world.step()
            assert world.connector.reset_cache()
        world.run()
    assert len(world.outputs) == 4
    assert all(tokens == world.outputs[first] for tokens in world.outputs.values())


@HYBRID
def test_what_is_under_way_at_a_reset_is_not_kept(
    make_offloading_world: MakeOffloadingWorld, windows: tuple[int, ...]
) -> None:
    """Nor what requests that go on compute on top of it: a reset tells of other weights."""
    world = make_offloading_world(ranks=2, windows=windows)
    rng = random.Random(14)
    world.slow_down(rng, polls=(5, 9))
    prompt = random_prompt(rng, 200)
    world.generate(prompt)
    world.forget()
    world.add(prompt, max_tokens=60)  # loads
    world.add(random_prompt(rng, 200), max_tokens=60)  # stores
    for _ in range(3):
        world.step()
    assert len(world.cache.status.under_way) > 1
    assert world.connector.reset_cache()
    world.run()
    world.settle()
    assert world.cache.ready_blocks == 0
    world.check_outputs()
    world.forget()
    assert hit_tokens(world, prompt) == 0
    world.forget()
    assert hit_tokens(world, prompt) == 192


def test_a_request_that_ends_after_a_reset_leaves_nothing(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    """vLLM then offers all of its blocks again; 0.26 once it has said that the request ended."""
    world = make_offloading_world()
    request_id = world.add(random_prompt(random.Random(19), 200), max_tokens=60)
    for _ in range(5):
        world.step()
    assert world.connector.reset_cache()
    world.abort(request_id)
    world.generate(random_prompt(random.Random(20), 10))
    world.settle()
    assert world.cache.ready_blocks == 0
    world.assert_untracked()


def test_turned_off_it_does_nothing(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_FLEXKV", "0")
    world = make_offloading_world()
    prompt = random_prompt(random.Random(15), 300)
    world.generate(prompt)
    world.forget()
    assert hit_tokens(world, prompt) == 0


@HYBRID
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@SEEDS
def test_random_traffic_never_computes_on_a_wrong_byte(
    make_offloading_world: MakeOffloadingWorld,
    ranks: int,
    asynchronous: bool,
    seed: int,
    windows: tuple[int, ...],
) -> None:
    """Shared prefixes, few engine blocks (preemptions), few slots (evictions), aborts, resets,
    late copies and failing stores, all at once."""
    rng = random.Random(seed)
    world = make_offloading_world(
        ranks=ranks,
        num_blocks=44 if windows else 30,
        slots=(30, 100)[seed % 2],
        chunk=1 if windows else rng.choice([1, 2]),
        windows=windows,
        budget=96,
        lag=rng if asynchronous else None,
    )
    for mover in world.slow_down(rng, failure_rate=0.05):
        mover.failing = frozenset({Direction.STORE})
    # vLLM's connector asserts that no request that begins anew has just been loaded.
    traffic = Traffic(world, rng, make_stems(rng, 4), restart_rate=0.0)
    traffic.run(60, until=[preempted, loaded, refused])
    world.settle()
    world.assert_untracked()
