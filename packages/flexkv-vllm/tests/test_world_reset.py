# SPDX-License-Identifier: Apache-2.0
"""Resets with copies under way, under vLLM's real scheduler: what was computed before is gone."""

from __future__ import annotations

import random

import pytest
from disk_world import Hang, fill, prompts
from engine_world import MakeWorld, World, random_prompt
from injection import InjectedError
from kv_pages import BLOCK_TOKENS
from patience import wait_until
from subscriber import Subscriber, drain, loadable
from traffic import SEEDS, Traffic, loaded, make_stems

from flexkv.client import Reset
from flexkv.types.mover import Direction
from flexkv_vllm.compat.core import binds_pool
from packages.inside import fail_resets
from packages.inside_adapters import stores_under_way

NOT_BEFORE_SOMEBODY_WAITS = (10**9, 10**9)
"""Polls of a late mover."""


def test_nothing_that_is_under_way_is_kept(make_world: MakeWorld) -> None:
    """Stores and loads of before the reset end after it, into nothing; so do later stores of
    requests that go on with what they computed before."""
    world = make_world(events=True, ranks=2)
    subscriber = Subscriber(world)
    rng = random.Random(1)
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
    drain(subscriber)
    assert world.cache.ready_blocks == 0
    assert subscriber.told["CPU"] == set()
    world.check_outputs()
    # Requests that begin now are kept as ever.
    world.forget()
    again = world.generate(prompt)
    assert world.external_tokens[again] == 0
    world.forget()
    assert world.external_tokens[world.generate(prompt)] == 192
    assert world.stats


def test_after_a_reset_that_failed_nothing_is_loaded_or_stored_until_one_succeeds(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    prompt = random_prompt(random.Random(3), 100)
    world.generate(prompt)
    world.forget()

    stored = world.cache.counters.stored_blocks
    with monkeypatch.context() as patch:
        fail_resets(patch, world.cache, Reset.CLEAR, InjectedError())
        assert not world.connector.reset_cache()
    world.weights = b"new"
    for _ in range(2):
        assert world.external_tokens[world.generate(prompt)] == 0
        world.forget()
    world.check_outputs()
    assert world.cache.counters.stored_blocks == stored

    assert world.connector.reset_cache()
    world.generate(prompt)
    world.forget()
    assert world.external_tokens[world.generate(prompt)] == 96


def test_a_reset_while_the_disk_reads(make_world: MakeWorld) -> None:
    world = make_world(events=True, slots=14, disk_slots=100)
    subscriber = Subscriber(world)
    texts = prompts(2, 4)
    fill(world, texts)
    hang = Hang(world)
    waiting = world.add(texts[0])
    world.step()
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    hang.end()
    world.run()
    assert world.external_tokens[waiting] == 0
    # It began to compute after the reset. The disk tells of blocks once it has read what it keeps
    # of earlier ones.
    wait_until(lambda: subscriber.told == loadable(world), lambda: drain(subscriber))
    assert len(subscriber.told["CPU"]) == 6


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@SEEDS
def test_new_weights_never_meet_old_bytes(
    make_world: MakeWorld, asynchronous: bool, seed: int
) -> None:
    """As when weights are exchanged in place: vLLM preempts what runs, and the reset reaches us
    with stores under way. The same tokens have other bytes from then on."""
    rng = random.Random(seed)
    world = make_world(
        events=True,
        ranks=1 + seed % 2,
        num_blocks=40,
        slots=30,
        disk_slots=60,
        budget=96,
        lag=rng if asynchronous else None,
    )
    subscriber = Subscriber(world)
    world.slow_down(rng)
    resets = stores_under_way = 0

    def change_weights() -> None:
        nonlocal resets, stores_under_way
        if rng.random() >= 0.3:
            return
        while world.steps:
            world.finish_step()
        under_way = len(world.cache.status.under_way)
        if world.restart(reset_connector=True):
            resets += 1
            stores_under_way += under_way
            world.weights = bytes([resets % 256, resets // 256])

    def enough(_: World) -> bool:
        return resets > 5 and stores_under_way > 0

    Traffic(
        world,
        rng,
        make_stems(rng, 4),
        most_steps=4,
        abort_rate=0.1,
        reset_rate=0.0,
        restart_rate=0.0,
        disturb=change_weights,
    ).run(150, until=[enough, loaded])
    drain(subscriber)
    assert world.cache.counters.resets == resets
    assert subscriber.told == loadable(world)


@pytest.mark.parametrize("windows", [(), (40,)], ids=["full", "hybrid"])
@pytest.mark.parametrize("way", ["abort", "restart", "restart, abort", "abort, restart"])
def test_a_store_is_done_before_its_blocks_are_written_to(
    make_world: MakeWorld, windows: tuple[int, ...], way: str
) -> None:
    """However vLLM takes the blocks of a request, and in whatever order."""
    world = make_world(num_blocks=60, budget=512, windows=windows)
    rng = random.Random(1)
    (late,) = world.slow_down(rng, polls=NOT_BEFORE_SOMEBODY_WAITS)
    prompt = random_prompt(rng, 300)
    request_id = world.add(prompt, max_tokens=30)
    other = world.add(random_prompt(rng, 20), max_tokens=1)
    world.step()
    (store, *_) = stores_under_way(world.side).values()
    assert {run.request.request_id for run in store.runs} >= {request_id}
    for act in way.split(", "):
        if act == "abort":
            world.abort(request_id)
        else:
            assert world.restart(reset_connector=False)
    # Takes nearly all blocks.
    world.add(random_prompt(rng, 25 * BLOCK_TOKENS), max_tokens=1)
    wait_until(lambda: other not in world.scheduler.requests, world.step)
    for _ in range(3):
        world.step()
    world.run()
    world.forget()
    late.polls = (0, 0)
    again = world.generate(prompt)
    world.check_outputs()
    assert world.external_tokens[again] == 18 * BLOCK_TOKENS


@pytest.mark.parametrize("windows", [(), (40,)], ids=["full", "hybrid"])
def test_a_reset_beside_the_last_store_of_an_ended_request(
    make_world: MakeWorld, windows: tuple[int, ...]
) -> None:
    """As when an engine is paused: vLLM refuses to reset while a block is held."""
    world = make_world(num_blocks=128, windows=windows)
    rng = random.Random(2)
    (late,) = world.slow_down(rng, polls=NOT_BEFORE_SOMEBODY_WAITS)
    prompt = random_prompt(rng, 100)
    ended = world.add(prompt, max_tokens=3)
    world.add(random_prompt(rng, 100), max_tokens=50)
    wait_until(lambda: ended not in world.scheduler.requests, world.step)
    assert world.cache.status.under_way
    assert world.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert world.cache.counters.resets == 1
    late.polls = (0, 0)
    world.run()
    world.forget()
    assert world.external_tokens[world.generate(prompt)] == 0
    world.check_outputs()


@pytest.mark.skipif(not binds_pool(), reason="layer by layer from vLLM 0.22 on")
def test_a_refused_load_of_a_request_that_begins_anew(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step vLLM preempts the request, begins it anew, and is told that its load failed."""
    world = make_world(settings={"load_mode": "layerwise"}, budget=512, num_blocks=128, slots=128)
    rng = random.Random(3)
    stem, tail = random_prompt(rng, 160), random_prompt(rng, 160)
    world.generate(stem)
    world.forget()
    (late,) = world.slow_down(rng, polls=(0, 0))
    late.failing, late.failure_rate = frozenset({Direction.STORE}), 1.0
    world.add(stem + tail, max_tokens=30)
    world.step()
    late.failure_rate = 0.0
    assert world.restart(reset_connector=False)
    with monkeypatch.context() as patch:
        patch.setattr(world.cache, "load", lambda keys: None)
        world.step()
    world.run()
    world.forget()
    again = world.generate(stem + tail + random_prompt(rng, 5))
    world.check_outputs()
    assert world.external_tokens[again] == 160


def test_what_a_request_computes_after_it_began_anew_is_stored(make_world: MakeWorld) -> None:
    """vLLM tells in one step that it has preempted the request and that it has begun it anew."""
    world = make_world(num_blocks=128)
    prompt = random_prompt(random.Random(4), 2 * BLOCK_TOKENS + 5)
    request = world.add(prompt, max_tokens=60)
    world.step()
    assert world.restart(reset_connector=False)
    world.run()
    world.forget()
    text = prompt + world.outputs[request]
    assert (
        world.external_tokens[world.generate(text)]
        == (len(text) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    )
    world.check_outputs()
