# SPDX-License-Identifier: Apache-2.0
"""A load of a pipeline has succeeded if it has on all stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from stage_queues import MeetingRanks, QueuedLinks, Wires

from flexkv_sglang.ranks import Ranks, StagedRanks
from flexkv_sglang.stages import StagedLoads


def request(rid: str, *, kept_out: bool = False) -> Any:
    return SimpleNamespace(rid=rid, skip_radix_cache_insert=kept_out)


class Stage:
    """One stage with its own view of the same requests."""

    def __init__(self, wires: Wires, number: int) -> None:
        self.links = QueuedLinks(wires, number)
        self.ranks = StagedRanks(Ranks(), MeetingRanks(wires, number), self.links)
        self.links.waits = False
        self.loads = StagedLoads(self.links)
        self.requests = {rid: request(rid, kept_out=rid == "own") for rid in ("a", "b", "own")}

    def compute(self, batch: int, rids: Sequence[str], landed: bool) -> None:
        for rid in rids:
            self.loads.queued(self.requests[rid])
        self.loads.computed(batch, rids, landed)

    def kept_out(self) -> list[str]:
        return [rid for rid, each in self.requests.items() if each.skip_radix_cache_insert]


@pytest.fixture(params=[2, 3])
def stages(request: pytest.FixtureRequest) -> list[Stage]:
    wires = Wires(request.param)
    return [Stage(wires, number) for number in range(request.param)]


def each_stage(stages: list[Stage], call: Callable[[Stage], object]) -> list[object]:
    return [call(stage) for stage in stages]


def test_requests_that_load_are_kept_out_of_the_tree_until_all_stages_have_loaded(
    stages: list[Stage],
) -> None:
    each_stage(stages, lambda stage: stage.compute(0, ["a", "own"], True))
    # SGLang computes the next batch before the result of this one arrives.
    each_stage(stages, lambda stage: stage.compute(1, ["b"], True))
    count = len(stages)
    assert each_stage(stages, Stage.kept_out) == [["a", "b", "own"]] * count
    assert each_stage(stages, lambda stage: stage.loads.take_verdict(0)) == [[]] * count
    assert each_stage(stages, Stage.kept_out) == [["b", "own"]] * count
    assert each_stage(stages, lambda stage: stage.loads.has(0)) == [False] * count
    assert each_stage(stages, lambda stage: stage.loads.has(1)) == [True] * count
    assert each_stage(stages, lambda stage: stage.loads.take_verdict(1)) == [[]] * count
    assert each_stage(stages, Stage.kept_out) == [["own"]] * count


def test_a_load_that_fails_on_one_stage_fails_on_all(stages: list[Stage]) -> None:
    for failing in range(len(stages)):
        for number, stage in enumerate(stages):
            stage.compute(failing, ["a", "b"], number != failing)
        for stage in stages:
            failed = stage.loads.take_verdict(failing)
            assert failed == [stage.requests["a"], stage.requests["b"]]
            assert stage.kept_out() == ["a", "b", "own"]
            stage.requests["a"].skip_radix_cache_insert = False


def test_a_request_whose_load_was_cancelled_is_let_in(stages: list[Stage]) -> None:
    for stage in stages:
        stage.loads.queued(stage.requests["a"])
        stage.loads.queued(stage.requests["a"])  # again, after it was looked up once more
        stage.compute(0, ["b"], True)
        assert stage.kept_out() == ["b", "own"]
    assert each_stage(stages, lambda stage: stage.loads.take_verdict(0)) == [[]] * len(stages)


def test_numbers_of_ranks_of_later_stages_follow(stages: list[Stage]) -> None:
    numbers = [stage.ranks for stage in stages]
    assert [each.rank for each in numbers] == list(range(len(stages)))
    assert {each.count for each in numbers} == {len(stages)}
