# SPDX-License-Identifier: Apache-2.0
"""What users ask for single requests (kv_transfer_params), under vLLM's real scheduler."""

from __future__ import annotations

import random
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, fill, hits, prompts
from engine_world import BLOCK_TOKENS, MakeWorld, World, random_prompt

from flexkv.engine.scheduler.hints import HintResult
from packages.conftest import Clock
from packages.inside_adapters import failures_of, hints_of, scheduler_of


def test_without_load_nothing_is_looked_for(make_world: MakeWorld) -> None:
    world = make_world()
    prompt = random_prompt(random.Random(1), 200)
    world.generate(prompt)
    world.forget()
    again = world.generate(prompt, params={"flexkv.load": False})
    assert world.external_tokens[again] == 0
    assert world.cache.counters.loads == 0
    world.check_outputs()


def test_without_load_nothing_is_prefetched(make_world: MakeWorld) -> None:
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(2, 4)
    fill(world, texts)
    world.generate(texts[0], params={"flexkv.load": False})
    world.settle()
    assert world.cache.counters.fetched_blocks == 0


def test_without_store_nothing_is_kept(make_world: MakeWorld) -> None:
    world = make_world()
    prompt = random_prompt(random.Random(3), 200)
    world.generate(prompt, max_tokens=40, params={"flexkv.store": False})
    assert world.cache.counters.stores == 0
    world.forget()
    assert world.external_tokens[world.generate(prompt)] == 0
    world.forget()
    # What others stored is loaded.
    third = world.generate(prompt, params={"flexkv.store": False})
    assert world.external_tokens[third] == 192


@pytest.mark.parametrize("block_tokens", [16, 48])
@pytest.mark.parametrize("most", [0, 15, 16, 100, 191, 192, 10**9])
def test_no_more_is_loaded_than_allowed(
    make_world: MakeWorld, block_tokens: int, most: int
) -> None:
    world = make_world(block_tokens=block_tokens)
    prompt = random_prompt(random.Random(4), 200)
    world.generate(prompt)
    world.forget()
    again = world.generate(prompt, params={"flexkv.max_load_tokens": most})
    assert world.external_tokens[again] == min(most, 192) // block_tokens * block_tokens
    world.check_outputs()


def test_what_vllm_has_itself_does_not_count_as_loaded(make_world: MakeWorld) -> None:
    world = make_world(block_tokens=64)
    prompt = random_prompt(random.Random(5), 256)
    world.generate(prompt)
    world.forget()
    world.generate(prompt[:40], max_tokens=1)  # vLLM has 32 tokens now
    again = world.generate(prompt, params={"flexkv.max_load_tokens": 100})
    assert world.external_tokens[again] == 128 - 32


def test_no_more_is_fetched_than_allowed(make_world: MakeWorld) -> None:
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(6, 4)
    fill(world, texts)
    world.generate(texts[0], params={"flexkv.max_load_tokens": 2 * BLOCK_TOKENS})
    world.settle()
    assert world.cache.counters.fetched_blocks == 2


@pytest.mark.parametrize("store", [True, False])
def test_pinned_blocks_stay_until_a_reset(make_world: MakeWorld, store: bool) -> None:
    world = make_world(slots=20)
    rng = random.Random(7)
    pinned = random_prompt(rng, 100)
    if not store:
        world.generate(pinned)
    world.generate(pinned, params={"flexkv.pin": True, "flexkv.store": store})
    assert world.cache.pinned_blocks == 6
    for _ in range(10):
        world.generate(random_prompt(rng, 200))
    world.forget()
    assert world.external_tokens[world.generate(pinned)] == 96
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    assert world.cache.pinned_blocks == 0
    world.generate(pinned)
    for _ in range(10):
        world.generate(random_prompt(rng, 200))
    world.forget()
    assert world.external_tokens[world.generate(pinned)] == 0


def test_requests_may_only_what_the_settings_allow(make_world: MakeWorld) -> None:
    world = make_world(slots=20, settings={"request_options": "store"})
    prompt = random_prompt(random.Random(7), 100)
    world.generate(prompt, params={"flexkv.pin": True, "flexkv.load": False})
    assert world.cache.pinned_blocks == 0
    world.forget()
    assert world.external_tokens[world.generate(prompt, params={"flexkv.load": False})] == 96


def test_pins_end_with_their_time_and_the_blocks_make_room(
    make_world: MakeWorld, clock: Clock
) -> None:
    world = make_world(slots=20, settings={"pin_seconds": 6000})
    rng = random.Random(7)
    texts = [random_prompt(rng, 90) for _ in range(2)]
    world.generate(texts[0], max_tokens=1, params={"flexkv.pin": True})
    world.generate(texts[1], max_tokens=1, params={"flexkv.pin": True, "flexkv.pin_seconds": 9000})
    assert world.cache.pinned_blocks == 10
    clock.skip(6001)
    for _ in range(10):
        world.generate(random_prompt(rng, 200))
    assert world.cache.pinned_blocks == 5
    world.forget()
    assert world.external_tokens[world.generate(texts[0])] == 0
    assert world.external_tokens[world.generate(texts[1])] == 80
    clock.skip(3000)
    assert world.cache.pinned_blocks == 0


def test_a_request_unpins_what_those_of_its_name_have_pinned(make_world: MakeWorld) -> None:
    world = make_world(slots=40)
    rng = random.Random(7)
    for name in ("a", "b"):
        pin = {"flexkv.pin": True, "flexkv.pin_name": name}
        world.generate(random_prompt(rng, 80), max_tokens=1, params=pin)
    world.generate(random_prompt(rng, 40), max_tokens=1, params={"flexkv.pin": True})
    assert world.cache.pinned_blocks == 5 + 5 + 2
    unpin = {"flexkv.unpin": True, "flexkv.pin_name": "a"}
    world.generate(random_prompt(rng, 40), max_tokens=1, params=unpin)
    assert world.cache.pinned_blocks == 5 + 2
    world.generate(random_prompt(rng, 40), max_tokens=1, params={"flexkv.unpin": True})
    assert world.cache.pinned_blocks == 5
    for _ in range(10):
        world.generate(random_prompt(rng, 200))
    assert world.cache.pinned_blocks == 5


def test_half_of_the_arena_can_be_pinned(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(slots=20)
    rng = random.Random(8)
    for _ in range(4):
        world.generate(random_prompt(rng, 100), max_tokens=1, params={"flexkv.pin": True})
    assert world.cache.pinned_blocks == 10
    assert world.cache.counters.refused_pins == 4 * 6 - 10
    warnings = [r for r in caplog.records if "pinned" in r.getMessage()]
    assert len(warnings) == 1
    # The other half works as ever.
    free = random_prompt(rng, 100)
    world.generate(free)
    world.forget()
    assert world.external_tokens[world.generate(free)] == 96


@pytest.mark.parametrize(
    "params",
    [
        {"flexkv.load": "no", "flexkv.max_load_tokens": -5, "flexkv.unknown": object()},
        {"do_remote_prefill": False, "remote_block_ids": [1]},
    ],
)
def test_a_request_is_served_whatever_its_parameters_are(
    make_world: MakeWorld, params: Any
) -> None:
    world = make_world()
    prompt = random_prompt(random.Random(9), 200)
    world.generate(prompt, params=params)
    world.forget()
    assert world.external_tokens[world.generate(prompt, params=params)] == 192
    world.check_outputs()
    assert not failures_of(world.connector)


@pytest.mark.parametrize("most", [0, 15, 16, 100, 10**9])
@pytest.mark.parametrize("name", ["flexkv.max_store_tokens", "max_offload_tokens"])
def test_no_more_is_stored_than_asked_for(make_world: MakeWorld, name: str, most: int) -> None:
    world = make_world(windows=(40,) if most == 100 else ())
    prompt = random_prompt(random.Random(11), 200)
    world.generate(prompt, max_tokens=40, params={name: most})
    world.forget()
    again = world.generate(prompt)
    assert world.external_tokens[again] == min(most, 192) // BLOCK_TOKENS * BLOCK_TOKENS
    world.check_outputs()


def flood(world: World, rng: random.Random) -> None:
    for _ in range(12):
        world.generate(random_prompt(rng, 200))
    world.forget()


def test_retained_blocks_stay_for_their_time(make_world: MakeWorld, clock: Clock) -> None:
    world = make_world(slots=64)
    rng = random.Random(12)
    texts = [random_prompt(rng, 100) for _ in range(2)]
    world.generate(texts[0], params={"flexkv.retain_seconds": 300})
    world.generate(texts[1])
    flood(world, rng)
    assert [world.external_tokens[world.generate(text)] for text in texts] == [96, 0]
    clock.skip(301)
    flood(world, rng)
    assert world.external_tokens[world.generate(texts[0])] == 0


def test_a_tenant_retains_an_eighth_and_all_a_quarter(make_world: MakeWorld) -> None:
    world = make_world(slots=64)
    rng = random.Random(13)
    for salt, kept in ((None, 8), ("a", 16), ("b", 16)):
        for _ in range(2):
            text = random_prompt(rng, 101)
            world.generate(text, salt=salt, params={"flexkv.retain_seconds": 300})
        assert world.cache.pinned_blocks == kept
    assert world.cache.counters.refused_pins == 3 * 12 - 16
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    assert world.cache.pinned_blocks == 0


def test_the_end_of_a_conversation_releases_its_blocks(make_world: MakeWorld) -> None:
    world = make_world(slots=64)
    rng = random.Random(14)
    text, other = random_prompt(rng, 100), random_prompt(rng, 20)
    world.generate(text, max_tokens=1, params={"flexkv.retain_seconds": 300})
    world.generate(other, max_tokens=1, params={"flexkv.retain_seconds": 300})
    assert world.cache.pinned_blocks == 7
    world.generate(text, max_tokens=1, salt="other", params={"flexkv.release": True})
    assert world.cache.pinned_blocks == 7
    world.generate(text, max_tokens=1, params={"flexkv.release": True})
    assert world.cache.pinned_blocks == 1


@pytest.mark.parametrize("admission", ["write_through", "second_hit", "on_evict"])
def test_a_demoted_prompt_is_on_disk_alone_and_comes_back(
    make_world: MakeWorld, admission: str
) -> None:
    world = make_world(slots=64, disk_slots=100, settings={"ssd_admission": admission})
    text, other = prompts(15, 2)
    world.generate(other)
    before = world.cache.ready_blocks
    world.generate(text, max_tokens=1, params={"flexkv.demote": True})
    world.settle()
    assert world.cache.ready_blocks == before
    world.forget()
    assert hits(world, text) == PROMPT_BLOCKS
    assert world.cache.counters.fetched_blocks >= PROMPT_BLOCKS
    world.check_outputs()


def test_without_a_disk_a_demoted_prompt_stays(make_world: MakeWorld) -> None:
    world = make_world(slots=64)
    (text,) = prompts(16, 1)
    world.generate(text, max_tokens=1, params={"flexkv.demote": True})
    world.settle()
    assert world.cache.ready_blocks == PROMPT_BLOCKS
    hints = hints_of(scheduler_of(world.connector))
    assert hints == {("demote", HintResult.UNSUPPORTED): 1}


def test_vllms_name_of_a_conversation_reaches_the_policy(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    told: list[str] = []
    record = world.cache.record
    monkeypatch.setattr(
        world.cache,
        "record",
        lambda keys, context, prompt: (told.append(context.session), record(keys, context, prompt)),
    )
    for params in (None, {"flexkv.session": "mine"}):
        prompt = random_prompt(random.Random(15), 50)
        world.add(prompt, salt="s", params=params, session="x-session")
        world.run()
    assert told == ["s\0x-session", "s\0mine"]
