# SPDX-License-Identifier: Apache-2.0
"""Two stages of a pipeline, of which the second makes each call only after the first one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sglang_world import PATIENCE_SECONDS, Rank, hashes_of, make_pool, same, write_weights
from stage_queues import MeetingRanks, QueuedLinks, Wires

from flexkv_sglang.ranks import Ranks, StagedRanks
from packages.inside import cache_of
from packages.inside_adapters import worker_of

PAGES, OTHERS = [1, 2, 3], [7, 8, 9]


class Pipeline:
    """Two stages; all calls are made on one after the other.

    Args:
        folder: of both.
        layer: number of the second stage's layer.
        settings: FlexKV's.
    """

    def __init__(self, folder: Path, layer: int = 2, **settings: Any) -> None:
        write_weights(folder)
        wires = Wires(2)
        self.links = [QueuedLinks(wires, stage) for stage in range(2)]

        def start(stage: int) -> Rank:
            pool = make_pool(layers=2 - stage)
            if stage == 1:
                pool.start_layer = layer
                (described,) = pool.get_device_pool_infos()
                described.layer_ids = (layer,)
            ranks = StagedRanks(Ranks(), MeetingRanks(wires, stage), self.links[stage])
            return Rank(folder, ranks=ranks, pool=pool, settings=settings)

        with ThreadPoolExecutor(2) as threads:
            self.stages = list(threads.map(start, range(2)))
        for each in self.links:
            each.waits = False

    def store(self, hashes: Sequence[str], pages: Sequence[int]) -> list[bool]:
        for stage in self.stages:
            stage.side.offload(hashes, lambda: pages)
        self.await_offloads(1)
        return [stage.side.take_offload() for stage in self.stages]

    def await_offloads(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (ended := [stage.side.ended_offloads() for stage in self.stages]) != [count] * 2:
            assert ended[0] == ended[1]
            assert time.monotonic() < deadline

    def agree(self, rid: str, hashes: Sequence[str]) -> list[int]:
        return [stage.side.agree_on_length(stage.lookup(rid, hashes)) for stage in self.stages]

    def load(
        self, rid: str, hashes: Sequence[str], pages: Sequence[Sequence[int] | None]
    ) -> list[bool]:
        return [
            stage.side.load(rid, hashes, its) for stage, its in zip(self.stages, pages, strict=True)
        ]

    def finish(self) -> list[bool]:
        """Compute the batch, one stage after the other."""
        landed = []
        for stage in self.stages:
            stage.side.start_batch()
            for layer in range(stage.pages.layers):
                stage.side.wait_for_layer(layer)
            landed.append(stage.side.finish_batch())
        return landed

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path)
    yield made
    made.close()


def test_each_stage_gets_its_own_layers_back(pipeline: Pipeline) -> None:
    hashes = hashes_of("a", 3)
    stored = [stage.fill(PAGES, seed) for seed, stage in enumerate(pipeline.stages)]
    assert pipeline.store(hashes, PAGES) == [True, True]
    assert pipeline.agree("r", hashes) == [3, 3]
    assert pipeline.load("r", hashes, [OTHERS, OTHERS]) == [True, True]
    assert pipeline.finish() == [True, True]
    for stage, wanted in zip(pipeline.stages, stored, strict=True):
        assert same(stage.read(OTHERS), wanted)


def test_an_offload_has_not_ended_before_the_last_stage_has_copied(pipeline: Pipeline) -> None:
    first, last = (stage.side for stage in pipeline.stages)
    for stage in pipeline.stages:
        stage.fill(PAGES, 1)
    first.offload(hashes_of("a", 3), lambda: PAGES)
    first.await_copies()
    assert first.ended_offloads() == 0  # the last stage has not heard of it yet
    last.offload(hashes_of("a", 3), lambda: PAGES)
    assert last.ended_offloads() == 0
    pipeline.await_offloads(1)
    assert [first.take_offload(), last.take_offload()] == [True, True]


def test_stages_take_the_ends_of_offloads_from_the_first_one(pipeline: Pipeline) -> None:
    first, last = (stage.side for stage in pipeline.stages)
    for name in ("a", "b"):
        for stage in pipeline.stages:
            stage.side.offload(hashes_of(name, 3), lambda: PAGES)
    last.await_copies()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (ended := first.ended_offloads()):
        assert last.ended_offloads() == 0
        assert time.monotonic() < deadline
    assert last.ended_offloads() == ended
    assert pipeline.links[0].steps == pipeline.links[1].steps > 0


def test_a_store_that_fails_on_the_last_stage_is_stored_nowhere(pipeline: Pipeline) -> None:
    hashes = hashes_of("a", 3)
    pipeline.stages[0].side.offload(hashes, lambda: PAGES)
    pipeline.stages[1].side.offload(hashes, lambda: None)
    pipeline.await_offloads(1)
    assert [stage.side.take_offload() for stage in pipeline.stages] == [False, False]
    assert pipeline.agree("r", hashes) == [0, 0]


def test_a_load_without_pages_on_the_first_stage_is_a_miss_on_both(pipeline: Pipeline) -> None:
    hashes = hashes_of("a", 3)
    pipeline.store(hashes, PAGES)
    assert pipeline.agree("r", hashes) == [3, 3]
    assert pipeline.load("r", hashes, [None, OTHERS]) == [False, False]


def test_a_load_without_pages_on_the_last_stage_fails_there(pipeline: Pipeline) -> None:
    hashes = hashes_of("a", 3)
    pipeline.store(hashes, PAGES)
    assert pipeline.agree("r", hashes) == [3, 3]
    assert pipeline.load("r", hashes, [OTHERS, None]) == [True, True]
    assert pipeline.finish() == [True, False]
    # The lease has ended all the same.
    for stage in pipeline.stages:
        stage.side.loads_known(0)
    cache = cache_of(pipeline.stages[0].side)
    assert cache is not None
    deadline = time.monotonic() + PATIENCE_SECONDS
    while cache.busy:
        pipeline.await_offloads(0)
        assert time.monotonic() < deadline


def test_loads_are_under_way_until_it_is_known_how_they_ended(pipeline: Pipeline) -> None:
    hashes = hashes_of("a", 3)
    pipeline.store(hashes, PAGES)
    pipeline.agree("r", hashes)
    pipeline.load("r", hashes, [OTHERS, OTHERS])
    pipeline.finish()
    assert [stage.side.is_loading for stage in pipeline.stages] == [True, True]
    for stage in pipeline.stages:
        stage.side.loads_known(0)
    assert [stage.side.is_loading for stage in pipeline.stages] == [False, False]


def test_the_layers_of_a_stage_belong_to_the_fingerprint(tmp_path: Path) -> None:
    names = []
    for number, layer in enumerate((2, 5)):
        folder = tmp_path / str(number)
        folder.mkdir()
        pipeline = Pipeline(folder, layer)
        first, last = (worker_of(stage.side).session.info.fingerprint for stage in pipeline.stages)
        assert first == last
        names.append(first)
        pipeline.close()
    assert names[0] != names[1]


def test_nothing_waits_for_its_offload(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, cpu_cache_gb=1 / (1 << 16))
    for number in range(8):
        hashes = hashes_of(f"full {number}", 3)
        pipeline.store(hashes, PAGES)
    assert [stage.side.delays for stage in pipeline.stages] == [False, False]
    pipeline.close()
