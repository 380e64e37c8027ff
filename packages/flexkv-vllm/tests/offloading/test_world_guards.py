# SPDX-License-Identifier: Apache-2.0
"""Every guard of the offloading spec is hit with an error, before each of its statements, under
vLLM's real scheduler and `OffloadingConnector`: nothing is wrong afterwards."""

from __future__ import annotations

import random
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, Hang, delay_reads, fill, prompts
from engine_world import random_prompt
from injection import Guarded, InjectedError, all_guarded, hit_all
from kv_pages import BLOCK_TOKENS
from offloading_world import MakeOffloadingWorld, OffloadingWorld
from patience import wait_until

from flexkv.client import Reset
from flexkv.engine.boundary import LASTING
from flexkv_vllm.offloading.request import OffloadedRequest
from packages.inside import assert_no_fetch, below_of, fail_resets, index_of
from packages.inside_adapters import failures_of, jobs_of
from packages.tier_blocks import ready_blocks

GUARDS = [each for each in all_guarded(offloading=True) if each.path.name != "tier.py"]
"""`test_tier.py` hits those of `FlexKVTier`."""


@pytest.mark.parametrize("guarded", GUARDS, ids=str)
def test_after_an_error_all_is_as_without_flexkv(
    make_offloading_world: MakeOffloadingWorld, guarded: Guarded
) -> None:
    rng = random.Random(1)
    disk_slots = 0 if "shutdown" in guarded.place else 200

    def make() -> OffloadingWorld:
        world = make_offloading_world(
            num_blocks=40, slots=40, disk_slots=disk_slots, budget=96, events=True
        )
        world.slow_down(rng)
        if disk_slots:
            delay_reads(world, rng)
        return world

    hit_all(guarded, make, rng, restart_rate=0.0, reset_rate=0.15, clear_rate=0.6)


def raising(*_: object) -> None:
    raise InjectedError


def test_errors_in_polling_the_cache_that_last_switch_it_off(
    make_offloading_world: MakeOffloadingWorld,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = make_offloading_world(disk_slots=40)
    prompt = random_prompt(random.Random(11), 5 * BLOCK_TOKENS + 3)
    world.generate(prompt)
    world.forget()
    with monkeypatch.context() as patch:
        patch.setattr(below_of(world.cache), "poll", raising)
        patch.setattr(below_of(world.cache), "drain", raising)
        for _ in range(2):
            world.generate(prompt, max_tokens=2 * LASTING)
            assert world.scheduler.reset_prefix_cache()
    assert world.external_tokens[world.generate(prompt)] == 0
    world.check_outputs()
    lines = [each.getMessage() for each in caplog.records if "consecutive" in each.message]
    assert len(lines) == 1
    assert "FlexKV loads and stores nothing until the engine is restarted" in lines[0]


@pytest.mark.parametrize("part", ["load", "end_fetch"])
def test_a_load_that_cannot_be_ordered_is_ordered_again(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    world = make_offloading_world(slots=14, disk_slots=100)
    texts = prompts(8, 4)
    fill(world, texts)
    call, errors = getattr(world.cache, part), [InjectedError()]

    def failing_once(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return call(*arguments)

    monkeypatch.setattr(world.cache, part, failing_once)
    request = world.generate(texts[0])
    assert errors == []
    assert world.external_tokens[request] == PROMPT_BLOCKS * BLOCK_TOKENS
    world.assert_at_rest()
    world.check_outputs()


def test_a_request_that_ends_with_an_error_keeps_no_fetch(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_offloading_world(slots=8, disk_slots=100)
    texts = prompts(8, 4)
    fill(world, texts)
    hang = Hang(world)
    request = world.add(texts[0])
    wait_until(lambda: hang.begun, world.step)
    end_fetch, errors = world.cache.end_fetch, [InjectedError()]

    def failing_once(fetch: Any) -> Any:
        if errors:
            raise errors.pop()
        return end_fetch(fetch)

    monkeypatch.setattr(world.cache, "end_fetch", failing_once)
    world.abort(request)
    world.step()
    assert errors == []
    assert_no_fetch(world.cache)
    hang.end()
    world.run()
    world.assert_at_rest()


def test_once_a_worker_has_ended_its_copies_no_hit_is_offered(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_offloading_world(slots=14, disk_slots=100)
    texts = prompts(9, 4)
    fill(world, texts)
    worker = world.ranks[0].worker
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_wait_for", raising)
        jobs_of(worker)[10**9] = None
        worker.wait({10**9})
        del jobs_of(worker)[10**9]
    world.generate(random_prompt(random.Random(3), 20))  # whose store fails
    world.settle()
    counters = world.cache.counters
    begun = counters.loads, counters.stores
    for text in [*texts, *texts]:
        assert world.external_tokens[world.generate(text)] == 0
        world.forget()
    assert (counters.loads, counters.stores) == begun
    world.check_outputs()


def test_after_a_reset_that_failed_no_block_is_offered_until_one_succeeds(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_offloading_world()
    prompt = random_prompt(random.Random(3), 5 * BLOCK_TOKENS + 3)
    world.generate(prompt)
    world.settle()

    with monkeypatch.context() as patch:
        fail_resets(patch, world.cache, Reset.CLEAR, InjectedError())
        world.scheduler.reset_prefix_cache(reset_connector=True)
    world.weights = b"new"
    for _ in range(2):
        assert world.external_tokens[world.generate(prompt)] == 0
        world.forget()
    world.check_outputs()

    world.scheduler.reset_prefix_cache(reset_connector=True)
    world.generate(prompt)
    world.forget()
    assert world.external_tokens[world.generate(prompt)] == 5 * BLOCK_TOKENS


def test_an_error_in_a_store_gives_its_slots_back(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_offloading_world()
    with monkeypatch.context() as patch:
        patch.setattr(OffloadedRequest, "have_slots", raising)
        world.generate(random_prompt(random.Random(4), 5 * BLOCK_TOKENS + 3))
    world.assert_at_rest()
    assert ready_blocks(index_of(world.cache)) == {}


def test_no_request_waits_for_a_fetch_that_never_begins(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_offloading_world(num_blocks=64, slots=12, disk_slots=60)
    texts = prompts(9, 4)
    fill(world, texts)
    with monkeypatch.context() as patch:
        patch.setattr(world.cache, "fetch", raising)
        world.generate(texts[0])
    world.check_outputs()


def test_a_steps_results_end_with_it_whatever_fails(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_offloading_world()
    monkeypatch.setattr(OffloadedRequest, "looked_up", raising)
    for _ in range(2):
        world.generate(random_prompt(random.Random(3), 5 * BLOCK_TOKENS + 3))
        world.forget()
    assert set(failures_of(world.manager)) == {"ending a step's lookups"}
    world.check_outputs()
