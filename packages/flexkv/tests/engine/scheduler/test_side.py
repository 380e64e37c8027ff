# SPDX-License-Identifier: Apache-2.0
"""`RequestSide` under a toy engine: no step computes on a wrong byte, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_engine import BLOCK, Shape
from toy_world import LateMemory, ToyWorld

from flexkv.engine.choice.chooser import LoadMode
from flexkv.types.mover import Direction

MakeWorld = Callable[..., ToyWorld]

MODES = [LoadMode.ASYNC, LoadMode.LAYERWISE]

REFUSED = {"load of blocks", "measuring copies", "store of blocks"}
"""The guards that see what a `LateMover` refuses. No other may see an error."""


SHAPES = {"a rank with blocks": Shape(), "two ranks with pages of a token": Shape(1, 2)}


@pytest.fixture(params=list(SHAPES))
def make_world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeWorld]:
    made: list[ToyWorld] = []

    def make(**options: Any) -> ToyWorld:
        made.append(ToyWorld(tmp_path, shape=SHAPES[request.param], **options))
        return made[-1]

    yield make
    for world in made:
        world.close()
        assert world.engine.boundary.failures.keys() <= REFUSED


def prompt_of(seed: int, blocks: int) -> list[int]:
    """A prompt of so many blocks and one token."""
    return random.Random(seed).choices(range(1000), k=blocks * BLOCK + 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_the_engine_has_forgotten_is_loaded(
    make_world: MakeWorld, mode: LoadMode
) -> None:
    world = make_world(mode=mode)
    prompt = prompt_of(1, 6)
    assert world.hits(prompt) == 0
    assert world.hits(prompt) == 6
    assert world.hits([*prompt[: 3 * BLOCK], 7, 7]) == 3


def test_blocks_of_an_answer_are_loaded_too(make_world: MakeWorld) -> None:
    world = make_world()
    request = world.generate(prompt_of(1, 2), max_tokens=2 * BLOCK)
    assert world.hits(request.tokens) == 4


def test_two_requests_with_one_prefix_store_it_once(make_world: MakeWorld) -> None:
    world = make_world()
    prompt = prompt_of(2, 5)
    for last in (1, 2):
        world.engine.add([*prompt[:-1], last], max_tokens=1)
    world.settle()
    assert world.engine.cache.counters.stored_blocks == 5
    world.forget()
    both = [world.engine.add([*prompt[:-1], last]) for last in (3, 4)]
    world.run()
    assert [each.loaded for each in both] == [5 * BLOCK] * 2


def test_what_host_memory_has_evicted_is_read_from_disk(make_world: MakeWorld) -> None:
    """The request waits for the disk, without blocks of the engine."""
    world = make_world(slots=16, disk_slots=64)
    prompts = [prompt_of(seed, 6) for seed in range(4)]
    for prompt in prompts:
        world.generate(prompt)
        world.settle()
    assert world.hits(prompts[0]) == 6
    assert world.engine.cache.counters.fetched_blocks >= 6


def test_without_a_disk_evicted_blocks_are_computed_again(make_world: MakeWorld) -> None:
    world = make_world(slots=8)
    prompts = [prompt_of(seed, 6) for seed in range(4)]
    for prompt in prompts:
        world.generate(prompt)
        world.settle()
    assert [world.hits(prompt) for prompt in prompts[::-1]] == [6, 2, 0, 0]


def test_blocks_on_disk_outlive_the_engine(make_world: MakeWorld) -> None:
    world = make_world(disk_slots=64)
    prompt = prompt_of(3, 6)
    world.generate(prompt)
    world.settle()
    world.restart()
    assert world.engine.cache.ready_blocks == 0
    assert world.hits(prompt) == 6


@pytest.mark.parametrize("mode", MODES)
def test_a_load_that_fails_is_computed(make_world: MakeWorld, mode: LoadMode) -> None:
    device = LateMemory(random.Random(1))
    world = make_world(mode=mode, device=device)
    prompt = prompt_of(4, 6)
    world.generate(prompt)
    world.forget()
    for mover in device.movers:
        mover.failing, mover.failure_rate = frozenset([Direction.LOAD]), 1.0
    request = world.generate(prompt)
    for mover in device.movers:
        mover.failure_rate = 0.0
    assert request.loaded == 6 * BLOCK
    assert world.engine.cache.counters.failed_loads == 1
    if mode is LoadMode.LAYERWISE:  # nothing of the request is stored again
        assert world.hits(prompt) == 0
    assert world.hits(prompt) == 6


def test_a_request_that_lost_its_blocks_goes_on(make_world: MakeWorld) -> None:
    world = make_world(blocks=20, device=LateMemory(random.Random(2)))
    requests = [world.engine.add(prompt_of(seed, 3), max_tokens=20) for seed in range(4)]
    world.run()
    preempted = [each for each in requests if each.preemptions]
    assert preempted
    assert sum(each.loaded for each in preempted) > 0


def test_a_reset_discards_all_blocks(make_world: MakeWorld) -> None:
    world = make_world(disk_slots=64)
    prompt = prompt_of(5, 6)
    world.generate(prompt)
    assert world.hits(prompt) == 6
    world.forget()
    assert world.engine.side.reset()
    assert world.hits(prompt) == 0
    assert world.hits(prompt) == 6


@pytest.mark.parametrize("sure", [True, False])
def test_after_a_change_of_weights_no_block_of_the_old_ones_is_found(
    make_world: MakeWorld, sure: bool
) -> None:
    world = make_world(disk_slots=64)
    prompt = prompt_of(6, 6)
    world.generate(prompt)
    world.settle()
    world.engine.pages.weights = b"new"
    world.engine.side.weights_changed(sure=sure)
    assert world.hits(prompt) == 0
    assert world.hits(prompt) == 6


def test_once_turned_off_the_engine_computes_all(make_world: MakeWorld) -> None:
    """What it waits for ends, by the last orders."""
    world = make_world(device=LateMemory(random.Random(3), polls=(3, 5)))
    prompt = prompt_of(7, 6)
    world.generate(prompt)
    world.forget()
    running = world.engine.add(prompt)
    world.engine.step()
    world.engine.side.turn_off()
    world.run()
    assert running.has_ended
    assert world.engine.side.is_off


@pytest.mark.parametrize("seed", range(8))
def test_no_wrong_byte_is_read_in_random_traffic(make_world: MakeWorld, seed: int) -> None:
    rng = random.Random(seed)
    device = LateMemory(rng, polls=(0, 12), failure_rate=rng.choice([0.0, 0.1]))
    world = make_world(
        blocks=20,
        slots=40,
        disk_slots=rng.choice([0, 200]),
        mode=rng.choice(MODES),
        device=device,
    )
    engine, stems = world.engine, [prompt_of(each, 9) for each in range(3)]
    for _ in range(80):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))] + rng.choices(range(9), k=rng.randrange(5))
        engine.add(prompt, max_tokens=rng.randint(1, 20))
        for _ in range(rng.randrange(9)):
            engine.step()
        match rng.randrange(8):
            case 0:
                unfinished = [each for each in engine.requests.values() if not each.has_ended]
                if unfinished:
                    engine.end(rng.choice(unfinished))
            case 1 if engine.running:
                engine.preempt(rng.choice(engine.running))
            case 2 if rng.random() < 0.3:
                assert engine.side.reset()
            case 3 if not (engine.loading or any(each.table for each in engine.waiting)):
                for request in list(engine.running):
                    engine.preempt(request)
                engine.pages.weights += b"."
                engine.side.weights_changed(sure=rng.random() < 0.5)
                engine.pool.found = {}
            case _:
                engine.pool.found = {}
    world.settle()
    assert engine.pages.checked > 0
    assert engine.cache.counters.loaded_blocks > 0
