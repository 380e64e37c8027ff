# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from flexkv.cache import KVCache
from flexkv.client import Reset
from flexkv.engine import side_figures
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.side_figures import CacheFigures, CopyFigures
from flexkv.eviction import LRUPolicy
from flexkv.figures.definitions import METRICS, sample
from flexkv.figures.exposition import summary
from flexkv.figures.health_samples import health_text
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.session.state_reports import Subject, read_states
from flexkv.types.mover import FALLBACK, Direction, Status
from flexkv.types.troubles import Trouble
from packages.conftest import StillClock
from packages.patience import wait_until

LOADED = sample("copied_bytes", "device", "load")
LOADING = sample("copy_seconds", "device", "load")
STORED = sample("copied_bytes", "device", "store")
STORING = sample("copy_seconds", "device", "store")


def make(seconds: dict[int, float]) -> CopyFigures:
    """Of a mover that knows how long these of its transfers took."""
    return CopyFigures(ErrorBoundary(), seconds.get, dict)


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
    boundary = ErrorBoundary()
    figures = CopyFigures(boundary, {}.get, dict)
    boundary.failures["start_load_kv"] += 2
    assert figures.take() == {sample("failures", "internal", ""): 2}
    assert figures.take() == {}
    boundary.failures["wait_for_save"] += 1
    assert figures.take() == {sample("failures", "internal", ""): 1}


def test_bytes_are_counted_by_their_way_and_a_fallback_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ways = {"dma": 0, "staged": 500, "kernel": 0, FALLBACK: 0}
    figures = CopyFigures(ErrorBoundary(), {}.get, lambda: dict(ways))
    figures.begin_counting()  # 500 bytes were copied to measure it

    def copied(**more: int) -> dict[str, float]:
        for way, size in more.items():
            ways[way] += size
        figures.begin(1, Direction.LOAD, 1000)
        figures.end(1, Status.DONE)
        samples = figures.take()
        assert samples.pop(LOADED) == 1000
        return samples

    staged, kernel = sample("way_bytes", "staged"), sample("way_bytes", "kernel")
    assert copied(staged=1000) == {staged: 1000}
    assert caplog.messages == []
    assert copied(kernel=1000, fallback=1000) == {kernel: 1000, "fallback_bytes": 1000}
    assert copied(kernel=1000, fallback=1000) == {kernel: 1000, "fallback_bytes": 1000}
    (message,) = caplog.messages
    assert message.startswith("a copy of 1000 bytes could not go the way")
    ways["dma"] += 1  # of a copy that has only begun
    assert figures.take() == {}
    names = {sample(metric.name, *labels) for metric in METRICS for labels in metric.combinations}
    assert {staged, kernel, "fallback_bytes"} <= names


def test_a_busy_engine_looks_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StillClock()
    monkeypatch.setattr(side_figures, "time", clock)
    arena = Arena.create(ArenaSpec(BlockFormat(1, (64,)), 4), threads=1)
    try:
        made = CacheFigures(KVCache(arena, LRUPolicy()), ErrorBoundary(), lambda _: None)
        assert made.is_due(busy=True)
        made.take()
        made.note_activity()
        assert not made.is_due(busy=True)
        assert made.is_due(busy=False), "there may be no later step"
        clock.skip(0.1)
        assert made.is_due(busy=True)
    finally:
        arena.close()


def test_a_side_that_is_off_reports_that_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StillClock()
    monkeypatch.setattr(side_figures, "time", clock)
    arena = Arena.create(ArenaSpec(BlockFormat(1, (64,)), 4), threads=1)
    off, ok = sample("health", "off", "lost_track", ""), sample("health", "ok", "", "")
    try:
        cache = KVCache(arena, LRUPolicy())
        made = CacheFigures(cache, ErrorBoundary(), lambda _: None)
        assert (made.take()[ok], made.health) == (1, ())
        made.turned_off()
        clock.skip(1)
        monkeypatch.setattr(cache, "figures", None)  # the cache is what fails
        for _ in range(2):
            assert made.is_due(busy=True)
            samples = made.take()
            assert (samples[off], samples[ok]) == (1, 0)
            assert summary(samples) == {"off: lost_track": 1}
            made.turned_off()
            assert not made.is_due(busy=False)
            clock.skip(61)
        assert [each.trouble for each in made.health] == [Trouble.LOST_TRACK]
    finally:
        arena.close()


def test_the_health_is_what_the_cache_cannot_do(tmp_path: Path) -> None:
    arena = Arena.create(ArenaSpec(BlockFormat(1, (64,)), 4), threads=1)
    try:
        cache = KVCache(arena, LRUPolicy())
        made = CacheFigures(cache, ErrorBoundary(), lambda _: None)
        root = str(tmp_path / "run")
        made.report_health(root, "toy", "ab12")
        steps = (
            (Reset.RECOVER, "degraded: an error may have lost a copy"),
            (Reset.SUSPEND, "off: a reset failed"),
            (Reset.STOP, "off: copies failed for good"),
        )
        assert health_text(made.health) == "ok"
        for step, text in steps:
            cache.reset(step)
            made.take()
            assert health_text(made.health).startswith(text)
        wait_until(lambda: read_states(root, Subject.HEALTH)[0]["problems"] == [["stopped", ""]])
        made.close()
        assert read_states(root, Subject.HEALTH) == []
    finally:
        arena.close()
