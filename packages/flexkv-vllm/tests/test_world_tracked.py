# SPDX-License-Identifier: Apache-2.0
"""What FlexKV knows of a request, from the moment that it is queued until it has ended, under
vLLM's real scheduler."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, fill, prompts
from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from patience import wait_until
from vllm.v1.core.sched.output import SchedulerOutput

from flexkv.engine.choice.chooser import Left, LoadChoice
from flexkv.index.block_index import Block, BlockIndex
from flexkv.types.mover import Status
from flexkv_vllm.orders import StepMetadata
from packages.inside import board_of, chooser_of, copies_of, index_of
from packages.inside_adapters import (
    loads_of,
    polling_failures,
    stores_under_way,
    tables_of,
)
from packages.tier_blocks import ready_blocks

NOT_BEFORE_SOMEBODY_WAITS = (10**9, 10**9)
"""Polls of a late mover."""


def broken(*_: object) -> Any:
    raise RuntimeError("broken by the test")


def leased(world: World) -> list[bytes]:
    return [block.key for block in ready_blocks(index_of(world.cache)).values() if block.leases]


def test_a_request_that_reads_no_cache_looks_nothing_up(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(1, 4)
    fill(world, texts)
    looked: list[Any] = []
    for name in ("lookup", "fetch", "presence"):
        monkeypatch.setattr(world.cache, name, looked.append)
    add = world.scheduler.add_request

    def add_unread(request: Any) -> None:
        request.skip_reading_prefix_cache = True
        add(request)

    monkeypatch.setattr(world.scheduler, "add_request", add_unread)
    again = world.generate(texts[0])
    assert looked == []
    assert world.external_tokens[again] == 0


@pytest.mark.parametrize(
    ("question", "answer"),
    [("is_worth_waiting", False), ("choose_load", LoadChoice(0, Left.SLOW))],
    ids=["waiting", "loading"],
)
def test_blocks_that_a_request_does_not_load_are_not_kept_for_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, question: str, answer: object
) -> None:
    """While it computes they may leave."""
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(2, 4)
    fill(world, texts)
    monkeypatch.setattr(chooser_of(world.side), question, lambda *_args: answer)
    request_id = world.add(texts[0], max_tokens=50)
    wait_until(lambda: world.outputs[request_id], world.step)
    world.settle()
    assert leased(world) == []
    assert world.external_tokens[request_id] == 0


class DropsNothing:
    """An index that keeps blocks which proved unreadable."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def drop(self, blocks: Sequence[Block]) -> None:
        pass


def test_what_failed_is_not_offered_again(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks again for a request whose load failed from its first token on. Here the blocks are
    still found, as where another request has stored them meanwhile."""
    world = make_world()
    rng = random.Random(3)
    prompt = random_prompt(rng, 200)
    world.generate(prompt)
    world.forget()
    monkeypatch.setattr(world.cache, "_index", DropsNothing(index_of(world.cache)))
    (late,) = world.slow_down(rng, polls=(0, 0), failure_rate=1.0)
    world.generate(prompt)
    world.check_outputs()
    assert late.refused == 1 + world.cache.counters.failed_stores
    assert world.cache.counters.failed_loads == 1


def test_after_an_error_no_old_block_table_is_stored(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a step's orders are built: what vLLM gave in that step was not seen."""
    world = make_world(num_blocks=128, budget=64)
    prompt = random_prompt(random.Random(5), 300)
    first = world.add(prompt, max_tokens=40)
    world.step()
    with monkeypatch.context() as patch:
        patch.setattr(tables_of(world.side), "follow", broken)
        world.step()
    world.run()
    hashes = world.requests[first].block_hashes
    world.settle()
    assert set(ready_blocks(index_of(world.cache))) == set(hashes[:4])
    world.forget()
    again = world.generate(prompt)
    assert world.external_tokens[again] == 4 * BLOCK_TOKENS
    world.check_outputs()
    # What begins anew is stored as ever.
    world.forget()
    assert world.external_tokens[world.generate(prompt)] == 18 * BLOCK_TOKENS


def test_a_block_that_vllm_zeroes_first_is_not_stored(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does for some models, perhaps before workers are handed the fences."""
    world = make_world(num_blocks=40, budget=512)
    rng = random.Random(6)
    (late,) = world.slow_down(rng, polls=NOT_BEFORE_SOMEBODY_WAITS)
    prompt = random_prompt(rng, 300)
    world.generate(prompt, max_tokens=1)
    (rank,) = world.ranks
    build, fence = world.connector.build_connector_meta, rank.flexkv.handle_preemptions
    zeroed: list[int] = []

    def build_with_zeroes(output: SchedulerOutput) -> Any:
        zeroed[:] = [each for new in output.scheduled_new_reqs for each in new.block_ids[0]]
        return build(dataclasses.replace(output, new_block_ids_to_zero=zeroed))

    def fence_late(metadata: Any) -> None:
        for pages in rank.pages.values():
            pages[zeroed] = 0
        fence(metadata)

    with monkeypatch.context() as patch:
        patch.setattr(world.connector, "build_connector_meta", build_with_zeroes)
        patch.setattr(rank.flexkv, "handle_preemptions", fence_late)
        world.generate(random_prompt(rng, 30 * BLOCK_TOKENS), max_tokens=1)
    late.polls = (0, 0)
    world.forget()
    again = world.generate(prompt)
    world.check_outputs()
    assert world.external_tokens[again] == 0


@pytest.mark.skipif(
    "kv_cache_block_copies" not in SchedulerOutput.__dataclass_fields__,
    reason="vLLM copies blocks from 0.31 on",
)
def test_a_block_that_vllm_copies_another_to_is_not_stored(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it keeps a recurrent state in its prefix cache: no request has the block."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    world = make_world(num_blocks=64)
    rng = random.Random(6)
    (late,) = world.slow_down(rng, polls=NOT_BEFORE_SOMEBODY_WAITS)
    prompt = random_prompt(rng, 100)
    world.generate(prompt, max_tokens=1)
    (rank,) = world.ranks
    (store,) = stores_under_way(world.side).values()
    pool = world.scheduler.kv_cache_manager.block_pool.blocks
    free = min(store.engine_blocks)
    assert pool[free].ref_cnt == 0
    build, fence = world.connector.build_connector_meta, rank.flexkv.handle_preemptions

    def build_with_copy(output: SchedulerOutput) -> Any:
        copies = [KVCacheBlockCopy(src_block_id=0, dst_block_id=free)]
        return build(dataclasses.replace(output, kv_cache_block_copies=copies))

    def fence_late(metadata: Any) -> None:
        for pages in rank.pages.values():
            pages[free] = 0
        fence(metadata)

    with monkeypatch.context() as patch:
        patch.setattr(world.connector, "build_connector_meta", build_with_copy)
        patch.setattr(rank.flexkv, "handle_preemptions", fence_late)
        world.add(random_prompt(rng, BLOCK_TOKENS), max_tokens=1)
        world.step()
        assert all(free not in table for tables in rank.tables.values() for table in tables)
        world.run()
    late.polls = (0, 0)
    world.forget()
    again = world.generate(prompt)
    world.check_outputs()
    assert world.external_tokens[again] == 0


def test_a_load_waits_for_the_stores_that_read_its_blocks(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=40, budget=512)
    rng = random.Random(7)
    known = random_prompt(rng, 20 * BLOCK_TOKENS)
    world.generate(known)
    world.forget()
    (late,) = world.slow_down(rng, polls=NOT_BEFORE_SOMEBODY_WAITS)
    prompt = random_prompt(rng, 25 * BLOCK_TOKENS)
    world.generate(prompt, max_tokens=1)
    loads = world.add(known, max_tokens=1)
    late.polls = (0, 0)
    world.run()
    assert world.external_tokens[loads] == 20 * BLOCK_TOKENS
    world.forget()
    again = world.generate(prompt)
    assert world.external_tokens[again] == 25 * BLOCK_TOKENS
    world.check_outputs()


def test_a_prefix_of_the_disk_is_let_go_with_its_request(make_world: MakeWorld) -> None:
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(8, 4)
    fill(world, texts)
    request_id = world.add(texts[0], max_tokens=50)
    wait_until(lambda: world.outputs[request_id], world.step)
    assert world.external_tokens[request_id] == PROMPT_BLOCKS * BLOCK_TOKENS
    world.settle()
    assert leased(world) == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("what", ["loads", "stores"])
def test_what_a_worker_could_not_start_has_failed(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, what: str, ranks: int
) -> None:
    """On one rank: the others copy, and nobody waits for ever."""
    world = make_world(ranks=ranks)
    prompt = random_prompt(random.Random(9), 300)
    if what == "loads":
        world.generate(prompt)
        world.forget()
    worker = world.ranks[-1].side
    start = getattr(type(worker), f"start_{what}")
    hits = 0

    def start_none(self: Any, orders: Any) -> None:
        nonlocal hits
        if self is worker and getattr(orders, what) and not hits:
            hits += 1
            broken()
        start(self, orders)

    monkeypatch.setattr(type(worker), f"start_{what}", start_none)
    world.generate(prompt)
    world.settle()
    assert hits == 1
    world.check_outputs()
    counters = world.cache.counters
    assert (counters.failed_loads, counters.failed_stores) == (
        (1, 0) if what == "loads" else (0, 1)
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_once_a_worker_has_ended_its_copies_no_hit_is_offered(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """One load fails; then each request is as without FlexKV, though disk and arena have it."""
    world = make_world(slots=14, disk_slots=100, ranks=ranks)
    texts = prompts(21, 4)
    fill(world, texts)
    rank = world.ranks[-1]
    with monkeypatch.context() as patch:
        patch.setattr(rank.side, "fence", broken)
        rank.flexkv.handle_preemptions(StepMetadata(fences=[1]))
    world.generate(texts[0])
    counters = world.cache.counters
    assert counters.failed_loads == 1
    begun, fetched = (counters.loads, counters.stores), counters.fetched_blocks
    for text in [*texts, *texts]:
        world.forget()
        assert world.external_tokens[world.generate(text)] == 0
    assert (counters.loads, counters.stores) == begun
    assert counters.fetched_blocks == fetched
    world.check_outputs()


def test_an_error_with_one_ended_copy_hides_no_other(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(num_blocks=100, slots=100, budget=512)
    world.slow_down(random.Random(1), polls=NOT_BEFORE_SOMEBODY_WAITS)
    for seed in (2, 3):
        world.add(random_prompt(random.Random(seed), 4 * BLOCK_TOKENS + 1), max_tokens=40)
        world.step()
    stores, loads = stores_under_way(world.side), loads_of(world.side)
    first, _ = stores
    ended = loads.ended
    ending = lambda each: broken() if each.id == first else ended(each)  # noqa: E731
    monkeypatch.setattr(loads, "ended", ending)
    board = board_of(world.cache)
    cells = [each.transfer.cell for each in copies_of(world.cache)]
    statuses = {board.status(cell) for cell in cells}
    assert statuses == {Status.PENDING}
    for late in world.late_movers:
        late.catch_up()
    wait_until(lambda: {board.status(cell) for cell in cells} == {Status.DONE}, lambda: None)
    world.poll()
    assert len(stores) == 1
    world.poll()
    assert len(stores) == 0
    assert polling_failures(world.side) == 2
    monkeypatch.setattr(loads, "ended", ended)
