# SPDX-License-Identifier: Apache-2.0
"""Pauses and sleeps of vLLM's own engine core over its real scheduler: blocks stay as long as
nobody can have changed the weights, and go at the first sign of it."""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from engine_core import core_of, pause, sleep_and_wake
from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from offloading_world import MakeOffloadingWorld
from vllm.v1.engine.core import EngineCore

from flexkv.types.mover import Direction
from packages.inside import copies_of

resets_caches = getattr(EngineCore, "_reset_caches", None)
pytestmark = pytest.mark.skipif(
    resets_caches is None or "reset_connector" not in inspect.signature(resets_caches).parameters,
    reason="this vLLM resets no connector when it pauses",
)

HIT = 6 * BLOCK_TOKENS


def hits(world: World, prompt: list[int]) -> int:
    """Tokens of `prompt` that FlexKV brings, with nothing in vLLM's own prefix cache."""
    world.forget()
    return world.external_tokens[world.generate(prompt)]


@pytest.fixture
def prompt() -> list[int]:
    return random_prompt(random.Random(1), HIT + 5)


def pause_and_resume(core: Any) -> None:
    pause(core, core.pause_scheduler, "abort", True)
    core.resume_scheduler()


def give_memory_back(core: Any) -> None:
    pause(core, core.sleep, 0)
    core.release_kv_cache_memory()
    core.wake_up(["kv_cache"])


PAUSES = pytest.mark.parametrize("act", [sleep_and_wake, pause_and_resume, give_memory_back])


@PAUSES
def test_a_pause_keeps_the_blocks_of_memory_and_disk(
    make_world: MakeWorld,
    prompt: list[int],
    act: Callable[[Any], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = make_world(slots=14, disk_slots=100, settings={"always_load": True})
    texts = [prompt, *(random_prompt(random.Random(seed), HIT + 5) for seed in range(2, 5))]
    for text in texts:
        world.generate(text)
    world.settle()
    with caplog.at_level(logging.INFO, "flexkv.vllm"):
        act(core_of(world))
    assert "keeps its blocks" in caplog.text
    assert [hits(world, text) for text in reversed(texts)] == [HIT] * len(texts)
    assert (world.cache.counters.resets, world.cache.counters.pauses) == (0, 1)
    world.check_outputs()


def test_a_reset_of_a_user_discards_the_blocks(make_world: MakeWorld, prompt: list[int]) -> None:
    world = make_world(disk_slots=100)
    world.generate(prompt)
    assert core_of(world).reset_prefix_cache(reset_connector=True)
    assert hits(world, prompt) == 0
    assert world.cache.counters.request_resets == 1


def woken_for_weights(core: Any) -> None:
    pause(core, core.sleep, 1)
    core.wake_up(["weights"])
    core.model_executor.effect()  # as trainers do in the process of vLLM
    core.wake_up(["kv_cache"])


def called_in_a_pause(core: Any) -> None:
    pause(core, core.pause_scheduler, "abort", True)
    core.collective_rpc("sync_policy")
    core.resume_scheduler()


def called_asleep(core: Any) -> None:
    pause(core, core.sleep, 1)
    core.collective_rpc("sync_policy")
    core.wake_up()


def prepared(core: Any) -> None:
    core.collective_rpc("init_weight_transfer_engine", None, ({},))
    pause(core, core.pause_scheduler, "abort", True)
    core.model_executor.effect()
    core.resume_scheduler()


def without_weights(core: Any) -> None:
    pause(core, core.sleep, 2)
    core.model_executor.effect()
    core.wake_up()


def another_version(core: Any) -> None:
    pause(core, core.pause_scheduler, "abort", True)
    core.model_executor.effect()
    core.set_weight_version("2")
    core.resume_scheduler()


@pytest.mark.parametrize(
    "act",
    [
        woken_for_weights,
        called_in_a_pause,
        called_asleep,
        prepared,
        without_weights,
        pytest.param(
            another_version,
            marks=pytest.mark.skipif(
                not hasattr(EngineCore, "set_weight_version"), reason="vLLM numbers no weights"
            ),
        ),
    ],
)
def test_a_pause_for_other_weights_keeps_nothing(
    make_world: MakeWorld, prompt: list[int], act: Callable[[Any], None]
) -> None:
    world = make_world(disk_slots=100)
    world.generate(prompt)
    world.settle()
    core = core_of(world)
    prepares = act is prepared

    def exchange() -> None:
        nonlocal prepares
        world.weights = world.weights if prepares else b"new"
        prepares = False

    core.model_executor.effect = exchange
    act(core)
    assert world.weights == b"new"
    assert hits(world, prompt) == 0
    world.check_outputs()


@pytest.mark.parametrize("earlier", ["update_weights", "probe"])
def test_later_pauses_of_an_engine_with_a_trainer_keep_nothing(
    make_world: MakeWorld, prompt: list[int], earlier: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may write to the model by what it got then, such as the addresses of its tensors."""
    world = make_world()
    core = core_of(world)
    core.collective_rpc(earlier)
    world.generate(prompt)
    with caplog.at_level(logging.INFO, "flexkv.vllm"):
        sleep_and_wake(core)
    assert f"without a sign: the workers of vLLM ran {earlier}" in caplog.text
    assert hits(world, prompt) == 0
    assert world.cache.counters.doubt_resets == 1


def test_calls_that_change_no_weights_are_no_sign(make_world: MakeWorld, prompt: list[int]) -> None:
    world = make_world()
    core = core_of(world)
    core.collective_rpc("compute_weight_checksums")
    world.generate(prompt)
    pause(core, core.sleep, 1)
    core.collective_rpc("compute_weight_checksums")
    core.wake_up()
    assert hits(world, prompt) == HIT


def test_an_engine_in_the_process_of_its_user_keeps_nothing(
    make_world: MakeWorld, prompt: list[int]
) -> None:
    """The user can write to its model without a call that FlexKV sees."""
    world = make_world()
    world.generate(prompt)
    world.settle()
    core = core_of(world, EngineCore)
    core.sleep(1)
    core.wake_up()
    world.weights = b"new"
    assert hits(world, prompt) == 0
    world.check_outputs()


def test_a_store_whose_pages_may_be_gone_is_not_kept(
    make_world: MakeWorld, prompt: list[int]
) -> None:
    """A sleep frees the pages. Copies that have not begun would read what lies there later."""
    world = make_world()
    earlier = random_prompt(random.Random(3), HIT + 5)
    world.generate(earlier)
    world.settle()
    world.slow_down(random.Random(4), polls=(50, 50))
    world.add(prompt, max_tokens=60)
    while not world.cache.status.under_way:
        world.step()
    copies = [each.transfer for each in copies_of(world.cache)]
    storing = [key for each in copies if each.direction is Direction.STORE for key in each.keys]
    core_of(world)._reset_caches()
    world.settle()
    assert storing
    assert [key for key in storing if world.cache.lookup((key,))] == []
    world.run()
    assert hits(world, earlier) == HIT
    world.check_outputs()


def test_a_pause_under_offloading_connector(
    make_offloading_world: MakeOffloadingWorld, prompt: list[int]
) -> None:
    world = make_offloading_world()
    world.generate(prompt)
    world.settle()
    core = core_of(world)
    sleep_and_wake(core)
    assert hits(world, prompt) == HIT
    core.collective_rpc("update_weights")
    assert hits(world, prompt) == 0
    sleep_and_wake(core)
    assert hits(world, prompt) == 0
    world.check_outputs()
