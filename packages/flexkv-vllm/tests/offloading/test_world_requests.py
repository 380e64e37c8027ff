# SPDX-License-Identifier: Apache-2.0
"""What users ask for single requests, under vLLM's own `OffloadingConnector`."""

from __future__ import annotations

import random

import pytest
from engine_world import BLOCK_TOKENS, random_prompt
from offloading_release import WINDOW
from offloading_world import MakeOffloadingWorld
from patience import wait_until

from packages.flexkv.tests.ages_clock import AgesClock
from packages.inside import index_of


@pytest.mark.parametrize("most", [0, 15, 16, 100, 10**9])
@pytest.mark.parametrize("name", ["flexkv.max_store_tokens", "max_offload_tokens"])
def test_no_more_is_stored_than_asked_for(
    make_offloading_world: MakeOffloadingWorld, name: str, most: int
) -> None:
    world = make_offloading_world()
    prompt = random_prompt(random.Random(11), 200)
    world.generate(prompt, max_tokens=40, params={name: most})
    world.forget()
    again = world.generate(prompt)
    assert world.external_tokens[again] == min(most, 192) // BLOCK_TOKENS * BLOCK_TOKENS
    world.check_outputs()


def test_no_block_of_a_window_is_stored_behind_the_limit(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world(windows=(WINDOW,))
    prompt = random_prompt(random.Random(11), 200)
    world.generate(prompt, params={"flexkv.max_store_tokens": 100})
    world.settle()
    assert 0 < world.cache.counters.stored_blocks <= 2 * (100 // BLOCK_TOKENS)


def test_what_would_need_the_salt_of_a_request_is_not_followed(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    """A tenant could end the pins of another."""
    world = make_offloading_world()
    params = {"flexkv.pin": True, "flexkv.retain_seconds": 300}
    world.generate(random_prompt(random.Random(12), 200), salt="a", params=params)
    assert world.cache.pinned_blocks == 0
    assert world.collected()["ignored_parameters"] > 0


def test_old_blocks_leave_an_idle_engine(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = AgesClock(monkeypatch)
    world = make_offloading_world(settings={"max_age_seconds": 60})
    world.generate(random_prompt(random.Random(11), 200))
    world.settle()
    assert len(index_of(world.cache)) > 0
    clock.pass_by(60)
    wait_until(lambda: len(index_of(world.cache)) == 0)
