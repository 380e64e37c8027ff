# SPDX-License-Identifier: Apache-2.0
"""Engines that use the node's service: what one has stored, another loads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from asked_door import call_door
from sglang_world import (
    LAYERS,
    PATIENCE_SECONDS,
    Rank,
    hashes_of,
    make_windowed,
    make_with_states,
    same,
)

from flexkv.operators.ask_door import AskError
from flexkv.service import line
from flexkv.types.presence import Presence
from flexkv_sglang import start
from packages.flexkv.tests.service.served import Service
from packages.inside import cache_of, stores_of

HASHES = hashes_of("a", 3)


@pytest.fixture
def engine(make_rank: Callable[..., Rank]) -> Callable[[str], Rank]:
    return lambda root: make_rank(settings={"service": root})


def stores(rank: Rank, hashes: Sequence[str], pages: Sequence[int]) -> None:
    """Store pages, once the service has granted slots."""
    until(rank, lambda: rank.store(hashes, pages))


def until(rank: Rank, condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        rank.side.ended_offloads()


def test_what_one_engine_has_stored_another_loads(
    serve: Callable[..., str], engine: Callable[[str], Rank]
) -> None:
    root = serve()
    one, other = engine(root), engine(root)
    stored = one.fill([1, 2, 3], seed=1)
    stores(one, HASHES, [1, 2, 3])
    until(other, lambda: other.lookup("r", HASHES) == [3])
    assert other.load("r", HASHES, [7, 8, 9])
    assert same(other.read([7, 8, 9]), stored)
    assert not one.side.delays, "the other engine wants the pages at once"
    stores(other, hashes_of("b", 2), [1, 2])
    until(one, lambda: one.lookup("s", hashes_of("b", 2)) == [2])


def test_an_engine_waits_for_pages_that_another_is_storing(
    serve: Callable[..., str], engine: Callable[[str], Rank]
) -> None:
    root = serve()
    one, other = engine(root), engine(root)
    stored = one.fill([1, 2, 3], seed=1)
    until(one, lambda: stores_of(cache_of(one.side)).free)
    one.side.offload(HASHES, lambda: [1, 2, 3])
    cache = cache_of(other.side)
    until(other, lambda: Presence.BELOW in cache.presence(other.side.keys_of(HASHES)))
    other.look_ahead("r", HASHES)
    for _ in range(5):
        assert other.side.held(["r"]) == [True]
        other.side.ended_offloads()
    until(one, one.side.ended_offloads)
    assert one.side.take_offload()
    until(other, lambda: other.side.held(["r"]) == [False])
    assert other.lookup("r", HASHES) == [3]
    assert other.load("r", HASHES, [7, 8, 9])
    assert same(other.read([7, 8, 9]), stored)


@pytest.mark.parametrize("wakes", [True, False])
def test_pages_that_a_service_has_not_published_are_offered_again(
    tmp_path: Path,
    engine: Callable[[str], Rank],
    monkeypatch: pytest.MonkeyPatch,
    wakes: bool,
) -> None:
    monkeypatch.setattr(line, "_SILENT_SECONDS", 1e9 if wakes else 0.0)
    service = Service(tmp_path, cpu_cache_gb=1 / 256)
    with contextlib.closing(service):
        one = engine(service.root)
        until(one, lambda: stores_of(cache_of(one.side)).free)
        service.stop()
        one.side.offload(HASHES, lambda: [1, 2, 3])
        until(one, lambda: cache_of(one.side).status.publishing)
        if wakes:
            assert not one.side.ended_offloads(), "its fate is not known yet"
            service.wake()
        until(one, one.side.ended_offloads)
        assert one.side.take_offload() == wakes
        assert one.lookup("r", HASHES) == ([3] if wakes else [])


def test_a_disk_of_the_service_gives_pages_to_each_engine(
    serve: Callable[..., str], engine: Callable[[str], Rank], tmp_path: Path
) -> None:
    disk = {"ssd_cache_gb": 1 / 64, "ssd_cache_dir": (str(tmp_path / "disk"),)}
    first = serve(**disk, ssd_timeout_seconds=PATIENCE_SECONDS)
    one = engine(first)
    assert one.side.may_wait
    stored = one.fill([1, 2, 3], seed=1)
    stores(one, HASHES, [1, 2, 3])
    number = 0
    while one.lookup("r", HASHES):
        number += 1
        stores(one, hashes_of(f"other {number}", 12), range(1, 13))
    other = engine(first)
    other.look_ahead("r", HASHES)
    until(other, lambda: other.side.held(["r"]) == [False])
    assert other.lookup("r", HASHES) == [3]
    assert other.load("r", HASHES, [7, 8, 9])
    assert same(other.read([7, 8, 9]), stored)


def test_engines_share_the_windows_of_a_model(
    serve: Callable[..., str], make_rank: Callable[..., Rank]
) -> None:
    root = serve()
    settings = {"service": root}
    pools = [make_windowed(layers=2 * LAYERS) for _ in range(2)]
    one, other = (make_rank(pool=pool, window=8, settings=settings) for pool in pools)
    stored = one.fill([1, 2, 3], seed=1)
    windows = one.fill([6, 5], seed=2, windows=True)
    until(one, lambda: one.store(HASHES, [1, 2, 3], [6, 5]))
    until(other, lambda: other.lookup("r", HASHES) == [3])
    assert other.load("r", HASHES, [7, 8, 9], [2, 3])
    assert same(other.read([7, 8, 9]), stored)
    assert same(other.read([2, 3], windows=True), windows)


def test_engines_share_the_states_of_a_model(
    serve: Callable[..., str], make_rank: Callable[..., Rank]
) -> None:
    settings = {"service": serve()}
    one, other = (make_rank(pool=make_with_states(), settings=settings) for _ in range(2))
    stored = one.fill([1, 2, 3], seed=1)
    state = one.fill_states([3], seed=2)
    until(one, lambda: one.store(HASHES, [1, 2, 3], states=[3]))
    until(other, lambda: other.lookup("r", HASHES) == [3])
    assert other.load("r", HASHES, [7, 8, 9], states=[1])
    assert same(other.read([7, 8, 9]), stored)
    assert same(other.read_states([1]), state)


@pytest.mark.parametrize("change", ["weights", "clear"])
def test_an_engine_that_starts_anew_leaves_the_others_their_pages(
    serve: Callable[..., str], engine: Callable[[str], Rank], change: str
) -> None:
    root = serve()
    one, other = engine(root), engine(root)
    old = one.fill([1, 2, 3], seed=1)
    stores(one, HASHES, [1, 2, 3])
    if change == "weights":
        one.side.weights_changed(flushed=True)
    else:
        assert one.side.clear()
    assert one.lookup("r", HASHES) == []
    one.fill([1, 2, 3], seed=2)
    stores(one, HASHES, [1, 2, 3])
    until(one, lambda: one.lookup("r", HASHES) == [3])
    until(other, lambda: other.lookup("r", HASHES) == [3])
    assert other.load("r", HASHES, [7, 8, 9])
    assert same(other.read([7, 8, 9]), old)


def test_keys_that_mean_nothing_elsewhere_are_an_engines_own(
    serve: Callable[..., str], engine: Callable[[str], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "outlives_process", lambda *_: False)
    root = serve()
    one, other = engine(root), engine(root)
    one.fill([1, 2, 3], seed=1)
    stores(one, HASHES, [1, 2, 3])
    until(one, lambda: one.lookup("r", HASHES) == [3])
    assert other.lookup("r", HASHES) == []


def test_an_operator_cannot_have_an_engine_clear_what_is_the_services(
    serve: Callable[..., str], engine: Callable[[str], Rank], tmp_path: Path
) -> None:
    one = engine(serve())
    stores(one, HASHES, [1, 2, 3])
    with pytest.raises(AskError, match=r"the node's service; allowed: `flexkv clear service`"):
        call_door(str(tmp_path / "run"), "/clear", blocks="all")
    assert one.lookup("r", HASHES) == [3]
