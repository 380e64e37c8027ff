# SPDX-License-Identifier: Apache-2.0
"""SGLang's own calls that change weights end what FlexKV has stored; without an engine."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang_world import Rank, hashes_of  # type: ignore[import-not-found]

from flexkv_sglang import hooks

KEEP_WEIGHTS = {
    "check_weights",
    "destroy_weights_update_group",
    "flush_cache_after_weight_update",
    "get_weights_by_name",
    "init_weights_update_group",
    "record_weight_version_after_update",
    "release_memory_occupation",
    "resume_memory_occupation",
    "save_remote_model",
    "save_sharded_model",
}


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    hooks.serve(made.side)
    yield made
    hooks.leave(made.side)
    made.close()


def make_updater() -> SchedulerWeightUpdaterManager:
    """SGLang's object in a process of its own, which other processes need not wait for."""
    updater = object.__new__(SchedulerWeightUpdaterManager)
    updater.tp_worker = SimpleNamespace(weight_update_runners=list)
    updater.draft_worker = None
    updater.tp_cpu_group = None
    updater._session = None
    return updater


def test_every_call_that_changes_weights_is_hooked() -> None:
    methods = inspect.getmembers(SchedulerWeightUpdaterManager, inspect.isfunction)
    public = {name for name, _ in methods if not name.startswith("_")}
    assert public - KEEP_WEIGHTS == set(hooks._UPDATES)


def test_weights_that_come_without_a_call_end_what_was_stored(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a session, other programs may write weights by RDMA. Nothing that is stored meanwhile is
    found afterwards."""
    monkeypatch.setattr("torch.distributed.barrier", lambda group: None)
    before, meanwhile = hashes_of("before", 2), hashes_of("meanwhile", 2)
    updater = make_updater()
    assert rank.store(before, [1, 2])
    assert rank.side.lookup("a", before) == [2]
    assert updater.begin_weight_update(BeginWeightUpdateReqInput()).success
    assert rank.side.lookup("b", before) == []
    assert rank.store(meanwhile, [3, 4])
    assert rank.side.lookup("c", meanwhile) == [2]
    assert updater.end_weight_update(EndWeightUpdateReqInput()).success
    assert rank.side.lookup("d", before) == rank.side.lookup("e", meanwhile) == []


def test_memory_is_released_once_no_copy_reads_it(rank: Rank) -> None:
    """SGLang unmaps its pages before it flushes its cache. Offloads are no work in its eyes."""
    under_way: list[int] = []

    def pause(tag: str) -> None:
        under_way.append(len(rank.side._worker._stores))

    updater = make_updater()
    updater.scheduler = None
    updater.is_fully_idle = lambda ignore_waiting: True
    updater.offload_tags = set()
    updater.memory_saver_adapter = SimpleNamespace(pause=pause)
    updater.flush_cache = rank.side.reset
    rank.side.offload(hashes_of("a", 2), lambda: [1, 2])
    assert len(rank.side._worker._stores) == 1
    updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
    assert under_way == [0]
    assert rank.side.lookup("r", hashes_of("a", 2)) == [2]
