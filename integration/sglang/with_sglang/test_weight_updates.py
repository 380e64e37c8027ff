# SPDX-License-Identifier: Apache-2.0
"""SGLang's own calls that change weights end what FlexKV has stored; without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    EndWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.utils.weight_checker import WeightChecker
from sglang.utils import TypeBasedDispatcher
from sglang_world import Rank, hashes_of  # type: ignore[import-not-found]

from flexkv_sglang import hooks


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


def dispatcher_of(updater: SchedulerWeightUpdaterManager) -> TypeBasedDispatcher:
    """What SGLang's scheduler handles its requests with."""
    return TypeBasedDispatcher(
        [
            (BeginWeightUpdateReqInput, updater.begin_weight_update),
            (EndWeightUpdateReqInput, updater.end_weight_update),
            (CheckWeightsReqInput, updater.check_weights),
        ]
    )


class _Runner:
    """A model of one tensor, and SGLang's own checker of its weights."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 4)
        checker = object.__new__(WeightChecker)
        checker._get_model = lambda: self.model
        self.check_weights = checker.handle


def test_random_weights_find_no_page_of_the_true_ones(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 1)
    runner, pages = _Runner(), hashes_of("a", 2)
    updater = make_updater()
    updater.tp_worker = SimpleNamespace(weight_update_runners=lambda: [("target", runner)])
    handle = dispatcher_of(updater)
    assert rank.store(pages, [1, 2])
    before = runner.model.weight.detach().clone()
    with torch.no_grad():
        assert handle(CheckWeightsReqInput(action="snapshot")).success
        assert rank.lookup("a", pages) == [2]
        assert handle(CheckWeightsReqInput(action="reset_tensors")).success
    assert not torch.equal(runner.model.weight, before)
    assert rank.lookup("b", pages) == []


def test_weights_that_come_without_a_call_end_what_was_stored(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a session, other programs may write weights by RDMA. Nothing that is stored meanwhile is
    found afterwards."""
    monkeypatch.setattr("torch.distributed.barrier", lambda group: None)
    before, meanwhile = hashes_of("before", 2), hashes_of("meanwhile", 2)
    handle = dispatcher_of(make_updater())
    assert rank.store(before, [1, 2])
    assert rank.lookup("a", before) == [2]
    assert handle(BeginWeightUpdateReqInput()).success
    assert rank.lookup("b", before) == []
    assert rank.store(meanwhile, [3, 4])
    assert rank.lookup("c", meanwhile) == [2]
    assert handle(EndWeightUpdateReqInput()).success
    assert rank.lookup("d", before) == rank.lookup("e", meanwhile) == []


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
    assert rank.lookup("r", hashes_of("a", 2)) == [2]
