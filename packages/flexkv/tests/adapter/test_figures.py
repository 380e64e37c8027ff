# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from flexkv.adapter.figures import CopyFigures
from flexkv.adapter.guard import Edge
from flexkv.adapter.metrics import sample
from flexkv.mover import Direction, Status

LOADED = sample("copied_bytes", "device", "load")
LOADING = sample("copy_seconds", "device", "load")
STORED = sample("copied_bytes", "device", "store")
STORING = sample("copy_seconds", "device", "store")


def make(seconds: dict[int, float]) -> CopyFigures:
    """Of a mover that knows how long these of its transfers took."""
    return CopyFigures(Edge(), seconds.get)


def test_the_time_of_a_copy_is_what_the_mover_measured() -> None:
    figures = make({1: 0.5, 2: 0.25})
    figures.begin(1, Direction.LOAD, 1000)
    figures.begin(2, Direction.STORE, 300)
    figures.end(1, Status.DONE)
    figures.end(2, Status.DONE)
    assert figures.take() == {LOADED: 1000, LOADING: 0.5, STORED: 300, STORING: 0.25}
    assert figures.take_load_rate() == 2000
    assert figures.take_load_rate() == 0


def test_the_fastest_load_is_reported_and_no_store() -> None:
    figures = make({1: 0.1, 2: 1.0, 3: 0.001})
    for ticket, direction in enumerate((Direction.LOAD, Direction.LOAD, Direction.STORE), 1):
        figures.begin(ticket, direction, 1000)
        figures.end(ticket, Status.DONE)
    assert figures.take_load_rate() == pytest.approx(10_000)


def test_a_copy_of_unknown_time_counts_its_bytes_and_no_rate() -> None:
    figures = make({})
    figures.begin(1, Direction.LOAD, 1000)
    figures.end(1, Status.DONE)
    assert figures.take() == {LOADED: 1000}
    assert figures.take_load_rate() == 0


def test_a_copy_that_failed_counts_nothing() -> None:
    figures = make({1: 1.0})
    figures.begin(1, Direction.LOAD, 1000)
    figures.end(1, Status.FAILED)
    assert not figures.active
    assert figures.take_load_rate() == 0


def test_what_is_only_measured_is_a_rate_and_no_traffic() -> None:
    figures = make({})
    figures.measured(500, 0.5)
    assert figures.take() == {}
    assert figures.take_load_rate() == 1000


def test_an_error_of_the_worker_is_counted_once() -> None:
    edge = Edge()
    figures = CopyFigures(edge, {}.get)
    edge.failures["start_load_kv"] += 2
    assert figures.take() == {sample("failures", "internal"): 2}
    assert figures.take() == {}
    edge.failures["wait_for_save"] += 1
    assert figures.take() == {sample("failures", "internal"): 1}
