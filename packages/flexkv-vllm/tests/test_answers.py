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
from flexkv.engine.scheduler.side import RequestSide
from flexkv.types.mover import Status
from flexkv.types.troubles import Problem, Trouble
from flexkv_vllm.connector import FlexKVConnectorV1
from flexkv_vllm.intree_connector import FlexKVConnectorV1Impl
from flexkv_vllm.orders import StepMetadata, WorkerReport
from flexkv_vllm.worker_calls import WorkerCalls
from packages.inside import board_of, cache_of, copies_of, fail_resets, index_of
from packages.inside_adapters import (
    fail_by_request,
    failed_requests,
    failures_of,
    note_received,
    scheduler_of,
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
}


def test_no_call_of_vllm_is_left_out() -> None:
    known = {*SCHEDULER, *WORKER, *RAISE, *WITHOUT_INSTANCE, *NOT_CALLED_BROKEN}
    assert public(FlexKVConnectorV1, WorkerCalls, FlexKVConnectorV1Impl) <= known


def break_scheduler(connector: Any, side: RequestSide[StepMetadata]) -> None:
    """From now on, nothing works behind the calls of the scheduler's side."""
    failures_of(connector).clear()
    broken: RequestSide[StepMetadata] = RequestSide.__new__(RequestSide)
    kept = {"is_off", "_make_orders", "_promises"}  # what ends what vLLM waits for
    vars(broken).update(
        {name: part if name in kept else Broken() for name, part in vars(side).items()}
    )
    set_scheduler(connector, broken)


def break_worker(connector: Any) -> None:
    """From now on, nothing works in the worker's side."""
    failures_of(connector).clear()
    set_worker(connector, Broken())


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
    side = scheduler_of(ours)
    call(ours, SCHEDULER, lambda: break_scheduler(ours, side))
    set_scheduler(ours, side)


@pytest.mark.parametrize("entry", [PLUGIN, IN_TREE], ids=["plugin", "in-tree"])
def test_a_broken_worker_side_answers_all_calls(make_world: MakeWorld, entry: str) -> None:
    world = make_world(entry=entry)
    (rank,) = world.ranks
    ours: Any = rank.flexkv
    side = worker_of(ours)
    rank.connector.bind_connector_metadata(BESIDE)
    call(ours, WORKER, lambda: break_worker(ours))
    rank.connector.clear_connector_metadata()
    set_worker(ours, side)


def begin_step(connector: Any, orders: StepMetadata) -> None:
    """A worker begins a step with these orders."""
    connector.bind_connector_metadata(orders)
    connector.start_load_kv(None)


def test_where_it_is_unknown_which_loads_failed_all_that_end_count(make_world: MakeWorld) -> None:
    world = make_world()
    connector: Any = world.ranks[0].flexkv
    side = worker_of(connector)
    set_worker(connector, Broken())
    begin_step(connector, ASYNC)
    connector.get_finished(set())
    assert connector.get_block_ids_with_load_errors() == failed_requests(connector) == set()
    begin_step(connector, StepMetadata())
    set_worker(connector, side)
    note_received(side, "r")
    assert connector.get_finished(set()) == (None, {"r"})
    set_worker(connector, Broken())
    assert failed_requests(connector) == {"r"}
    assert connector.get_block_ids_with_load_errors() == {5, 6}
    fail_by_request(connector, True)
    assert connector.get_block_ids_with_load_errors() == set()
    set_worker(connector, side)
    fail_by_request(connector, False)
    connector.clear_connector_metadata()


def test_a_report_that_fails_still_ends_its_step(make_world: MakeWorld) -> None:
    world = make_world()
    connector: Any = world.ranks[0].flexkv
    side = worker_of(connector)
    set_worker(connector, Broken())
    connector.bind_connector_metadata(ASYNC)
    assert connector.build_connector_worker_meta() == WorkerReport(0, 0.0, 7)
    connector.clear_connector_metadata()
    set_worker(connector, side)


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
    world.ranks[0].flexkv.get_kv_connector_stats()
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
        connector, told = world.ranks[0].flexkv, list[set[int]]()
        take = connector.get_block_ids_with_load_errors
        patch.setattr(
            connector,
            "get_block_ids_with_load_errors",
            lambda: told.append(take()) or told[-1],
        )
        second = world.generate(prompt)
    (blocks,) = filter(None, told)
    assert len(blocks) == 10
    assert failures_of(connector)["the call wait_for_layer"] > 0
    assert world.outputs[second] == world.outputs[first]
    world.check_outputs()
