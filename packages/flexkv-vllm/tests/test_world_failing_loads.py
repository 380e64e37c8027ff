# SPDX-License-Identifier: Apache-2.0
"""FlexKV beside a connector that loads in the step that computes the rest of a request, and whose
loads fail: vLLM counts the promised tokens as computed, and learns of the failure when the step has
ended."""

from __future__ import annotations

import random
from collections.abc import Iterator

import other_connector
import pytest
from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from other_connector import OtherCache
from patience import PATIENCE_SECONDS
from traffic import Traffic, loaded, make_stems, preempted
from world_config import BESIDE_OTHER, IN_TREE_BESIDE_OTHER

from flexkv.engine.scheduler.request import NEVER
from flexkv.engine.scheduler.side import RequestSide
from flexkv.engine.scheduler.storing import Stores
from flexkv_vllm.compat.core import binds_pool
from packages.inside_adapters import mover_of, stores_of_worker, stores_under_way, tracked_requests

ENTRIES = pytest.mark.parametrize(
    "entry", [BESIDE_OTHER, IN_TREE_BESIDE_OTHER], ids=["plugin", "in-tree"]
)
PROMISED = 6
TOKENS = 130


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherCache]:
    monkeypatch.setattr(other_connector, "cache", OtherCache())
    return other_connector.cache


def make(make_world: MakeWorld, other: OtherCache, entry: str, **options: object) -> World:
    """A world whose stores read their blocks before another step overwrites them."""
    world = make_world(entry=entry, **{"budget": 256, **options})
    other.world = world
    for rank in world.ranks:
        side, start = rank.side, rank.side.start_stores

        def start_and_end(orders: object, side=side, start=start) -> None:
            start(orders)
            for ticket in stores_of_worker(side).values():
                mover_of(side).wait(ticket, PATIENCE_SECONDS)

        side.start_stores = start_and_end
    return world


def promise(world: World, other: OtherCache, prompt: list[int], blocks: int = PROMISED) -> None:
    """The other cache has the first blocks of a prompt, or says so."""
    probe = world.add(prompt)
    other.learn(world.requests[probe], blocks)
    world.abort(probe)


def cached_tokens(world: World, other: OtherCache, prompt: list[int]) -> int:
    """The tokens of a prompt that FlexKV has; that their bytes are right is checked on the way."""
    other.known.clear()
    world.forget()
    again = world.generate(prompt, max_tokens=1)
    world.check_outputs()
    return world.external_tokens[again]


@ENTRIES
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("block_tokens", [16, 48])
def test_what_another_connector_failed_to_load_is_not_cached(
    make_world: MakeWorld, other: OtherCache, entry: str, policy: str, block_tokens: int
) -> None:
    """With `recompute`, what vLLM has computed again is; with `fail`, what came before."""
    ranks = 2 if block_tokens == 48 else 1
    world = make(make_world, other, entry, policy=policy, block_tokens=block_tokens, ranks=ranks)
    prompt = random_prompt(random.Random(1), TOKENS)
    promise(world, other, prompt)
    other.fail = lambda blocks: 3
    request_id = world.generate(prompt)
    (load,) = other.loads
    assert (load.start, load.end, load.fails_at) == (0, PROMISED * BLOCK_TOKENS, 3)
    assert len(world.outputs[request_id]) == (4 if policy == "recompute" else 0)
    right = TOKENS if policy == "recompute" else 3 * BLOCK_TOKENS
    assert cached_tokens(world, other, prompt) == right // block_tokens * block_tokens


@ENTRIES
def test_what_was_computed_behind_a_failed_load_is_not_cached(
    make_world: MakeWorld, other: OtherCache, entry: str
) -> None:
    """FlexKV has the promised blocks: only later ones are stored, and none of those was loaded."""
    world = make(make_world, other, entry)
    rng = random.Random(2)
    prompt = random_prompt(rng, TOKENS)
    world.generate(prompt[: PROMISED * BLOCK_TOKENS + 1])
    world.forget()
    promise(world, other, prompt)
    request_id = world.add(prompt)
    world.step()
    world.abort(request_id)
    world.run()
    assert len(other.loads) == 1
    assert cached_tokens(world, other, prompt) == PROMISED * BLOCK_TOKENS


@ENTRIES
def test_requests_that_share_a_failed_load_cache_nothing_of_it(
    make_world: MakeWorld, other: OtherCache, entry: str
) -> None:
    """vLLM lets a request of the same step compute on what another one loads."""
    world = make(make_world, other, entry)
    rng = random.Random(3)
    stem = random_prompt(rng, PROMISED * BLOCK_TOKENS)
    prompts = [stem + random_prompt(rng, 20) for _ in range(3)]
    promise(world, other, prompts[0])
    requests = [world.add(prompt) for prompt in prompts]
    world.step()
    assert len(other.loads) == 1
    # vLLM has only the first one compute the blocks again.
    stores_more = [tracked_requests(world.side)[each].next_fill < NEVER for each in requests]
    assert stores_more == [True, False, False]
    for each in requests:
        world.abort(each)
    world.run()
    other.known.clear()
    for prompt in prompts:
        world.generate(prompt)
    for prompt in prompts:
        assert cached_tokens(world, other, prompt) == 112


@ENTRIES
def test_what_a_failed_load_left_is_nobodys_hit(
    make_world: MakeWorld, other: OtherCache, entry: str
) -> None:
    """vLLM keeps such blocks in its prefix cache, for the request to compute them again. One that
    is aborted never does."""
    world = make(make_world, other, entry)
    prompt = random_prompt(random.Random(4), TOKENS)
    promise(world, other, prompt)
    request_id = world.add(prompt)
    world.step()
    world.abort(request_id)
    other.known.clear()
    world.run()
    world.generate(prompt)
    world.check_outputs()
    assert cached_tokens(world, other, prompt) == 128


@ENTRIES
def test_where_vllm_hides_its_blocks_a_hit_behind_a_failed_load_is_not_cached(
    make_world: MakeWorld, other: OtherCache, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before vLLM 0.22: FlexKV cannot take the wrong blocks out of vLLM's prefix cache."""
    monkeypatch.setattr(RequestSide, "bind_pool", lambda *_: None)
    world = make(make_world, other, entry)
    rng = random.Random(5)
    failing, fresh = random_prompt(rng, TOKENS), random_prompt(rng, TOKENS)
    promise(world, other, failing)
    request_id = world.add(failing)
    world.step()
    world.abort(request_id)
    world.generate(fresh)
    # A hit of vLLM's own: its right blocks are not distinguished from wrong ones.
    longer = fresh + random_prompt(rng, TOKENS)
    world.generate(longer)
    assert cached_tokens(world, other, longer) == 128


@ENTRIES
@pytest.mark.parametrize("stages", [1, 2], ids=["lag", "stages"])
def test_an_aborted_request_whose_step_has_not_ended_caches_nothing_of_a_failed_load(
    make_world: MakeWorld, other: OtherCache, entry: str, stages: int
) -> None:
    """Neither before the step has ended, nor after."""
    lag = random.Random(6) if stages == 1 else None
    world = make(make_world, other, entry, stages=stages, lag=lag)
    prompt = random_prompt(random.Random(7), TOKENS)
    promise(world, other, prompt)
    request_id = world.add(prompt)
    world.step()
    assert len(world.steps) == 1
    world.abort(request_id)
    other.known.clear()
    late = world.add(random_prompt(random.Random(8), 3), max_tokens=1)
    world.run()
    assert len(world.outputs[late]) == 1
    assert cached_tokens(world, other, prompt) == 0


def test_a_store_counts_only_when_its_step_has_ended(
    make_world: MakeWorld, other: OtherCache
) -> None:
    world = make(make_world, other, BESIDE_OTHER, lag=random.Random(9))
    prompt = random_prompt(random.Random(10), TOKENS)
    world.add(prompt, max_tokens=1)
    world.step()
    world._run_workers(1)
    world.poll()
    assert world.cache.ready_blocks == 0
    assert len(stores_under_way(world.side)) == 1
    world.run()
    world.settle()
    assert world.cache.ready_blocks == 8


def test_a_step_whose_report_is_lost_counts_as_ended_later(
    make_world: MakeWorld, other: OtherCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(make_world, other, BESIDE_OTHER)
    monkeypatch.setattr(world.ranks[0].flexkv, "build_connector_worker_meta", lambda: None)
    prompt = random_prompt(random.Random(11), TOKENS)
    world.add(prompt, max_tokens=64)
    for _ in range(64):
        world.step()
        assert world.cache.ready_blocks == 0
    world.run()
    assert cached_tokens(world, other, prompt) == 128


def test_if_wrong_blocks_cannot_be_discarded_all_are(
    make_world: MakeWorld, other: OtherCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(make_world, other, BESIDE_OTHER)
    rng = random.Random(13)
    prompt, earlier = random_prompt(rng, TOKENS), random_prompt(rng, TOKENS)
    world.generate(earlier)
    promise(world, other, prompt)

    def broken(*_: object) -> None:
        raise RuntimeError("broken by the test")

    with monkeypatch.context() as patch:
        patch.setattr(Stores, "distrust", broken)
        world.generate(prompt)
    world.check_outputs()
    assert cached_tokens(world, other, earlier) == 0
    assert cached_tokens(world, other, prompt) == 0


@pytest.mark.skipif(not binds_pool(), reason="vLLM shows its blocks from 0.22 on")
@ENTRIES
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_beside_failing_loads_never_caches_a_wrong_byte(
    make_world: MakeWorld, other: OtherCache, entry: str, policy: str, seed: int
) -> None:
    rng = random.Random(seed)
    world = make(
        make_world,
        other,
        entry,
        policy=policy,
        num_blocks=40,
        slots=(30, 100, 100)[seed],
        block_tokens=(16, 32, 16)[seed],
        budget=(33, 96, 256)[seed],
        ranks=(1, 2, 1)[seed],
        disk_slots=(0, 100, 100)[seed],
    )
    world.slow_down(rng)
    other.fail = lambda blocks: rng.choice([0, rng.randrange(blocks), blocks])

    def learn() -> None:
        for request in list(world.requests.values())[-8:]:
            if request.is_finished():
                other.learn(request, rng.randint(0, request.num_computed_tokens // BLOCK_TOKENS))
        if rng.random() < 0.3:
            other.known.clear()

    stems = make_stems(rng, 4)
    seen = [preempted, loaded, lambda _: any(load.fails_at == 0 for load in other.loads)]
    Traffic(world, rng, stems, disturb=learn).run(40, until=seen)
    for stem in stems:
        cached_tokens(world, other, stem)
