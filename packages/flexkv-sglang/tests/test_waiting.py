# SPDX-License-Identifier: Apache-2.0
"""Waiting requests are looked up a few pages in each step, however many pages wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sglang_world import PATIENCE_SECONDS, HashedPrompt, Rank, hashes_of

from flexkv_sglang import waiting
from flexkv_sglang.waiting import WINDOW
from packages.inside import cache_of
from packages.inside_adapters import awaited_fetch
from packages.seen_fetch import SeenFetch

PAGES = 9
HASHES = hashes_of("a", PAGES)


@pytest.fixture
def rank(make_rank: Callable[..., Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A rank whose disk has `PAGES` pages of a prompt, and whose steps have time for one portion of
    pages each."""
    monkeypatch.setattr(waiting, "_HASHED_PAGES", 4)
    monkeypatch.setattr(waiting, "_FETCHED_PAGES", 2)
    settings = {
        "ssd_cache_gb": 1 / 64,
        "ssd_cache_dir": (str(tmp_path / "disk"),),
        "ssd_timeout_seconds": PATIENCE_SECONDS,
        "always_load": True,
    }
    first = make_rank(settings=settings)
    assert first.store(HASHES, range(1, PAGES + 1))
    first.close()
    made = make_rank(settings=settings)
    ticks = count()
    monkeypatch.setattr(made.requests.waiting, "_clock", lambda: float(next(ticks)))
    return made


def begin(rank: Rank, rid: str, hashes: Sequence[str]) -> HashedPrompt:
    assert rank.requests.waiting.is_new(rid)
    prompt = HashedPrompt(hashes)
    rank.requests.look_ahead(rank.request(rid), prompt)
    prompt.asked.clear()  # for what requests share
    return prompt


def finish(rank: Rank) -> None:
    while rank.requests.waiting.looks_ahead:
        rank.requests.waiting.go_on()


def fetched(rank: Rank, rid: str) -> Any:
    """The request's fetch; None if it has none."""
    found = awaited_fetch(rank.side, rid)
    return None if found is None else SeenFetch(cache_of(rank.side), found.id, found.keys)


def wait(rank: Rank, *rids: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(rank.side.held(rids)):
        assert time.monotonic() < deadline
        rank.side.ended_offloads()


def test_a_step_takes_no_more_pages_than_it_has_time_for(rank: Rank) -> None:
    prompt = begin(rank, "r", HASHES)
    steps = []
    while rank.requests.waiting.looks_ahead:
        assert rank.side.held(["r"]) == [True]
        rank.requests.waiting.go_on()
        fetch = fetched(rank, "r")
        steps.append((len(prompt.asked), 0 if fetch is None else fetch.length))
    assert steps == [(1, 0), (1, 2), (1, 4), (2, 4), (2, 6), (2, 8), (3, 8), (3, 9)]
    assert prompt.asked == [(0, 4), (4, 8), (8, 9)]
    wait(rank, "r")
    assert rank.lookup("r", HASHES) == [PAGES]


def test_a_step_with_time_takes_all(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank.requests.waiting, "_clock", lambda: 0.0)
    begin(rank, "r", HASHES)
    begin(rank, "s", HASHES)
    rank.requests.waiting.go_on()
    assert not rank.requests.waiting.looks_ahead
    assert fetched(rank, "r").length == fetched(rank, "s").length == PAGES


def test_nothing_is_looked_up_behind_a_page_that_no_tier_has(rank: Rank) -> None:
    missed = begin(rank, "miss", hashes_of("b", PAGES))
    finish(rank)
    assert missed.asked == [(0, 4)]
    assert fetched(rank, "miss") is None
    part = begin(rank, "part", [*HASHES[:5], *hashes_of("b", PAGES)])
    finish(rank)
    assert part.asked == [(0, 4), (4, 8)]
    assert fetched(rank, "part").stop == 5


def test_what_host_memory_has_is_not_read(rank: Rank) -> None:
    assert rank.store(HASHES, range(1, PAGES + 1))
    prompt = begin(rank, "r", HASHES)
    finish(rank)
    assert prompt.asked == [(0, 4), (4, 8), (8, 9)]
    assert fetched(rank, "r") is None
    assert rank.side.held(["r"]) == [False]


@pytest.mark.parametrize("known", [1, 4, 6])
def test_a_prefix_in_host_memory_stays_as_long_as_what_is_read_behind_it(
    rank: Rank, known: int
) -> None:
    assert rank.store(HASHES[:known], range(1, known + 1))
    begin(rank, "r", HASHES)
    finish(rank)
    fetch = fetched(rank, "r")
    assert fetch.keys == list(rank.side.keys_of(HASHES[known - 1 :]))
    wait(rank, "r")
    assert [block.key for block in fetch.blocks] == fetch.keys
    assert fetch.blocks[1].parent is fetch.blocks[0]
    assert awaited_fetch(rank.side, "r").start == known - 1


def test_an_error_concerns_one_request(rank: Rank) -> None:
    class Broken(HashedPrompt):
        def hashes(self, start: int, stop: int, before: str | None) -> Sequence[str]:
            raise RuntimeError("of one request")

    assert rank.requests.waiting.is_new("broken")
    with pytest.raises(RuntimeError):
        rank.requests.look_ahead(rank.request("broken"), Broken(HASHES))
    begin(rank, "r", HASHES)
    rank.requests.waiting.go_on()
    assert rank.side.held(["broken", "r"]) == [False, True]
    finish(rank)
    assert fetched(rank, "r").length == PAGES


def test_a_request_waits_until_a_step_has_time_for_it(rank: Rank) -> None:
    rids = [f"r {number}" for number in range(WINDOW + 1)]
    assert rank.side.held(rids) == [True] * WINDOW + [False]
    for rid in rids:
        assert rank.requests.waiting.is_new(rid)
    assert rank.side.held(rids) == [False] * (WINDOW + 1)


def test_a_request_that_left_is_not_looked_up(rank: Rank) -> None:
    prompt = begin(rank, "r", HASHES)
    rank.side.held(["s"])
    finish(rank)
    assert prompt.asked == []


def test_other_weights_end_what_is_looked_up(rank: Rank) -> None:
    prompt = begin(rank, "r", HASHES)
    rank.requests.waiting.go_on()
    rank.side.weights_changed(flushed=True)
    assert not rank.requests.waiting.looks_ahead
    assert prompt.asked == [(0, 4)]


def test_a_lookup_at_a_requests_turn_reads_nothing(rank: Rank) -> None:
    assert rank.lookup("r", HASHES) == []
    assert fetched(rank, "r") is None
