# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference
from tiered_engine import Engine

from flexkv.figures.definitions import (
    BLOCKS_BOUNDS,
    COPIED_BYTES,
    GAUGES,
    HIT_TOKENS,
    LOAD_SECONDS,
    METRICS,
    SECONDS_BOUNDS,
    Kind,
    add,
    bucket,
    sample,
)
from flexkv.figures.exposition import representative, values_of
from flexkv.figures.meter import Meter, Reader

HITS = sample("hit_tokens", "host")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path, slots=4)
    yield made
    made.close()


def test_each_reader_gets_every_count_once() -> None:
    meter, first, second = Meter(), Reader(), Reader()
    meter.count(HIT_TOKENS, 16, "host")
    assert first.drain(meter.values) == {HITS: 16}
    assert first.drain(meter.values) == {}
    meter.count(HIT_TOKENS, 4, "host")
    meter.put(COPIED_BYTES, 7, "device", "load")
    both = {HITS: 4, sample("copied_bytes", "device", "load"): 7}
    assert first.drain(meter.values) == both
    assert second.drain(meter.values) == both | {HITS: 20}


def test_drained_samples_travel_as_json_and_add_up_to_the_totals() -> None:
    meter, reader = Meter(), Reader()
    total: dict[str, float] = {}
    for value in (0.002, 0.3, 0.002):
        meter.histogram(LOAD_SECONDS).observe(value)
        meter.count(HIT_TOKENS, 8, "host")
        add(total, json.loads(json.dumps(reader.drain(meter.values))))
    assert total == pytest.approx(dict(meter.values))
    assert total[bucket("load_seconds", 1)[0]] == 2


def test_gauges_come_with_a_change_and_all_at_once(engine: Engine) -> None:
    reader = Reader()
    own, shared, _ = engine.cache.figures()
    samples = reader.drain(own | shared)
    assert samples["pinned_blocks"] == 0
    assert set(samples) <= GAUGES
    assert reader.drain(own | shared) == {}
    samples = reader.drain(own | shared | {"pinned_blocks": 2})
    assert samples["pinned_blocks"] == 2
    assert set(samples) == GAUGES & (own | shared).keys()


def test_counts_of_the_engine_and_of_shared_tiers_are_apart(engine: Engine) -> None:
    engine.store("a", "b")
    engine.store("w", "x", "y", "z")
    assert engine.fetched("a", "b") == 2
    own, shared, _ = engine.cache.figures()
    assert not own.keys() & shared.keys()
    assert own[sample("stored_blocks", "host")] == engine.cache.counters.stored_blocks
    assert own[bucket("store_seconds", 0)[0]] >= 1
    assert shared[sample("stored_blocks", "disk")] == 6
    assert shared[sample("copied_bytes", "disk", "read")] > 0
    assert shared[sample("blocks", "host")] == 4
    assert shared[sample("bytes", "disk")] == 6 * engine.cache.info.slot_bytes


def test_every_metric_has_values_of_its_labels() -> None:
    for metric in METRICS:
        assert metric.combinations
        assert len(set(metric.combinations)) == len(metric.combinations)
        assert {len(labels) for labels in metric.combinations} == {len(metric.label_names)}
        assert bool(metric.bounds) == (metric.kind is Kind.HISTOGRAM)
        if metric.kind is Kind.HISTOGRAM:
            assert metric.combinations == list(metric.counted)


def ranges(meter: Meter, places: int) -> list[tuple[float, float]]:
    """The number and the sum of the values in each range of `load_seconds`."""
    names = [bucket("load_seconds", place) for place in range(places)]
    return [(meter.values[count], meter.values[total]) for count, total in names]


def test_a_bound_belongs_to_the_range_below_it() -> None:
    meter = Meter()
    histogram = meter.histogram(LOAD_SECONDS)
    for value in (0.0005, 0.001, 0.0025, 0.003, 0.005, 20.0):
        histogram.observe(value)
    assert ranges(meter, 3) == [(2, 0.0015), (1, 0.0025), (2, 0.008)]
    assert meter.values[bucket("load_seconds", 13)[0]] == 1


def test_bounds_are_those_that_the_texts_promise() -> None:
    assert SECONDS_BOUNDS[0] == 0.001
    assert SECONDS_BOUNDS[-1] == 10.0
    assert BLOCKS_BOUNDS[0] == 1
    assert BLOCKS_BOUNDS[-1] == 4096
    for bounds in (SECONDS_BOUNDS, BLOCKS_BOUNDS):
        assert list(bounds) == sorted(set(bounds))


@given(st.lists(st.floats(0, 1e4), max_size=50))
def test_prometheus_gets_the_ranges_and_the_sum_of_the_values(values: list[float]) -> None:
    """A reference of the same values, given one by one."""
    bounds = SECONDS_BOUNDS
    registries = CollectorRegistry(), CollectorRegistry()
    direct, carried = (Reference("x", "x", buckets=bounds, registry=each) for each in registries)
    meter = Meter()
    histogram = meter.histogram(LOAD_SECONDS)
    for value in values:
        direct.observe(value)
        histogram.observe(value)
    for _, _, value, times in values_of(Reader().drain(meter.values)):
        for _ in range(times):
            carried.observe(value)
    for bound in (*map(str, bounds), "+Inf"):
        found = [each.get_sample_value("x_bucket", {"le": bound}) for each in registries]
        assert found[0] == found[1], bound
    sums = [each.get_sample_value("x_sum") or 0.0 for each in registries]
    assert sums[0] == pytest.approx(sums[1])


@pytest.mark.parametrize("place", range(4))
def test_rounding_leaves_no_range(place: int) -> None:
    """Sums of many values are rounded: the mean may lie beyond the bounds."""
    bounds = (0.1, 0.25, 1.0)
    low = bounds[place - 1] if place else -math.inf
    high = bounds[place] if place < 3 else math.inf
    for total in (low, math.nextafter(high, math.inf)):
        assert low < representative(bounds, place, 1, total) <= high
