# SPDX-License-Identifier: Apache-2.0
"""FlexKV with a disk below a small arena, under vLLM's real scheduler; every byte is checked."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from disk_world import (
    PROMPT_BLOCKS,
    Hang,
    delay_reads,
    drive_of,
    fill,
    flip_a_byte,
    hits,
    keep_in_engine,
    prompts,
    read_a_block_a_step,
    settle_fetches,
    slabs,
)
from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from patience import wait_until
from traffic import SEEDS, Traffic, fetched, make_stems
from vllm.lora.request import LoRARequest
from world_config import DISK_TIMEOUT_SECONDS

from flexkv.client import FetchId, FetchState
from flexkv.engine.choice.cost import Span
from flexkv.engine.scheduler.request import TrackedRequest
from packages.inside import chooser_of, leaving_of
from packages.inside_adapters import fetches_of_loads, forget_stamps, loads_of, tracked_requests
from packages.inside_tiers import running_jobs, store_of

if TYPE_CHECKING:
    from packages.conftest import Clock


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("admission", ["write_through", "on_evict"])
def test_what_left_the_arena_comes_back_from_disk(
    make_world: MakeWorld, ranks: int, admission: str
) -> None:
    slots = {"write_through": 14, "on_evict": 48}[admission]
    world = make_world(
        slots=slots, disk_slots=200, ranks=ranks, settings={"ssd_admission": admission}
    )
    texts = prompts(1, 12)
    fill(world, texts)
    for text in texts:
        assert hits(world, text) == PROMPT_BLOCKS
        world.settle()
    assert world.cache.counters.fetched_blocks >= 4 * PROMPT_BLOCKS
    world.check_outputs()


def test_a_prompt_may_fill_the_arena(make_world: MakeWorld) -> None:
    """What a prefetch may not take is fetched once it is the prompt's turn."""
    world = make_world(slots=18, disk_slots=100)
    long = random_prompt(random.Random(14), 12 * BLOCK_TOKENS + 5)
    # In two parts: what waits to be written may fill half of the arena.
    fill(world, [long[: 6 * BLOCK_TOKENS], long])
    fill(world, prompts(15, 4))
    assert hits(world, long) == 12


def test_a_fetch_is_worth_no_more_than_it_brings(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what is computed behind it in any case: for that no slow disk need be waited for."""
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(20, 4)
    fill(world, texts)
    read_a_block_a_step(world)  # so that the prefetch has not brought all by the prompt's turn
    spans = []

    def noted(
        fetch: FetchId,
        span: Span,
        others: int,
        *,
        announced: bool,
        whole: bool,
        state: FetchState,
    ) -> bool:
        assert not announced
        assert not whole
        spans.append(span)
        return True

    monkeypatch.setattr(chooser_of(world.side), "is_worth_waiting", noted)
    known = texts[0][: PROMPT_BLOCKS * BLOCK_TOKENS]
    assert hits(world, known + random_prompt(random.Random(21), 100)) == PROMPT_BLOCKS
    assert set(spans) == {Span(0, len(known))}


def test_blocks_of_a_queued_request_are_fetched_before_its_turn(make_world: MakeWorld) -> None:
    world = make_world(slots=28, disk_slots=100, max_requests=1)
    texts = prompts(16, 6)
    fill(world, texts)
    running = world.add(prompts(17, 1)[0], max_tokens=200)
    world.step()
    world.add(texts[0])
    settle_fetches(world)
    assert world.cache.counters.fetched_blocks == PROMPT_BLOCKS
    assert world.scheduler.requests[running].num_output_tokens < 200
    world.run()
    assert world.cache.counters.fetched_blocks == PROMPT_BLOCKS
    world.check_outputs()


def test_what_the_engine_has_itself_is_not_prefetched(make_world: MakeWorld) -> None:
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(18, 5)
    for text in texts:
        world.generate(text)
        world.settle()
    world.add(texts[0])
    assert all(tracked.fetch is None for tracked in tracked_requests(world.side).values())
    world.run()
    assert world.cache.counters.fetched_blocks == 0


def test_an_adapter_of_the_same_name_with_other_weights_shares_nothing(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    (text,) = prompts(19, 1)
    (tmp_path / "adapter").mkdir()
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    adapter = LoRARequest("name", 1, str(weights.parent))
    found = []
    for content in (b"one", b"one", b"other"):
        if weights.read_bytes() != content:
            weights.write_bytes(content)
        forget_stamps()  # as in a new process
        world = make_world(slots=14, disk_slots=100)
        request_id = world.add(text, adapter=adapter)
        world.run()
        world.settle()
        found.append(world.external_tokens[request_id] // BLOCK_TOKENS)
        world.close()
    assert found == [0, PROMPT_BLOCKS, 0]


def test_second_hit_writes_what_was_loaded_once(make_world: MakeWorld) -> None:
    world = make_world(slots=16, disk_slots=100, settings={"ssd_admission": "second_hit"})
    once, twice = prompts(2, 2)
    fill(world, [once, twice])
    assert hits(world, twice) == PROMPT_BLOCKS
    world.settle()
    fill(world, prompts(3, 4))
    assert hits(world, once) == 0
    world.forget()
    assert hits(world, twice) == PROMPT_BLOCKS


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_engine_finds_what_the_last_one_wrote(make_world: MakeWorld, ranks: int) -> None:
    texts = prompts(4, 5)
    first = make_world(slots=14, disk_slots=100, ranks=ranks)
    fill(first, texts)
    first.close()
    second = make_world(slots=14, disk_slots=100, ranks=ranks, num_blocks=80)
    for text in texts:
        assert hits(second, text) == PROMPT_BLOCKS
    second.check_outputs()


def test_no_engine_finds_what_a_reset_forgot(make_world: MakeWorld) -> None:
    before, after = prompts(5, 2)
    first = make_world(slots=14, disk_slots=100)
    fill(first, [before])
    assert first.scheduler.reset_prefix_cache(reset_connector=True)
    assert hits(first, before) == 0
    fill(first, [after])
    assert hits(first, after) == PROMPT_BLOCKS
    first.close()
    # The weights that made `after` may not be those that the next engine loads.
    second = make_world(slots=14, disk_slots=100)
    assert hits(second, before) == hits(second, after) == 0


def test_other_weights_of_the_same_name_share_nothing(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    (text,) = prompts(6, 1)
    first = make_world(slots=14, disk_slots=100)
    fill(first, [text])
    first.close()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    assert hits(make_world(slots=14, disk_slots=100), text) == 0


def test_no_engine_block_is_held_while_the_disk_reads(make_world: MakeWorld) -> None:
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(7, 3)
    fill(world, texts)
    free = world.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    hang = Hang(world)
    request_id = world.add(texts[0])
    for _ in range(5):
        world.step()
        assert world.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    hang.end()
    world.run()
    assert world.external_tokens[request_id] == PROMPT_BLOCKS * BLOCK_TOKENS


def let_time_out(world: World, hang: Hang, clock: Clock, loads: int = 0) -> None:
    """Step until a read hangs and `loads` have begun in all, then let its time run out."""
    wait_until(lambda: hang.begun and world.cache.counters.loads >= loads, world.step)
    clock.skip(2 * DISK_TIMEOUT_SECONDS)


def test_a_disk_that_hangs_is_a_miss_and_is_left_alone(make_world: MakeWorld, clock: Clock) -> None:
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(8, 4)
    fill(world, texts)
    hang = Hang(world)
    first = world.add(texts[0])
    let_time_out(world, hang, clock)
    world.run()
    assert world.external_tokens[first] == 0
    assert world.cache.counters.stalled_fetches == 1
    assert not drive_of(world).readable
    assert hits(world, texts[1]) == 0
    assert world.cache.counters.stalled_fetches == 1
    hang.end()
    world.settle()
    assert hits(world, texts[2]) == PROMPT_BLOCKS
    world.check_outputs()


def test_an_abort_while_the_disk_reads_gives_everything_back(make_world: MakeWorld) -> None:
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(9, 4)
    fill(world, texts)
    hang = Hang(world)
    for text, steps in zip(texts[:3], (1, 1, 0), strict=True):
        request_id = world.add(text)
        for _ in range(steps):
            world.step()
        world.abort(request_id)
    hang.end()
    world.run()
    world.settle()
    assert hits(world, texts[3]) == PROMPT_BLOCKS


def test_damage_on_disk_is_a_miss(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(10, 5)
    fill(world, texts)
    (slab,) = slabs(tmp_path)
    slab.write_bytes(bytes(slab.stat().st_size))
    for text in texts[:4]:
        assert hits(world, text) == 0
        world.settle()
    assert world.cache.counters.failed_fetches > 0
    world.check_outputs()


@pytest.mark.parametrize("admission", ["write_through", "second_hit", "on_evict"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@SEEDS
def test_random_traffic_over_a_failing_disk_never_computes_on_a_wrong_byte(
    make_world: MakeWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    admission: str,
    asynchronous: bool,
    seed: int,
) -> None:
    """As without a disk, and bytes on disk change, reads take their time, loads begin as soon as
    something is there, and the engine is started anew in between."""
    rng = random.Random(seed)
    monkeypatch.setattr("flexkv.engine.scheduler.fetches.LOOKAHEAD_SECONDS", math.inf)
    stems = make_stems(rng, 6)

    def disturb() -> None:
        if rng.random() < 0.2:
            flip_a_byte(rng, slabs(tmp_path))

    for life in range(3):
        world = make_world(
            ranks=1 + seed % 2,
            num_blocks=40,
            slots=30,
            disk_slots=(40, 200)[life % 2],
            budget=96,
            lag=rng if asynchronous else None,
            settings={"ssd_admission": admission},
        )
        world.slow_down(rng, failure_rate=0.03)
        delay_reads(world, random.Random(seed))
        Traffic(
            world, rng, stems, most_steps=5, reset_rate=0.1, clear_rate=0.1, disturb=disturb
        ).run(60, until=[fetched])
        world.settle()
        world.assert_untracked()
        world.close()


def test_blocks_that_are_written_during_a_reset_leave_again_after_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(slots=30, disk_slots=200, settings={"ssd_admission": "on_evict"})
    drive = drive_of(world)
    write, ended = store_of(drive).write, threading.Event()
    world.closing.callback(ended.set)

    def late(*args: Any, **named: Any) -> Any:
        ended.wait()
        return write(*args, **named)

    monkeypatch.setattr(store_of(drive), "write", late)
    *texts, last = prompts(31, 5)
    leaving = leaving_of(world.cache)
    for text in (*texts, last[: PROMPT_BLOCKS // 2 * BLOCK_TOKENS]):
        world.generate(text)
    wait_until(lambda: running_jobs(drive.link) > 0, world.poll)
    before = set(leaving)
    assert len(before) == 1
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    for text in texts:  # again, as much as the arena has room for beside the writes
        world.generate(text)
    wait_until(lambda: set(leaving) - before, world.poll)
    assert {block.key for block in leaving} > {block.key for block in before}
    ended.set()
    world.settle()
    assert not leaving
    fill(world, texts)
    assert hits(world, texts[0]) == PROMPT_BLOCKS
    world.check_outputs()
    world.assert_at_rest()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_begins_before_its_end_is_read_only_where_failures_are_recomputed(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr("flexkv.engine.scheduler.fetches.LOOKAHEAD_SECONDS", math.inf)
    world = make_world(slots=14, disk_slots=100, policy=policy)
    texts = prompts(11, 4)
    fill(world, texts)
    hang = Hang(world, free=2)
    request_id = world.add(texts[0])
    wait_until(lambda: hang.begun and world.cache.counters.fetched_blocks == 2, world.step)
    for _ in range(10):
        world.step()
    assert (world.cache.counters.loads > 0) == (policy == "recompute")
    assert world.outputs[request_id] == []
    hang.end()
    world.run()
    assert world.external_tokens[request_id] == PROMPT_BLOCKS * BLOCK_TOKENS
    world.check_outputs()


def test_the_rest_of_a_load_that_does_not_come_is_computed(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr("flexkv.engine.scheduler.fetches.LOOKAHEAD_SECONDS", math.inf)
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(12, 4)
    fill(world, texts)
    hang = Hang(world, free=2)
    again = world.add(texts[0])
    let_time_out(world, hang, clock, loads=1)
    world.run()
    assert world.cache.counters.stalled_fetches == 1
    assert len(world.outputs[again]) == 4
    hang.end()
    world.settle()
    # An abort between two parts gives everything back.
    fill(world, prompts(13, 4))
    hang = Hang(world, free=2)
    request_id = world.add(texts[1])
    wait_until(lambda: world.cache.counters.loads > 1, world.step)
    world.abort(request_id)
    world.run()
    hang.end()
    world.settle()
    world.check_outputs()


def test_blocks_that_come_in_the_step_of_a_first_part_are_ordered_in_the_next(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has one order for a request: a second one would take the place of the first."""
    monkeypatch.setattr("flexkv.engine.scheduler.fetches.LOOKAHEAD_SECONDS", math.inf)
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(14, 4)
    fill(world, texts)
    hang = Hang(world, free=2)
    request_id = world.add(texts[0])
    loads = loads_of(world.side)
    begin, parts = loads.begin, []

    def come_meanwhile(tracked: TrackedRequest, *args: Any) -> None:
        begin(tracked, *args)
        parts.append(tracked in loads.unfinished)  # the rest is still read
        fetches = fetches_of_loads(world.side)
        hang.end()
        wait_until(lambda: not fetches.is_waiting(tracked), world.poll)

    monkeypatch.setattr(loads, "begin", come_meanwhile)
    world.run()
    assert parts == [True]
    assert world.cache.counters.loads >= 2
    assert world.external_tokens[request_id] == PROMPT_BLOCKS * BLOCK_TOKENS
    world.check_outputs()


@pytest.mark.parametrize(("admission", "turns"), [("write_through", 12), ("second_hit", 1)])
def test_what_vllm_has_itself_is_used_on_disk_too(
    make_world: MakeWorld, admission: str, turns: int
) -> None:
    world = make_world(slots=8, disk_slots=12, settings={"ssd_admission": admission})
    assert keep_in_engine(world, turns) == [True] * 4
