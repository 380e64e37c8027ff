# SPDX-License-Identifier: Apache-2.0
"""A worker that unmaps its KV pages under vLLM's OffloadingConnector."""

from __future__ import annotations

import random

import pytest
from engine_world import World, random_prompt
from kv_pages import BLOCK_TOKENS
from offloading_release import HYBRID
from offloading_world import MakeOffloadingWorld
from sleeping_worker import begun, forget_pages_at_sleep, step_to_answer, worker

HIT = 6 * BLOCK_TOKENS


def hits(world: World, prompt: list[int]) -> int:
    """Tokens of `prompt` that FlexKV brings, with nothing in vLLM's own prefix cache."""
    world.forget()
    return world.external_tokens[world.generate(prompt)]


@pytest.fixture
def prompt() -> list[int]:
    return random_prompt(random.Random(1), HIT + 5)


@HYBRID
def test_a_sleep_under_offloading_connector(
    make_offloading_world: MakeOffloadingWorld,
    prompt: list[int],
    windows: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget_pages_at_sleep(monkeypatch)
    world = make_offloading_world(windows=windows)
    step_to_answer(world, prompt)
    world.step()  # vLLM submits stores of a step with the next one
    assert world.cache.status.under_way
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
