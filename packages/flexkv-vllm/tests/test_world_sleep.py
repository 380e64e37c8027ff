# SPDX-License-Identifier: Apache-2.0
"""A worker of vLLM that unmaps its KV pages: copies end before, and none begins until it has mapped
them again."""

from __future__ import annotations

import random

import pytest
from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from sleeping_worker import begun, forget_pages_at_sleep, step_to_answer, worker
from world_config import IN_TREE

from flexkv.types.mover import Direction

HIT = 6 * BLOCK_TOKENS


@pytest.fixture(autouse=True)
def _forget_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_pages_at_sleep(monkeypatch)


def hits(world: World, prompt: list[int]) -> int:
    """Tokens of `prompt` that FlexKV brings, with nothing in vLLM's own prefix cache."""
    world.forget()
    return world.external_tokens[world.generate(prompt)]


@pytest.fixture
def prompt() -> list[int]:
    return random_prompt(random.Random(1), HIT + 5)


@pytest.mark.parametrize("act", ["sleep", "discard"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_stores_under_way_end_before_the_pages_are_unmapped(
    make_world: MakeWorld, prompt: list[int], act: str, ranks: int
) -> None:
    world = make_world(ranks=ranks)
    step_to_answer(world, prompt)
    assert world.cache.status.under_way
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


def test_a_vllm_that_reports_its_sleep_is_not_changed(
    make_world: MakeWorld, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from 0.33 on: it calls the connector before it unmaps pages, and after it has mapped them
    again."""
    monkeypatch.setattr("flexkv_vllm.worker_calls.reports_sleep", lambda: True)
    sleep = worker.sleep
    world = make_world()
    assert worker.sleep is sleep
    step_to_answer(world, prompt)
    assert world.cache.status.under_way
    (rank,) = world.ranks
    rank.flexkv.unregister_kv_caches()
    sleep(world, 1)
    directions = begun(world.slow_down(random.Random(4), polls=(0, 0)), monkeypatch)
    world.run()
    other = random_prompt(random.Random(2), HIT + 5)
    world.generate(other)
    assert directions == []
    rank.flexkv.restore_kv_caches()
    assert hits(world, prompt) == HIT
    world.check_outputs()


def test_behind_vllms_own_connector_the_worker_is_followed_in_any_vllm(
    make_world: MakeWorld, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own connector does not pass on what vLLM reports to it of a sleep."""
    monkeypatch.setattr("flexkv_vllm.worker_calls.reports_sleep", lambda: True)
    world = make_world(entry=IN_TREE)
    step_to_answer(world, prompt)
    assert world.cache.status.under_way
    worker.sleep(world, 1)
    worker.wake_up(world)
    world.run()
    assert hits(world, prompt) == HIT
    world.check_outputs()
