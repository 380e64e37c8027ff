# SPDX-License-Identifier: Apache-2.0
"""Resets with copies under way, under vLLM's real scheduler: what was computed before is gone."""

from __future__ import annotations

import contextlib
import random

import pytest
from disk_world import Hang, fill, prompts
from engine_world import MakeWorld, World, random_prompt
from subscriber import Subscriber, drain, loadable
from traffic import Traffic, loaded, make_stems


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
    assert world.cache.transfers_under_way > 1
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
    drain(subscriber)
    # It began to compute after the reset.
    assert subscriber.told == loadable(world)
    assert len(subscriber.told["CPU"]) == 6
    assert world.side._fetches._early == world.side._fetches._waiting == {}
    assert world.side._fetches._awaited == {}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(2))
def test_new_weights_never_meet_old_bytes(
    make_world: MakeWorld, asynchronous: bool, seed: int
) -> None:
    """As when weights are exchanged in place: vLLM preempts what runs, and the reset reaches us
    with stores under way. The same tokens have other bytes from then on."""
    rng = random.Random(seed)
    world = make_world(
        events=True,
        ranks=1 + seed,
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
            world.finish_step()  # vLLM pauses its engine before weights change
        under_way = world.cache.transfers_under_way
        # vLLM refuses while a load or a held block is under way.
        with contextlib.suppress(RuntimeError):
            if world.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            ):
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
        abort_rate=0.0,
        reset_rate=0.0,
        disturb=change_weights,
    ).run(150, until=[enough, loaded])
    drain(subscriber)
    assert world.cache.counters.resets == resets
    assert subscriber.told == loadable(world)
