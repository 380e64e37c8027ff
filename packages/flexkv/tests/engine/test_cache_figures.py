# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side reports of a cache over a real arena and a real disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_store import MemoryStore
from tiered_engine import Engine, keys
from two_tiers import Node

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.choice.cost import Span
from flexkv.engine.side_figures import CacheFigures
from flexkv.figures.definitions import METRICS, Kind, Samples, bucket, sample
from flexkv.types.mover import Status
from packages.conftest import Clock
from packages.inside import copies_of

SAVED = "saved_prefill_seconds"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path, slots=4)
    yield made
    made.close()


def figures_of(engine: Engine, cost: list[tuple[float, float] | None]) -> CacheFigures:
    """Figures of an engine whose last measurement of computing is the last of `cost`."""
    return CacheFigures(engine.cache, ErrorBoundary(), lambda _: None, lambda: cost[-1])


def values(samples: Samples, name: str, *labels: str) -> tuple[int, float]:
    """How many values a histogram got, and their sum."""
    (metric,) = (each for each in METRICS if each.name == name)
    names = [bucket(name, place, *labels) for place in range(len(metric.bounds) + 1)]
    count = sum(samples.get(count_name, 0) for count_name, _ in names)
    return int(count), sum(samples.get(sum_name, 0.0) for _, sum_name in names)


def test_loads_and_stores_count_from_their_order_to_their_end(engine: Engine) -> None:
    figures = figures_of(engine, [None])
    store = engine.cache.store(keys("a", "b"), (0, 1))
    assert store is not None
    (copy,) = copies_of(engine.cache)
    copy.begun -= 100
    assert values(figures.take(), "store_seconds") == (0, 0.0)
    engine.finish(store)
    load = engine.cache.load(keys("a", "b"))
    assert load is not None
    (copy,) = copies_of(engine.cache)
    copy.begun -= 200
    engine.finish(load)
    samples = figures.take()
    count, seconds = values(samples, "store_seconds")
    assert (count, seconds >= 100) == (1, True)
    count, seconds = values(samples, "load_seconds")
    assert (count, seconds >= 200) == (1, True)
    engine.settle()
    assert values(figures.take(), "load_seconds") == (0, 0.0)


def test_a_copy_that_fails_has_no_latency(engine: Engine) -> None:
    figures = figures_of(engine, [None])
    store = engine.cache.store(keys("a"), (0,))
    assert store is not None
    engine.arena.board.report(store.cell, 0, Status.FAILED)
    engine.cache.poll()
    assert values(figures.take(), "store_seconds") == (0, 0.0)


def test_a_fetch_counts_once_for_the_tier_that_gave_blocks(engine: Engine, clock: Clock) -> None:
    figures = figures_of(engine, [None])
    engine.store("a", "b")
    engine.store("w", "x", "y", "z")
    fetch = engine.cache.fetch(keys("a", "b"))
    assert fetch is not None
    clock.skip(50)
    engine.wait(fetch)
    assert values(figures.take(), "fetch_seconds", "disk") == (0, 0.0)
    for _ in range(2):
        engine.cache.end_fetch(fetch)
    samples = figures.take()
    count, seconds = values(samples, "fetch_seconds", "disk")
    assert (count, seconds >= 50) == (1, True)
    assert values(samples, "fetch_seconds", "objects") == (0, 0.0)
    engine.settle()


def test_a_fetch_that_gives_nothing_has_no_latency(engine: Engine) -> None:
    figures = figures_of(engine, [None])
    engine.store("a", "b")
    engine.store("w", "x", "y", "z")
    go_on = engine.hang()
    fetch = engine.cache.fetch(keys("a", "b"))
    assert fetch is not None
    engine.cache.end_fetch(fetch)
    assert values(figures.take(), "fetch_seconds", "disk") == (0, 0.0)
    go_on()
    engine.settle()


def test_a_hit_counts_its_blocks_and_saves_what_computing_costs(engine: Engine) -> None:
    figures = figures_of(engine, [(0.5, 0.001)])
    span = Span(100, 300)
    figures.hit(3, span)
    figures.hit(1)
    samples = figures.take()
    assert values(samples, "hit_blocks") == (2, 4.0)
    assert samples[SAVED] == pytest.approx(0.5 * 200 + 0.001 * span.pairs)
    assert SAVED not in figures.take()


def test_hits_before_the_first_measurement_are_priced_by_it(engine: Engine) -> None:
    cost: list[tuple[float, float] | None] = [None]
    figures = figures_of(engine, cost)
    figures.hit(1, Span(0, 10))
    assert SAVED not in figures.take()
    cost.append((2.0, 0.0))
    figures.hit(1, Span(0, 5))
    assert figures.take()[SAVED] == pytest.approx(30.0)
    cost.append((4.0, 0.0))  # later hits only
    figures.hit(1, Span(0, 1))
    assert figures.take()[SAVED] == pytest.approx(4.0)


def test_a_store_that_was_not_reached_is_connecting(tmp_path: Path) -> None:
    store = MemoryStore()
    store.broken = {"open"}
    node = Node(tmp_path, store, disk=None)
    figures = CacheFigures(node.cache, ErrorBoundary(), lambda _: None, lambda: None)
    samples = figures.take()
    for way in ("read", "write"):
        assert samples[sample("circuits", "mooncake", way, "connecting")] == 1
    store.broken = set()
    node.until(lambda: node.remote.readable)
    samples = figures.take()
    for way in ("read", "write"):
        assert samples[sample("circuits", "mooncake", way, "connecting")] == 0
        assert samples[sample("circuits", "mooncake", way, "closed")] == 1
    assert node.cache.close()
    node.arena.close()


def test_every_sample_is_of_a_defined_metric(engine: Engine) -> None:
    figures = figures_of(engine, [(1.0, 0.0)])
    engine.store("a", "b")
    engine.store("w", "x", "y", "z")
    figures.hit(engine.fetched("a", "b"), Span(0, 10))
    known = set()
    for metric in METRICS:
        for labels in metric.combinations:
            if metric.kind is Kind.HISTOGRAM:
                for place in range(len(metric.bounds) + 1):
                    known.update(bucket(metric.name, place, *labels))
            else:
                known.add(":".join((metric.name, *labels)))
    samples = figures.take()
    assert set(samples) <= known
    assert values(samples, "load_seconds")[0] == 1


def test_counts_of_one_reader_are_no_figures_of_the_cache(engine: Engine) -> None:
    """Another engine of the cache reports the cache's figures and its own requests."""
    one, other = figures_of(engine, [None]), figures_of(engine, [None])
    engine.store("a", "b")
    one.asked(64, 32, {})
    for figures, tokens in ((one, 32), (other, 0)):
        samples = figures.take()
        assert samples.get(sample("hit_tokens", "host"), 0) == tokens
        assert samples[sample("stored_blocks", "host")] == 2
