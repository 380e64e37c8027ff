# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from flexkv.histogram import BLOCKS_BOUNDS, SECONDS_BOUNDS, Bucket, Histogram, representative


def test_a_bound_belongs_to_the_range_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 2.0, 2.5, 100.0):
        histogram.observe(value)
    assert histogram.take() == [Bucket(0, 2, 1.5), Bucket(1, 1, 2.0), Bucket(2, 2, 102.5)]


def test_values_are_taken_once() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(3.0)
    assert histogram.take() == [Bucket(1, 1, 3.0)]
    assert histogram.take() == []
    histogram.observe(4.0)
    assert histogram.take() == [Bucket(1, 1, 4.0)]


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
    histogram = Histogram(bounds)
    for value in values:
        direct.observe(value)
        histogram.observe(value)
    for bucket in histogram.take():
        value = representative(bounds, bucket.place, bucket.count, bucket.total)
        for _ in range(bucket.count):
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
