# SPDX-License-Identifier: Apache-2.0
"""FlexKV's offloading spec with a disk below a small arena, under vLLM's real scheduler."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from disk_world import PROMPT_BLOCKS, Hang, fill, hits, keep_in_engine, prompts
from engine_world import MakeWorld, random_prompt
from kv_pages import BLOCK_TOKENS
from offloading_release import HYBRID
from offloading_world import MakeOffloadingWorld
from patience import wait_until
from traffic import SEEDS, Traffic, fetched, make_stems
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from world_config import DISK_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from packages.conftest import Clock


@HYBRID
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("admission", ["write_through", "on_evict"])
def test_what_left_the_arena_comes_back_from_disk(
    make_offloading_world: MakeOffloadingWorld, ranks: int, admission: str, windows: tuple[int, ...]
) -> None:
    # With the latter, as many as a prompt stores are kept free by writing.
    slots = {"write_through": 24, "on_evict": 96}[admission]
    world = make_offloading_world(
        slots=slots,
        disk_slots=400,
        ranks=ranks,
        windows=windows,
        settings={"ssd_admission": admission},
    )
    texts = prompts(1, 24)
    fill(world, texts)
    for text in texts:
        assert hits(world, text) == PROMPT_BLOCKS
        world.settle()
        world.forget()
    assert world.cache.counters.fetched_blocks >= 4 * PROMPT_BLOCKS
    world.check_outputs()


def test_a_prompt_larger_than_the_arena_comes_as_far_as_there_is_room(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world(slots=12, disk_slots=100)
    long = random_prompt(random.Random(2), 20 * BLOCK_TOKENS + 5)
    fill(world, [long[: blocks * BLOCK_TOKENS] for blocks in (6, 12)] + prompts(3, 4))
    assert hits(world, long) == 12
    world.check_outputs()


def test_where_a_hit_came_from(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world(slots=14, disk_slots=100)
    texts = prompts(4, 4)
    fill(world, texts)
    sources = world.connector.get_external_cache_hit_sources
    for text, source in ((texts[0], CacheHitSource.DISK), (texts[0], CacheHitSource.HOST)):
        request = world.requests[world.add(text)]
        wait_until(lambda request=request: request.num_computed_tokens, world.step)
        tokens = request.num_computed_tokens
        assert sources(request, tokens) == {source: PROMPT_BLOCKS * BLOCK_TOKENS}
        world.run()
        world.settle()
        world.forget()


def test_blocks_are_found_after_a_restart(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world(slots=30, disk_slots=100)
    texts = prompts(5, 3)
    fill(world, texts)
    world.close()
    again = make_offloading_world(slots=30, disk_slots=100)
    for text in texts:
        assert hits(again, text) == PROMPT_BLOCKS
    again.check_outputs()


def test_blocks_of_other_sizes_and_other_connectors_never_meet(
    make_offloading_world: MakeOffloadingWorld, make_world: MakeWorld, tmp_path: Path
) -> None:
    make_world(slots=30, disk_slots=100)
    names = {path.name for path in (tmp_path / "disk").iterdir() if path.is_dir()}
    for options in ({}, {"chunk": 2}, {"windows": (40,)}, {"ranks": 2}):
        world = make_offloading_world(slots=30, disk_slots=100, **options)
        names |= {path.name for path in (tmp_path / "disk").iterdir() if path.is_dir()}
        world.close()
    assert len(names) == 5


def test_a_damaged_block_ends_the_prefix(
    make_offloading_world: MakeOffloadingWorld, tmp_path: Path
) -> None:
    world = make_offloading_world(slots=14, disk_slots=100)
    texts = prompts(6, 4)
    fill(world, texts)
    for slab in (tmp_path / "disk").glob("*/slab-*"):
        slab.write_bytes(bytes(0xFF ^ byte for byte in slab.read_bytes()))
    for text in texts:
        world.generate(text)
        world.forget()
    assert world.cache.counters.damaged_fetches > 0
    world.check_outputs()


def test_a_hanging_disk_holds_no_request_up_for_long(
    make_offloading_world: MakeOffloadingWorld, clock: Clock
) -> None:
    world = make_offloading_world(slots=14, disk_slots=100)
    texts = prompts(7, 4)
    fill(world, texts)
    hang = Hang(world)
    waiting = world.add(texts[0])
    wait_until(lambda: hang.begun, world.step)
    clock.skip(2 * DISK_TIMEOUT_SECONDS)
    world.run()
    assert world.external_tokens[waiting] == 0
    assert world.cache.counters.stalled_fetches == 1
    hang.end()
    world.check_outputs()


@SEEDS
@HYBRID
def test_random_traffic_over_a_disk(
    make_offloading_world: MakeOffloadingWorld, seed: int, windows: tuple[int, ...]
) -> None:
    rng = random.Random(seed)
    world = make_offloading_world(
        num_blocks=60,
        slots=24,
        disk_slots=80,
        ranks=1 + seed % 2,
        windows=windows,
        budget=96,
        settings={"ssd_admission": rng.choice(["write_through", "on_evict"])},
    )
    movers = world.slow_down(rng, failure_rate=0.05)
    Traffic(
        world,
        rng,
        make_stems(rng, 6, longest=199),
        most_tokens=19,
        most_steps=5,
        reset_rate=0.1,
        restart_rate=0.0,
        clear_rate=0.2,
    ).run(60, until=[fetched])
    world.settle()
    world.assert_untracked()
    # Nothing is held: the arena takes a prompt of as many blocks as it has.
    world.forget()
    for mover in movers:
        mover.failure_rate = 0.0
    long = random_prompt(rng, 10 * BLOCK_TOKENS + 3)
    world.generate(long)
    world.settle()
    world.forget()
    assert hits(world, long) == 10


@pytest.mark.parametrize(("admission", "turns"), [("write_through", 12), ("second_hit", 1)])
def test_what_vllm_has_itself_is_used_on_disk_too(
    make_offloading_world: MakeOffloadingWorld, admission: str, turns: int
) -> None:
    world = make_offloading_world(slots=8, disk_slots=12, settings={"ssd_admission": admission})
    assert keep_in_engine(world, turns) == [True] * 4
