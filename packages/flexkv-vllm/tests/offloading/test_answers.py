# SPDX-License-Identifier: Apache-2.0
"""Every call of vLLM's offloading connector is answered, whatever is broken behind it."""

from __future__ import annotations

from typing import Any

from broken import Broken, public
from offloading_world import MakeOffloadingWorld
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)

from flexkv.types.changes import Medium
from flexkv_vllm.compat.core import hit_source
from flexkv_vllm.offloading.manager import (
    ArenaBlocks,
    FlexKVOffloadingManager,
    _nothing_to_store,
)
from flexkv_vllm.offloading.worker import FlexKVOffloadingWorker, Job
from packages.inside_adapters import jobs_of, requests_of_manager, switch_on

KEY = OffloadKey(b"key")
CONTEXT = ReqContext("r")
PAGES = GPULoadStoreSpec([3, 4], [2], [0])

MANAGER = {
    "on_new_request": ((CONTEXT,), RequestOffloadingContext()),
    "on_request_finished": ((CONTEXT,), None),
    "lookup": ((KEY, CONTEXT), LookupResult.MISS),
    "get_load_source": ((KEY, CONTEXT), hit_source(Medium.HOST)),
    "prepare_load": (([KEY], CONTEXT), ArenaBlocks()),
    "complete_load": (([KEY], CONTEXT), None),
    "prepare_store": (([KEY], CONTEXT), _nothing_to_store()),
    "complete_store": (([KEY], CONTEXT), None),
    "on_schedule_end": ((None,), None),
    "has_pending_work": ((), False),
    "reset_cache": ((), None),
    "take_events": ((), ()),
    "get_stats": ((), None),
    "shutdown": ((), None),
}
WORKER = {
    "submit_store": ((1, PAGES, ArenaBlocks(5, [0])), True),
    "submit_load": ((2, ArenaBlocks(6, [0]), PAGES), True),
    "wait": (({1},), None),
    "unregister_kv_caches": ((), None),
    "restore_kv_caches": ((), None),
    "shutdown": ((), None),
}
RAISE = {"get_finished"}
"""An error in it ends the worker: nobody would know which loads have failed."""


def test_no_call_of_vllm_is_left_out() -> None:
    assert public(FlexKVOffloadingManager) == set(MANAGER)
    assert public(FlexKVOffloadingWorker) == {*WORKER, *RAISE}


def swap(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Break these parts of `owner`; returns what they were."""
    before = {name: getattr(owner, name) for name in names}
    for name in names:
        setattr(owner, name, Broken())
    return before


def test_a_broken_manager_answers_all_calls(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world(events=True)
    manager = world.manager
    parts = ("_cache", "_figures", "_idle_steps", "_events", "_maker", "_weights")
    before = swap(manager, parts)
    for name, (arguments, answer) in MANAGER.items():
        assert getattr(manager, name)(*arguments) == answer, name
    for name, part in before.items():
        setattr(manager, name, part)
    # A reset that failed may have left outdated blocks.
    assert manager.lookup(KEY, CONTEXT) is LookupResult.MISS
    assert requests_of_manager(manager) == {}
    switch_on(manager)


def test_a_broken_worker_answers_all_calls(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world()
    (rank,) = world.ranks
    worker: Any = rank.worker
    before = swap(worker, ("_groups", "_arena", "_session"))
    for name, (arguments, answer) in WORKER.items():
        assert getattr(worker, name)(*arguments) == answer, name
    # The jobs end as failed, the load with its blocks.
    stored, loaded = jobs_of(worker)[1], jobs_of(worker)[2]
    assert isinstance(stored, Job)
    assert stored.failed
    assert loaded.failed
    assert (stored.blocks.cell, loaded.blocks.cell) == (5, 6)
    jobs_of(worker).clear()
    for name, part in before.items():
        setattr(worker, name, part)
