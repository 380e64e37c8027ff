# SPDX-License-Identifier: Apache-2.0
"""Every call from vLLM is answered, whatever is broken behind it: also what follows an error."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from broken import Broken, BrokenError, public, raise_broken
from engine_world import MakeWorld, World, random_prompt
from vllm.v1.outputs import KVConnectorOutput
from world_config import IN_TREE, PLUGIN

from flexkv.client import Reset
from flexkv.engine.orders import CopyOrder
from flexkv.engine.scheduler.scheduled_step import ScheduledStep
from flexkv.engine.scheduler.side import RequestSide
from flexkv.types.mover import Status
from flexkv.types.troubles import Problem, Trouble
from flexkv_vllm.connector import FlexKVConnectorV1
from flexkv_vllm.intree_connector import FlexKVConnectorV1Impl
from flexkv_vllm.orders import StepMetadata, WorkerReport
from flexkv_vllm.scheduler_calls import SchedulerCalls
from packages.inside import board_of, cache_of, copies_of, fail_resets, index_of
from packages.inside_adapters import (
    adapter_of,
    fail_by_request,
    failures_of,
    note_received,
    orders_of,
    scheduler_of,
    set_adapter,
    set_scheduler,
    set_worker,
    worker_of,
)
from packages.tier_blocks import ready_blocks

ASYNC = StepMetadata(loads={"r": CopyOrder(1, 1, [5, 6], [0, 1])}, proves=7)
BESIDE = StepMetadata(layerwise=[CopyOrder(2, 2, [7], [2])], unfilled=[8], fences=[1])

Calls = Mapping[str, tuple[tuple[Any, ...], Any]]
"""Arguments and answer of each method."""

SCHEDULER: Calls = {
    "bind_gpu_block_pool": ((None,), None),
    "on_new_request": ((None,), None),
    "get_num_new_matched_tokens": ((None, 0), (0, False)),
    "update_state_after_alloc": ((None, None, 0), None),
    "build_connector_meta": ((None,), StepMetadata()),
    "update_connector_output": ((KVConnectorOutput(invalid_block_ids={1}),), None),
    "request_finished": ((None, []), (False, None)),
    "request_finished_all_groups": ((None, ([],)), (False, None)),
    "get_loaded_kv_cache_group_ids": ((None,), ()),
    "take_events": ((), []),
    "reset_cache": ((), False),
    "has_pending_push_work": ((), False),
    "get_external_cache_hit_sources": ((None, 0), {}),
    "get_kv_connector_stats": ((), None),
    "shutdown": ((), None),
}
WORKER: Calls = {
    "handle_preemptions": ((BESIDE,), None),
    "start_load_kv": ((None,), None),
    "wait_for_layer_load": (("layer0",), None),
    "save_kv_layer": (("layer0", None, None), None),
    "wait_for_save": ((), None),
    "get_finished": ((set(),), (None, None)),
    "get_block_ids_with_load_errors": ((), {7, 8}),
    "build_connector_worker_meta": ((), WorkerReport(0, 0.0, 0)),
    "unregister_kv_caches": ((), None),
    "restore_kv_caches": ((), None),
}
RAISE = {"register_kv_caches"}
"""Errors at start end the engine."""
WITHOUT_INSTANCE = {
    "requires_piecewise_for_cudagraph",
    "build_kv_connector_stats",
    "supports_sleep_mode",
}
NOT_CALLED_BROKEN = {
    "build_prom_metrics",
    "requires_kv_delivery",  # a constant
    "get_transfer_results",  # as `get_finished`
    "start_worker",
}


def test_no_call_of_vllm_is_left_out() -> None:
    known = {*SCHEDULER, *WORKER, *RAISE, *WITHOUT_INSTANCE, *NOT_CALLED_BROKEN}
    assert public(FlexKVConnectorV1, SchedulerCalls, FlexKVConnectorV1Impl) <= known


def break_scheduler(adapter: Any, side: RequestSide[StepMetadata]) -> None:
    """From now on, nothing works behind the calls of the scheduler's side."""
    failures_of(adapter).clear()
    broken: RequestSide[StepMetadata] = RequestSide.__new__(RequestSide)
    kept = {"is_off", "_make_orders", "_promises"}  # what ends what vLLM waits for
    vars(broken).update(
        {name: part if name in kept else Broken() for name, part in vars(side).items()}
    )
    set_scheduler(adapter, broken)


def break_worker(adapter: Any) -> None:
    """From now on, nothing works in the worker's side."""
    failures_of(adapter).clear()
    set_worker(adapter, Broken())


def call(connector: Any, calls: Calls, again: Callable[[], None]) -> None:
    for name, (arguments, answer) in calls.items():
        method = getattr(connector, name, None)
        if method is None:
            continue  # of the plugin only
        again()
        assert method(*arguments) == answer, name


@pytest.mark.parametrize("entry", [PLUGIN, IN_TREE], ids=["plugin", "in-tree"])
def test_a_broken_scheduler_side_answers_all_calls(make_world: MakeWorld, entry: str) -> None:
    world = make_world(entry=entry)
    connector = world.connector
    ours = getattr(connector, "_flexkv_connector", connector)
    adapter = adapter_of(ours)
    side = scheduler_of(adapter)
    call(ours, SCHEDULER, lambda: break_scheduler(adapter, side))
    set_scheduler(adapter, side)


@pytest.mark.parametrize("entry", [PLUGIN, IN_TREE], ids=["plugin", "in-tree"])
def test_a_broken_worker_side_answers_all_calls(make_world: MakeWorld, entry: str) -> None:
    world = make_world(entry=entry)
    (rank,) = world.ranks
    adapter: Any = rank.adapter
    side = worker_of(adapter)
    connector: Any = getattr(rank, "connector", None)
    if connector is None:
        connector = FlexKVConnectorV1.__new__(FlexKVConnectorV1)
        set_adapter(connector, adapter)
    connector.bind_connector_metadata(BESIDE)
    ours = getattr(connector, "_flexkv_connector", connector)
    call(ours, WORKER, lambda: break_worker(adapter))
    set_worker(adapter, side)


def test_where_it_is_unknown_which_loads_failed_all_that_end_count(make_world: MakeWorld) -> None:
    world = make_world()
    adapter: Any = world.ranks[0].adapter
    side = worker_of(adapter)
    set_worker(adapter, Broken())
    adapter.start_loads(ASYNC)
    adapter.get_finished(ASYNC)
    assert adapter.take_bad_blocks() == adapter.take_failed_requests() == set()
    adapter.start_loads(StepMetadata())
    set_worker(adapter, side)
    note_received(side, "r")
    assert adapter.get_finished(StepMetadata()) == (None, {"r"})
    set_worker(adapter, Broken())
    assert adapter.take_failed_requests() == {"r"}
    assert adapter.take_bad_blocks() == {5, 6}
    fail_by_request(adapter, True)
    assert adapter.take_bad_blocks() == set()
    set_worker(adapter, side)
    fail_by_request(adapter, False)


def test_a_report_that_fails_still_ends_its_step(make_world: MakeWorld) -> None:
    world = make_world()
    adapter: Any = world.ranks[0].adapter
    side = worker_of(adapter)
    set_worker(adapter, Broken())
    assert adapter.step_report(ASYNC) == WorkerReport(0, 0.0, 7)
    set_worker(adapter, side)


@pytest.mark.parametrize(
    "broken",
    [("_build_orders", "_lose_track"), ("_end", "_abandon"), ("reset",)],
    ids=lambda names: names[0],
)
def test_after_an_error_in_what_follows_an_error_flexkv_is_off_and_the_engine_goes_on(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]
) -> None:
    world = make_world()
    rng = random.Random(1)
    prompt = random_prompt(rng, 100)
    world.generate(prompt)
    side = world.side
    if broken == ("reset",):
        fail_resets(monkeypatch, world.cache, Reset.SUSPEND, BrokenError())
    else:
        for name in broken:
            monkeypatch.setattr(RequestSide, name, raise_broken)
    if broken == ("reset",):
        assert not world.scheduler.reset_prefix_cache(reset_connector=True)
    world.generate(random_prompt(rng, 40))
    assert side.is_off
    world.ranks[0].adapter.take_stats()
    assert side.has_figures or side.figures.health == (Problem(Trouble.LOST_TRACK),)
    world.forget()
    again = world.generate(prompt)
    assert world.external_tokens[again] == 0
    world.check_outputs()
    monkeypatch.undo()
    closed = cache_of(side).close
    ended: list[float] = []
    monkeypatch.setattr(cache_of(side), "close", lambda seconds: ended.append(seconds) or closed())
    world.close()
    assert len(ended) == 1


@pytest.mark.parametrize("mode", ["async", "layerwise"])
@pytest.mark.parametrize(
    "broken",
    [("_begin", "_refuse"), ("_build_orders", "_lose_track"), ("_build_orders", "_take_orders")],
    ids="".join,
)
def test_a_load_whose_order_two_errors_lose_is_computed(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...], mode: str
) -> None:
    world = make_world(settings={"load_mode": mode}, budget=512)
    rng = random.Random(3)
    prompt = random_prompt(rng, 160)
    first = world.generate(prompt)
    world.forget()
    for name in broken:
        monkeypatch.setattr(RequestSide, name, raise_broken)
    second = world.add(prompt)
    aborted = world.add([*prompt[:100], *random_prompt(rng, 30)])
    world.step()
    world.abort(aborted)
    world.run()
    assert not world.is_on
    assert world.outputs[second] == world.outputs[first]
    world.check_outputs()


def test_blocks_that_vllm_holds_are_released_though_two_errors_lose_the_order(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(entry=IN_TREE)
    world.slow_down(random.Random(4), (3, 6))
    build = RequestSide._build_orders

    def fail_with_releases(side: Any, step: ScheduledStep) -> StepMetadata:
        if orders_of(side).releases:
            raise_broken()
        orders: StepMetadata = build(side, step)
        return orders

    monkeypatch.setattr(RequestSide, "_build_orders", fail_with_releases)
    monkeypatch.setattr(RequestSide, "_lose_track", raise_broken)
    world.generate(random_prompt(random.Random(5), 100))
    assert not world.is_on
    world.check_outputs()


def test_a_store_that_runs_while_flexkv_is_turned_off_is_not_published(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing kept vLLM from giving its blocks to other requests."""
    world = make_world()
    world.slow_down(random.Random(4), (50, 60))
    world.add(random_prompt(random.Random(9), 100))
    for _ in range(3):
        world.step()
    cache = world.cache
    (running,) = copies_of(cache)
    assert not running.done
    for broken in ("_build_orders", "_lose_track"):
        monkeypatch.setattr(RequestSide, broken, raise_broken)
    world.run()
    board_of(cache).report(running.transfer.cell, 0, Status.DONE)
    world.connector.shutdown()
    assert running.done
    assert ready_blocks(index_of(cache)) == {}


def test_an_error_while_a_layer_waits_is_told_to_vllm(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are computed again, though they may have arrived."""
    world: World = make_world(settings={"load_mode": "layerwise"}, budget=512)
    prompt = random_prompt(random.Random(2), 160)
    first = world.generate(prompt)
    world.forget()
    with monkeypatch.context() as patch:
        patch.setattr(type(world.ranks[0].side), "wait_for_layer", raise_broken)
        take = world.ranks[0].adapter.take_bad_blocks
        told: list[set[int]] = []
        patch.setattr(
            world.ranks[0].adapter, "take_bad_blocks", lambda: told.append(take()) or told[-1]
        )
        second = world.generate(prompt)
    (blocks,) = filter(None, told)
    assert len(blocks) == 10
    assert failures_of(world.ranks[0].adapter)["the call wait_for_layer"] > 0
    assert world.outputs[second] == world.outputs[first]
    world.check_outputs()
