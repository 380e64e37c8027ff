# SPDX-License-Identifier: Apache-2.0
"""Models with sliding windows: a hit has the window before its end, or it is none.

`test_states` has the same of recurrent states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_requests import OwnPages
from sglang_world import (
    HEADS,
    LAYERS,
    PATIENCE_SECONDS,
    WINDOW_PAGES,
    Rank,
    hashes_of,
    make_windowed,
    same,
    wait_for,
)

from flexkv import LayoutError
from flexkv.types.presence import Presence
from flexkv_sglang.pages import describe_pages
from flexkv_sglang.trailing import IN_HOST, OBTAINABLE, TrailingPages, TrailingPool
from packages.inside import cache_of

MakeRank = Callable[..., Rank]

WINDOW = 2
"""Pages of a window in these tests."""


@pytest.fixture
def make_windowed_rank(make_rank: MakeRank) -> MakeRank:
    def make(page_size: int = 4, layers: int = LAYERS, **options: Any) -> Rank:
        pool = make_windowed(page_size=page_size, layers=layers)
        return make_rank(pool=pool, window=WINDOW * page_size, **options)

    return make


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("layers", [2, LAYERS, 2 * LAYERS, 2 * LAYERS + 1])
def test_pages_of_windows_come_back_into_other_pages(
    make_windowed_rank: MakeRank, page_size: int, layers: int
) -> None:
    rank = make_windowed_rank(page_size, layers)
    assert len(rank.pages.windows) == -(-layers // LAYERS)
    hashes = hashes_of("a", 3)
    stored = rank.fill([5, 2, 7], seed=1)
    windows = rank.fill([6, 3], seed=2, windows=True)
    assert rank.store(hashes, [5, 2, 7], [6, 3])
    rank.fill(range(13), seed=3)
    rank.fill(range(WINDOW_PAGES + 1), seed=4, windows=True)
    others = [page for page in range(13) if page not in (9, 1, 4)]
    other_windows = [page for page in range(WINDOW_PAGES + 1) if page not in (1, 5)]
    untouched = rank.read(others), rank.read(other_windows, windows=True)
    assert rank.lookup("r", hashes) == [3]
    assert rank.load("r", hashes, [9, 1, 4], [1, 5])
    assert same(rank.read([9, 1, 4]), stored)
    assert same(rank.read([1, 5], windows=True), windows)
    assert same(rank.read(others), untouched[0])
    assert same(rank.read(other_windows, windows=True), untouched[1])


def test_a_layer_waits_for_its_own_pages(make_windowed_rank: MakeRank) -> None:
    """Window and full attention alternate: layer 0 has a window, layer 1 has none."""
    rank = make_windowed_rank()
    hashes = hashes_of("a", 2)
    full = rank.fill([5, 2], seed=1)
    windows = rank.fill([6, 3], seed=2, windows=True)
    assert rank.store(hashes, [5, 2], [6, 3])
    rank.fill([9, 1], seed=3)
    rank.fill([1, 5], seed=4, windows=True)
    assert rank.side.load("r", hashes, rank.blocks([9, 1], [1, 5]), {"swa": 2})
    rank.side.start_batch()
    for layer in range(2 * LAYERS):
        rank.side.wait_for_layer(layer)
        first = layer // 2 * 2
        here = slice(first, first + 2)  # its keys and values
        if layer % 2:
            assert same(rank.read([9, 1])[here], full[here])
        else:
            assert same(rank.read([1, 5], windows=True)[here], windows[here])
    assert rank.side.finish_batch()


def test_a_hit_ends_where_a_window_ends(make_windowed_rank: MakeRank) -> None:
    rank = make_windowed_rank()
    hashes = hashes_of("a", 6)
    # As SGLang stores a prompt of four pages, and then an answer whose window has moved on.
    assert rank.store(hashes[:4], [1, 2, 3, 4], [1, 2])
    assert rank.lookup("r", hashes) == [4]
    assert rank.store(hashes[4:], [5, 6], [3])
    assert rank.lookup("r", hashes) == [4]
    # SGLang has the first pages itself, with their window.
    assert rank.lookup("r", hashes[5:]) == [1]
    assert rank.lookup("r", hashes[4:]) == []
    assert rank.lookup("r", hashes[3:]) == [1]
    assert rank.lookup("r", hashes[:3]) == []


def test_a_load_without_its_window_is_refused(make_windowed_rank: MakeRank) -> None:
    rank = make_windowed_rank()
    hashes = hashes_of("a", 3)
    assert rank.store(hashes, [1, 2, 3], [1, 2])
    assert not rank.side.load("r", hashes, [4, 5, 6])
    assert not rank.side.load("r", hashes, rank.blocks([4, 5, 6], [3]), {"swa": 1})
    assert rank.load("r", hashes, [4, 5, 6], [3, 4])


def test_an_evicted_window_shortens_a_hit(make_windowed_rank: MakeRank) -> None:
    rank = make_windowed_rank(settings={"eviction_policy": "lru"})
    hashes = hashes_of("a", 4)
    assert rank.store(hashes[:2], [1, 2], [1, 2])
    assert rank.store(hashes[2:], [3, 4], [3, 4])
    assert rank.lookup("r", hashes) == [4]
    others = 0
    while rank.lookup("r", hashes) == [4]:
        assert others < 10_000
        assert rank.store(hashes_of(f"other {others}", 1), [7])
        others += 1
    assert rank.lookup("r", hashes) in ([], [2])


def test_a_window_comes_from_the_disk(make_windowed_rank: MakeRank, disk: dict[str, Any]) -> None:
    first = make_windowed_rank(layers=2 * LAYERS, settings=disk)
    hashes = hashes_of("a", 5)
    stored = first.fill([1, 2, 3, 4], seed=1)
    windows = first.fill([6, 3], seed=2, windows=True)
    assert first.store(hashes[:4], [1, 2, 3, 4], [6, 3])
    assert first.store(hashes[4:], [5])  # whose window SGLang no longer has
    first.close()

    second = make_windowed_rank(layers=2 * LAYERS, settings=disk)
    assert second.lookup("r", hashes) == []
    second.look_ahead("r", hashes)
    assert second.side.held(["r"]) == [True]
    wait_for(second, "r")
    assert second.lookup("r", hashes) == [4]
    assert second.load("r", hashes[:4], [7, 8, 9, 10], [1, 2])
    assert same(second.read([7, 8, 9, 10]), stored)
    assert same(second.read([1, 2], windows=True), windows)
    second.requests.scheduled([second.request("r", range(21), 16)], [], OwnPages())
    samples = second.side.take_samples()
    assert samples["hit_tokens:disk"] == 16
    # Host memory has them now, and nothing holds them there.
    second.look_ahead("other", hashes)
    wait_for(second, "other")
    assert second.lookup("other", hashes) == [4]


@pytest.mark.parametrize("more", [0, 2], ids=["all of the prompt", "its beginning"])
def test_a_window_comes_from_a_store_that_is_queried(
    make_windowed_rank: MakeRank, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """The store knows of no block until it is queried: where the prefix ends, and so which window
    is needed, follows from its answers."""
    pytest.importorskip("obstore", reason="needs obstore: pip install 'flexkv[objects]'")
    pytest.importorskip("moto", reason="needs moto: pip install moto flask flask-cors")
    from integration.harness.s3_server import BUCKET, S3Server

    settings = {
        "objects_url": f"s3://{BUCKET}/cache",
        "objects_question_seconds": PATIENCE_SECONDS,
        "objects_timeout_seconds": PATIENCE_SECONDS,
        "always_load": True,
    }
    with S3Server() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        first = make_windowed_rank(settings=settings)
        hashes = hashes_of("a", 4)
        stored = first.fill([1, 2, 3, 4], seed=1)
        windows = first.fill([6, 3], seed=2, windows=True)
        assert first.store(hashes, [1, 2, 3, 4], [6, 3])
        first.close()

        second = make_windowed_rank(settings=settings)
        prompt = [*hashes, *hashes_of("b", more)]
        second.look_ahead("r", prompt)
        assert second.side.held(["r"]) == [True]
        wait_for(second, "r")
        assert second.lookup("r", prompt) == [4]
        assert second.load("r", hashes, [7, 8, 9, 10], [1, 2])
        assert same(second.read([7, 8, 9, 10]), stored)
        assert same(second.read([1, 2], windows=True), windows)
        second.close()


def test_no_window_of_earlier_weights_is_read(
    make_windowed_rank: MakeRank, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_windowed_rank(settings=disk)
    hashes = hashes_of("a", 4)
    assert first.store(hashes, [1, 2, 3, 4], [6, 3])
    first.close()
    second = make_windowed_rank(settings=disk)
    second.look_ahead("r", hashes)
    second.side.weights_changed(flushed=True)
    fetched: list[Sequence[bytes]] = []
    monkeypatch.setattr(cache_of(second.side), "fetch", lambda keys, **_: fetched.append(keys))
    second.side.held(["r"])
    assert fetched == []


def test_a_prefix_without_a_window_is_not_read(
    make_windowed_rank: MakeRank, disk: dict[str, Any]
) -> None:
    first = make_windowed_rank(settings=disk)
    hashes = hashes_of("a", 4)
    assert first.store(hashes, [1, 2, 3, 4])
    first.close()
    second = make_windowed_rank(settings=disk)
    second.look_ahead("r", hashes)
    assert second.side.held(["r"]) == [False]
    assert second.lookup("r", hashes) == []


def test_other_windows_have_another_fingerprint(
    make_windowed_rank: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flexkv.sglang"):
        make_windowed_rank()
        make_windowed_rank(layers=LAYERS - 1)
    started = [line for line in caplog.messages if "fingerprint" in line]
    assert len({line.rpartition(" ")[2] for line in started}) == len(started) == 2


def test_windows_with_other_heads_are_not_divided() -> None:
    pool = make_windowed(heads=1)
    pages = describe_pages(pool, 4, heads=2 * HEADS, ranks=2)
    assert (pages.layout.by_head, pages.windows[0].by_head, pages.sharding.parts) == (
        False,
        False,
        2,
    )
    even = describe_pages(make_windowed(), 4, heads=2 * HEADS, ranks=2)
    assert (even.layout.by_head, even.windows[0].by_head, even.sharding.heads) == (True, True, 4)


def test_windows_in_no_pages_of_their_own_are_refused() -> None:
    pool = make_windowed()
    pool.swa_req_ring_size = 64
    with pytest.raises(LayoutError, match="SWAKVPool keeps sliding windows in a way of its own"):
        describe_pages(pool, 4, heads=HEADS, ranks=1)
    pool = make_windowed()
    pool.full_layer_nums = 0
    with pytest.raises(LayoutError, match="has 0 layers of full attention and 3 with a window"):
        describe_pages(pool, 4, heads=HEADS, ranks=1)


class Known:
    """A cache, as far as the search for a window asks it."""

    def __init__(self, places: dict[bytes, Presence]) -> None:
        self._places = places

    def presence(self, keys: Sequence[bytes]) -> Sequence[Presence]:
        return [self._places[key] for key in keys]


@st.composite
def pages_of_pools(draw: st.DrawFn) -> tuple[TrailingPages, list[list[tuple[Presence, ...]]]]:
    """Pools, and where each has the parts of the pages of a prefix."""
    pages = draw(st.integers(0, 200))
    pools: list[TrailingPool] = []
    places: list[list[tuple[Presence, ...]]] = []
    number = 1
    for name in draw(st.sampled_from([("swa",), ("mamba",), ("swa", "mamba"), ("mamba", "mamba")])):
        parts = draw(st.integers(1, 3))
        is_state = name == "mamba"
        reach = 1 if is_state else draw(st.integers(1, 90))
        pools.append(TrailingPool(name, 50, parts, 100, number, reach, is_state))
        number += parts
        likely = draw(st.sampled_from([Presence, [*[Presence.HOST] * 9, Presence.ABSENT]]))
        page = st.tuples(*[st.sampled_from(likely)] * parts)
        places.append(draw(st.lists(page, min_size=pages, max_size=pages)))
    return TrailingPages(pools), places


@given(pages_of_pools(), st.booleans())
def test_the_longest_hit_has_all_that_it_needs(
    drawn: tuple[TrailingPages, list[list[tuple[Presence, ...]]]], below: bool
) -> None:
    trailing, of_pools = drawn
    places = OBTAINABLE if below else IN_HOST
    count = len(of_pools[0])
    keys = [bytes([number]) * 32 + b"epoch" for number in range(count)]
    known: dict[bytes, Presence] = {}
    for pool, pages in zip(trailing.pools, of_pools, strict=True):
        parts = [page[i] for i in range(pool.parts) for page in pages]
        known |= zip(pool.keys_of(keys), parts, strict=True)

    def is_hit(end: int) -> bool:
        needed = trailing.keys_of_hit(keys[:end])
        return all(known[key] in places for key in needed)

    cache: Any = Known(known)
    assert trailing.longest(cache, keys, places) == max(n for n in range(count + 1) if is_hit(n))


def test_blocks_and_keys_of_windows_are_in_the_same_order() -> None:
    windows = TrailingPages([TrailingPool("swa", 50, 2, 100, 1, 3)])
    keys = [b"a" * 32, b"b" * 32 + b"e"]
    assert windows.blocks_of({"swa": [7, 9]}) == [107, 109, 157, 159]
    assert windows.keys_of(keys, {"swa": 2}) == [
        b"a" * 32 + b"\0\1",
        b"b" * 32 + b"\0\1e",
        b"a" * 32 + b"\0\2",
        b"b" * 32 + b"\0\2e",
    ]


def test_blocks_and_keys_of_states_are_in_the_same_order() -> None:
    """Behind windows; a state has parts of two kinds."""
    kinds = [("swa", 50, 2, 100, 1, 3), ("mamba", 4, 3, 200, 3, 1, True)]
    kinds.append(("mamba", 4, 300, 212, 6, 1, True))
    trailing = TrailingPages(TrailingPool(*kind) for kind in kinds)
    keys = [b"a" * 32, b"b" * 32 + b"e"]
    blocks = trailing.blocks_of({"mamba": [2]})
    assert blocks == [206, 207, 208, *range(212 + 600, 212 + 900)]
    made = trailing.keys_of(keys, {"mamba": 1})
    assert made[:3] == [b"b" * 32 + bytes([0, number]) + b"e" for number in (3, 4, 5)]
    assert made[-1] == b"b" * 32 + (305).to_bytes(2, "big") + b"e"
    assert len(made) == len(set(made)) == len(blocks) == trailing.count({"mamba": 1})
    assert trailing.of_hit(2) == {"swa": 2, "mamba": 1}
