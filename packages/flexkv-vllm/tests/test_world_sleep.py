# SPDX-License-Identifier: Apache-2.0
"""A worker of vLLM that unmaps its KV pages: copies end before, and none begins until it has mapped
them again."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from offloading_world import HYBRID, MakeOffloadingWorld
from vllm.v1.worker.gpu_worker import Worker

from flexkv.types.mover import Direction
from packages.late_mover import LateMover

HIT = 6 * BLOCK_TOKENS


worker: Any = Worker
"""vLLM's class, which FlexKV makes call it. A world stands for the worker that a method is called
on."""


@pytest.fixture(autouse=True)
def _forget_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose pages hold other bytes after a sleep. FlexKV replaces its methods when a world
    starts."""

    def sleep(self: World, level: int = 1) -> None:
        for rank in self.ranks:
            for tensor in rank.pages.values():
                tensor.fill_(0)

    def discard(self: World, tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            sleep(self)

    monkeypatch.setattr(Worker, "sleep", sleep)
    monkeypatch.setattr(Worker, "wake_up", lambda self, tags=None: None)
    monkeypatch.setattr(Worker, "discard", discard, raising=False)


def hits(world: World, prompt: list[int]) -> int:
    """Tokens of `prompt` that FlexKV brings, with nothing in vLLM's own prefix cache."""
    world.forget()
    return world.external_tokens[world.generate(prompt)]


@pytest.fixture
def prompt() -> list[int]:
    return random_prompt(random.Random(1), HIT + 5)


def step_to_answer(world: World, prompt: list[int]) -> None:
    """Compute a request to its last token, and leave its stores under way."""
    world.slow_down(random.Random(4), polls=(50, 50))
    request_id = world.add(prompt)
    while not world.requests[request_id].is_finished():
        world.step()


def begun(late: list[LateMover], monkeypatch: pytest.MonkeyPatch) -> list[Direction]:
    """The directions of the copies that begin from now on."""
    directions: list[Direction] = []
    for mover in late:
        submit = mover.submit

        def record(direction: Direction, *args: Any, submit: Any = submit, **kwargs: Any) -> int:
            directions.append(direction)
            ticket: int = submit(direction, *args, **kwargs)
            return ticket

        monkeypatch.setattr(mover, "submit", record)
    return directions


@pytest.mark.parametrize("act", ["sleep", "discard"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_stores_under_way_end_before_the_pages_are_unmapped(
    make_world: MakeWorld, prompt: list[int], act: str, ranks: int
) -> None:
    world = make_world(ranks=ranks)
    step_to_answer(world, prompt)
    assert world.cache.under_way
    if act == "sleep":
        worker.sleep(world, 1)
    else:
        worker.discard(world, ("kv_cache",))
    worker.wake_up(world)
    world.run()
    assert hits(world, prompt) == HIT
    world.check_outputs()


def test_no_copy_begins_until_the_pages_are_mapped_again(
    make_world: MakeWorld, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(settings={"always_load": True})
    world.generate(prompt)
    world.forget()
    directions = begun(world.slow_down(random.Random(4), polls=(0, 0)), monkeypatch)
    worker.sleep(world, 2)
    worker.wake_up(world, ["weights"])
    other = random_prompt(random.Random(2), HIT + 5)
    world.generate(prompt)  # its load fails, and vLLM computes it
    world.generate(other)
    assert directions == []
    world.check_outputs()
    worker.wake_up(world, ["kv_cache"])
    assert hits(world, other) == 0
    assert hits(world, other) == HIT
    assert set(directions) == set(Direction)
    world.check_outputs()


def test_memory_that_holds_no_pages_is_given_back_at_any_time(
    make_world: MakeWorld, prompt: list[int]
) -> None:
    world = make_world()
    worker.discard(world, ("weights",))
    world.generate(prompt)
    assert hits(world, prompt) == HIT


@HYBRID
def test_a_sleep_under_offloading_connector(
    make_offloading_world: MakeOffloadingWorld,
    prompt: list[int],
    windows: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_offloading_world(windows=windows)
    step_to_answer(world, prompt)
    world.step()  # vLLM submits stores of a step with the next one
    assert world.cache.under_way
    worker.sleep(world, 1)
    directions = begun(world.late_movers, monkeypatch)
    world.run()
    other = random_prompt(random.Random(2), HIT + 5)
    world.generate(other)
    assert directions == []
    worker.wake_up(world)
    assert hits(world, prompt) == HIT
    assert hits(world, other) == 0
    world.check_outputs()
