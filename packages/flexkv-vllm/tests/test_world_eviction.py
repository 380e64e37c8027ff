# SPDX-License-Identifier: Apache-2.0
"""What eviction policies see of requests under vLLM's real scheduler."""

from __future__ import annotations

import random

import pytest
from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from policy_checks import CheckedPolicy
from traffic import Traffic, loaded, make_stems

from flexkv.eviction import POLICIES, LRUPolicy, RequestContext
from flexkv.figures.definitions import sample


def evicted(world: World) -> bool:
    return world.cache.counters.evicted_blocks > 0


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> CheckedPolicy:
    """Of the next world, whatever it selects."""
    made = POLICIES["hazard"](1 << 12)
    assert not isinstance(made, LRUPolicy)
    checked = CheckedPolicy(made)
    for name in POLICIES:
        monkeypatch.setitem(POLICIES, name, lambda slots: checked)
    return checked


@pytest.mark.parametrize(("windows", "chosen"), [((), "hazard"), ((64,), "lru")])
def test_auto_needs_the_prompts_of_all_groups(
    make_world: MakeWorld, made_policies: list[str], windows: tuple[int, ...], chosen: str
) -> None:
    world = make_world(windows=windows, settings={"eviction_policy": "auto"})
    assert made_policies == [chosen]
    world.generate(random_prompt(random.Random(3), 40))
    world.settle()
    world.step()
    gauges = {name: sample("eviction_policies", "host", name) for name in POLICIES}
    reported = [samples for samples in world.stats if gauges[chosen] in samples]
    assert {name: reported[-1][gauges[name]] for name in POLICIES} == {
        name: name == chosen for name in POLICIES
    }


@pytest.mark.parametrize("windows", [(), (64,)], ids=["one group", "two groups"])
def test_a_scheduled_request_hits_each_block_once(
    make_world: MakeWorld, policy: CheckedPolicy, windows: tuple[int, ...]
) -> None:
    world = make_world(windows=windows)
    rng = random.Random(1)
    stem = random_prompt(rng, 4 * BLOCK_TOKENS)
    world.generate(stem + random_prompt(rng, 5))
    world.settle()
    stored = set(policy.hits)
    world.forget()
    own = BLOCK_TOKENS + 9
    request_id = world.generate(stem + random_prompt(rng, own), max_tokens=3)
    world.settle()
    hit = RequestContext(4 * BLOCK_TOKENS + own, 4 * BLOCK_TOKENS, request_id, stores=True)
    prompt = world.requests[request_id].block_hashes[:5]
    assert policy.prompts[-1] == (prompt, hit)
    assert policy.answers[request_id] == 3
    assert len(stored) == 4 * (1 + len(windows))
    assert {key: policy.hits[key] for key in stored} == {key: [hit] for key in stored}


@pytest.mark.parametrize("admission", ["write_through", "on_evict"])
def test_outputs_are_right_while_blocks_leave_both_tiers(
    make_world: MakeWorld, policy: CheckedPolicy, admission: str
) -> None:
    rng = random.Random(2)
    world = make_world(
        num_blocks=40, slots=40, disk_slots=60, budget=96, settings={"ssd_admission": admission}
    )
    Traffic(world, rng, make_stems(rng, 4)).run(60, until=[loaded, evicted])
    world.settle()
    assert len(policy.hits) == world.cache.ready_blocks


def test_the_own_blocks_of_a_conversation_that_has_ended_go_first(make_world: MakeWorld) -> None:
    world = make_world(slots=16, settings={"eviction_policy": "auto"})
    rng = random.Random(8)
    stem = random_prompt(rng, 2 * BLOCK_TOKENS)

    def turn(prompt: list[int], session: str, *, release: bool = False) -> list[bytes]:
        params = {"flexkv.session": session, "flexkv.release": release}
        request_id = world.generate(prompt, max_tokens=1, params=params)
        return list(world.requests[request_id].block_hashes[: len(prompt) // BLOCK_TOKENS])

    # 2 shared blocks, and 4 of each conversation. The one used last has ended.
    keys = [
        turn(stem + random_prompt(rng, 4 * BLOCK_TOKENS + 1), f"session {i}", release=i == 2)
        for i in range(3)
    ]
    assert [world.cache.lookup(each) for each in keys] == [6, 6, 6]
    turn(random_prompt(rng, 4 * BLOCK_TOKENS + 1), "another")
    world.settle()
    assert [world.cache.lookup(each) for each in keys] == [6, 6, 4]
    turn(random_prompt(rng, 2 * BLOCK_TOKENS + 1), "another")
    world.settle()
    assert [world.cache.lookup(each) for each in keys] == [6, 6, 2]
