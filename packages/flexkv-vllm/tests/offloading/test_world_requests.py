# SPDX-License-Identifier: Apache-2.0
"""What users ask for single requests, under vLLM's own `OffloadingConnector`."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_world import BLOCK_TOKENS, random_prompt
from offloading_world import SEVERAL_GROUPS, WINDOW, MakeOffloadingWorld, OffloadingWorld

from flexkv.figures.definitions import sample
from packages.conftest import Clock


def flood(world: OffloadingWorld, rng: random.Random) -> None:
    for _ in range(12):
        world.generate(random_prompt(rng, 200))
    world.forget()


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


@SEVERAL_GROUPS
def test_no_block_of_a_window_is_stored_behind_the_limit(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world(windows=(WINDOW,))
    prompt = random_prompt(random.Random(11), 200)
    world.generate(prompt, params={"flexkv.max_store_tokens": 100})
    world.settle()
    assert 0 < world.cache.counters.stored_blocks <= 2 * (100 // BLOCK_TOKENS)


@pytest.mark.parametrize("has_it", ["nobody", "vLLM", "FlexKV"])
@pytest.mark.parametrize("store", [True, False])
def test_a_prompt_is_pinned_whoever_has_it(
    make_offloading_world: MakeOffloadingWorld, has_it: str, store: bool
) -> None:
    world = make_offloading_world()
    prompt = random_prompt(random.Random(12), 200)
    if has_it != "nobody":
        world.generate(prompt, max_tokens=1)
        world.settle()
    if has_it == "FlexKV":
        world.forget()
    world.generate(prompt, max_tokens=1, params={"flexkv.pin": True, "flexkv.store": store})
    assert world.cache.pinned_blocks == (12 if store or has_it != "nobody" else 0)


def test_a_request_ends_the_pins_of_its_own_salt(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world()
    rng = random.Random(13)
    for salt, tokens in ((None, 33), ("a", 49)):
        text = random_prompt(rng, tokens)
        world.generate(text, max_tokens=1, salt=salt, params={"flexkv.pin": True})
    assert world.cache.pinned_blocks == 2 + 3
    unpin = {"flexkv.unpin": True}
    world.generate(random_prompt(rng, 17), max_tokens=1, salt="b", params=unpin)
    assert world.cache.pinned_blocks == 2 + 3
    world.generate(random_prompt(rng, 17), max_tokens=1, salt="a", params=unpin)
    assert world.cache.pinned_blocks == 2
    world.generate(random_prompt(rng, 17), max_tokens=1, params=unpin)
    assert world.cache.pinned_blocks == 0


def test_retained_blocks_stay_for_their_time(
    make_offloading_world: MakeOffloadingWorld, clock: Clock
) -> None:
    world = make_offloading_world(slots=64)
    rng = random.Random(14)
    texts = [random_prompt(rng, 100) for _ in range(2)]
    world.generate(texts[0], params={"flexkv.retain_seconds": 300})
    world.generate(texts[1])
    flood(world, rng)
    assert [world.external_tokens[world.generate(text)] for text in texts] == [96, 0]
    clock.skip(301)
    flood(world, rng)
    assert world.external_tokens[world.generate(texts[0])] == 0


def test_what_a_hit_uses_is_retained_too(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world(slots=64)
    rng = random.Random(15)
    text = random_prompt(rng, 100)
    world.generate(text)
    world.forget()
    world.generate(text, params={"flexkv.retain_seconds": 300})
    flood(world, rng)
    assert world.external_tokens[world.generate(text)] == 96


def test_the_end_of_a_conversation_releases_its_blocks(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world(slots=64)
    rng = random.Random(16)
    text, other = random_prompt(rng, 100), random_prompt(rng, 20)
    for each in (text, other):
        world.generate(each, max_tokens=1, params={"flexkv.retain_seconds": 300})
    assert world.cache.pinned_blocks == 7
    world.generate(text, max_tokens=1, salt="other", params={"flexkv.release": True})
    assert world.cache.pinned_blocks == 7
    world.generate(text, max_tokens=1, params={"flexkv.release": True})
    assert world.cache.pinned_blocks == 1


def test_a_demoted_prompt_is_on_disk_alone_and_comes_back(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world(slots=64, disk_slots=100)
    rng = random.Random(17)
    text, kept = random_prompt(rng, 100), random_prompt(rng, 40)
    world.generate(kept, max_tokens=1)
    world.settle()
    before = world.cache.ready_blocks
    assert before > 0
    world.generate(text, max_tokens=1, params={"flexkv.demote": True})
    world.settle()
    assert world.cache.ready_blocks == before
    world.forget()
    assert world.external_tokens[world.generate(text)] == 96
    assert world.cache.counters.fetched_blocks > 0
    world.check_outputs()


@pytest.mark.parametrize("ways", [("extra",), ("field",), ("field", "extra"), ("own", "field")])
def test_hints_of_agents_are_followed(
    make_offloading_world: MakeOffloadingWorld, ways: tuple[str, ...]
) -> None:
    world = make_offloading_world()
    told: list[Any] = []
    record = world.cache.record

    def note(keys: Any, context: Any, prompt: Any) -> None:
        told.append((context.session, context.returns))
        record(keys, context, prompt)

    world.cache.record = note
    params = {"flexkv.session": "own"} if "own" in ways else None
    prompt = random_prompt(random.Random(17), 50)
    session = "field" if "field" in ways else None
    request_id = world.add(prompt, 1, salt="s", params=params, session=session)
    if "extra" in ways:
        context = {"program_id": "extra", "expected_resume": True, "kv_retention_ttl_seconds": 60}
        extra = {"agentic_context": context}
        world.requests[request_id].sampling_params.extra_args = extra  # type: ignore[union-attr]
    world.run()
    returns = True if "extra" in ways else None
    assert told == [(f"s\0{ways[0]}", returns)]
    assert world.cache.pinned_blocks == (3 if "extra" in ways else 0)
    counts = world.collected()
    assert counts[sample("hints", "session", "accepted")] == 1
    for action in ("returns", "retain"):
        assert counts[sample("hints", action, "accepted")] == ("extra" in ways)
