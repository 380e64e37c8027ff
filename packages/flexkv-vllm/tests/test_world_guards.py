# SPDX-License-Identifier: Apache-2.0
"""Where an unexpected error ends instead of ending the engine, nothing is wrong afterwards: every
guard in the code is hit, before each of its statements, under vLLM's real scheduler. A guard that
nothing here reaches fails its test."""

from __future__ import annotations

import contextlib
import math
import random
from typing import Any

import pytest
from asked_engine import call_engine
from disk_world import delay_reads, fill, prompts, read_a_block_a_step
from engine_world import MakeWorld, World, random_prompt
from injection import SOURCES, Guarded, InjectedError, all_guarded, hit_all
from kv_pages import BLOCK_TOKENS
from late_device import STREAM, DeviceWorld
from vllm.v1.core.sched.output import SchedulerOutput

from flexkv.engine.boundary import LASTING
from flexkv.engine.scheduler.fetches import Fetches
from flexkv.engine.scheduler.scheduled_step import ScheduledStep
from flexkv.operators.ask_door import AskError
from flexkv_kernels.host_memory import HostMemory
from flexkv_vllm.compat.core import binds_pool, fails_by_request
from flexkv_vllm.compat.steps import read_step
from packages.inside import below_of, open_fetches

pytestmark = pytest.mark.skipif(
    not (binds_pool() and fails_by_request()), reason="not all guards are reached in this vLLM"
)


@pytest.mark.parametrize("guarded", all_guarded(offloading=False), ids=str)
def test_after_an_error_all_is_as_without_flexkv(
    make_world: MakeWorld,
    monkeypatch: pytest.MonkeyPatch,
    guarded: Guarded,
) -> None:
    rng = random.Random(1)
    monkeypatch.setattr("flexkv.engine.scheduler.fetches.LOOKAHEAD_SECONDS", math.inf)
    states = "states" in guarded.place
    if states:

        def with_states(output: SchedulerOutput) -> ScheduledStep:
            step = read_step(output)
            step.states = {each: [] for each in step.tokens}
            return step

        monkeypatch.setattr("flexkv_vllm.connector.read_step", with_states)
    marks = "marking" in guarded.place
    if marks:
        monkeypatch.setattr(HostMemory, "work_so_far", lambda _: STREAM)

    def make() -> World:
        world = make_world(
            DeviceWorld if marks else World,
            num_blocks=60 if states else 40,
            slots=40,
            disk_slots=0 if "shutdown" in guarded.place else 200,
            budget=96,
            events=True,
            windows=(70,) if states else (),
            settings={"load_mode": "layerwise"},
        )
        if not marks:
            world.slow_down(rng, failure_rate=0.2 if "wrong blocks" in guarded.place else 0.0)
        if "rest of a prefix" in guarded.place:
            read_a_block_a_step(world)  # so that loads begin before their fetches have ended
        elif "shutdown" not in guarded.place:
            delay_reads(world, rng)
        if "operator" in guarded.place:
            let_operators_call(world)
        if "sleep" in guarded.place:
            let_workers_sleep(world)
        return world

    hit_all(
        guarded,
        make,
        rng,
        restart_rate=0.1,
        params=lambda: {
            "flexkv.load_mode": rng.choice(["async", "layerwise"]),
            "flexkv.max_store_tokens": rng.choice([BLOCK_TOKENS, 10_000]),
        },
    )


def let_operators_call(world: World) -> None:
    """Let an operator change the cache before each step."""
    step = world.step

    def with_call(*arguments: Any) -> None:
        with contextlib.suppress(AskError):
            call_engine(world, "/unpin")
        step(*arguments)

    world.step = with_call  # type: ignore[method-assign]


def let_workers_sleep(world: World) -> None:
    """Unmap vLLM's pages, and map them again with the same bytes, before each step."""
    step = world.step

    def with_sleep(*arguments: Any) -> None:
        for rank in world.ranks:
            rank.flexkv.unregister_kv_caches()  # type: ignore[attr-defined]
            rank.flexkv.restore_kv_caches()  # type: ignore[attr-defined]
        step(*arguments)

    world.step = with_sleep  # type: ignore[method-assign]


def raising(*_: object) -> None:
    raise InjectedError


def test_errors_in_polling_copies_that_last_hold_no_request(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(num_blocks=64)
    prompt = random_prompt(random.Random(4), 5 * BLOCK_TOKENS + 3)
    world.generate(prompt)
    world.forget()
    side = world.ranks[0].side  # type: ignore[attr-defined]
    monkeypatch.setattr(side, "_poll_loads", raising)
    request = world.add(prompt)
    running = world.add(random_prompt(random.Random(5), 3 * BLOCK_TOKENS), max_tokens=40)
    world.run()
    assert len(world.outputs[request]) == 4
    assert len(world.outputs[running]) == 40
    for _ in range(2):
        world.forget()
        assert world.external_tokens[world.generate(prompt)] == 0
    world.check_outputs()
    assert (world.cache.status.under_way, world.cache.ready_blocks) == ({}, 0)
    lines = [each.getMessage() for each in caplog.records if "consecutive" in each.message]
    assert len(lines) == 1
    assert "all loads and stores of this rank fail until the engine is restarted" in lines[0]
    assert sum(each.get("failures:lasting:", 0) for each in world.stats) == 1


def test_errors_in_polling_the_cache_that_last_switch_it_off(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(num_blocks=64, disk_slots=40)
    prompt = random_prompt(random.Random(6), 5 * BLOCK_TOKENS + 3)
    world.generate(prompt)
    world.settle()
    world.forget()
    fetcher = below_of(world.cache).fetcher
    cleared: list[None] = []
    clear = fetcher.clear
    monkeypatch.setattr(fetcher, "clear", lambda: cleared.append(clear()))
    with monkeypatch.context() as patch:
        patch.setattr(below_of(world.cache), "poll", raising)
        patch.setattr(below_of(world.cache), "drain", raising)
        for _ in range(3):
            world.generate(prompt, max_tokens=LASTING)
            assert world.scheduler.reset_prefix_cache()
        world.generate(prompt)
    assert world.external_tokens[list(world.outputs)[-1]] == 0
    world.check_outputs()
    lines = [each.getMessage() for each in caplog.records if "consecutive" in each.message]
    assert len(lines) == 1
    assert "FlexKV loads and stores nothing until the engine is restarted" in lines[0]
    assert sum(each.get("failures:lasting:", 0) for each in world.stats) == 1
    assert world.cache.ready_blocks == 0
    assert len(cleared) == 1  # not with each poll


def test_an_error_that_loses_a_fetch_ends_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the guard knows of it: the cache has done what it should."""
    world = make_world(num_blocks=64, slots=12, disk_slots=60)
    texts = prompts(7, 4)
    fill(world, texts)
    begin, fetches = Fetches.begin, []

    def lose(self: Fetches, tracked: Any, *arguments: Any, queued: bool, **others: Any) -> None:
        begin(self, tracked, *arguments, queued=queued, **others)
        fetches.append(tracked.fetch)
        tracked.fetch, tracked.awaited = None, {}
        raise InjectedError

    monkeypatch.setattr(Fetches, "begin", lose)
    world.generate(texts[0])
    assert fetches[0] is not None
    world.settle()
    assert not open_fetches(world.cache)
    world.check_outputs()


def test_no_guard_is_left_out() -> None:
    found = [*all_guarded(offloading=False), *all_guarded(offloading=True)]
    written = sum(
        path.read_text().count(".guard(") for source in SOURCES for path in source.rglob("*.py")
    )
    in_docstrings = 1  # how to use it
    assert len(found) == written - in_docstrings
    assert {guarded.path.parent.name for guarded in found} == {
        "flexkv_vllm",
        "offloading",
        "scheduler",
        "worker",
    }
