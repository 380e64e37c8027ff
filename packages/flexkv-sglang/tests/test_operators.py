# SPDX-License-Identifier: Apache-2.0
"""Operators change the cache of a rank between two calls of SGLang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asked_door import call_door
from sglang_requests import OwnPages, Request
from sglang_world import (
    LAYERS,
    PATIENCE_SECONDS,
    Rank,
    hashes_of,
    make_windowed,
    make_with_states,
    same,
)

from flexkv.client import Reset
from flexkv.engine.scheduler import operator_calls
from flexkv.figures.definitions import HINTS, sample
from flexkv.operators.ask_door import AskError
from flexkv_sglang import requests
from packages.inside import cache_of, fail_resets

MakeRank = Callable[..., Rank]

HASHES = hashes_of("a", 3)
SLOTS = 64
SMALL = {"cpu_cache_gb": SLOTS * 4096 / 2**30}
"""Host memory of so many pages."""


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., Any]:
    def ask(path: str, **question: Any) -> Any:
        return call_door(str(tmp_path / "run"), path, **question)

    return ask


def in_host(call: Callable[..., Any]) -> int:
    (places,) = call("/lookup", hashes=HASHES)
    return int(places["tiers"][0]["blocks"])


def flood(rank: Rank, name: str) -> None:
    """Evict all that may be evicted."""
    for number in range(SLOTS // 8 + 1):
        rank.store(hashes_of(f"{name} {number}", 8), range(1, 9))


def test_a_prompt_is_warmed_after_a_restart(
    make_rank: MakeRank, disk: dict[str, Any], call: Callable[..., Any]
) -> None:
    first = make_rank(settings=disk)
    stored = first.fill([1, 2, 3], seed=1)
    assert first.store(HASHES, [1, 2, 3])
    first.close()
    rank = make_rank(settings=disk)
    assert in_host(call) == 0
    warmed = call("/warm", hashes=HASHES)
    assert (warmed["done"], warmed["reason"]) == (3, "")
    assert rank.lookup("r", HASHES) == [3]
    assert rank.load("r", HASHES, [7, 8, 9])
    assert same(rank.read([7, 8, 9]), stored)


def test_pinned_pages_outlast_a_flood_until_they_are_unpinned(
    make_rank: MakeRank, call: Callable[..., Any]
) -> None:
    rank = make_rank(settings=SMALL)
    rank.store(HASHES, [1, 2, 3])
    assert call("/pin", hashes=HASHES, name="system")["done"] == 3
    flood(rank, "b")
    assert in_host(call) == 3
    call("/unpin", name="system")
    flood(rank, "c")
    assert in_host(call) == 0


def test_a_removed_prompt_is_on_no_tier(
    make_rank: MakeRank, disk: dict[str, Any], call: Callable[..., Any]
) -> None:
    rank = make_rank(settings=disk)
    other = hashes_of("b", 3)
    rank.store(HASHES, [1, 2, 3])
    rank.store(other, [4, 5, 6])
    assert rank.lookup("r", HASHES) == [3]
    removed = call("/remove", hashes=HASHES)
    assert (removed["done"], removed["reason"]) == (3, "")
    # SGLang, which has looked them up, computes them.
    assert not rank.side.load("r", HASHES, [7, 8, 9])
    assert rank.lookup("s", HASHES) == []
    assert rank.lookup("t", other) == [3]
    rank.close()
    again = make_rank(settings=disk)
    again.look_ahead("r", HASHES)
    assert again.side.held(["r"]) == [False]


def test_a_prompt_is_warmed_and_removed_with_its_windows(
    make_rank: MakeRank, disk: dict[str, Any], call: Callable[..., Any]
) -> None:
    pool = make_windowed()
    first = make_rank(pool=pool, window=8, settings=disk)
    first.store(HASHES, [1, 2, 3], [4, 5, 6])
    first.close()
    rank = make_rank(pool=pool, window=8, settings=disk)
    assert call("/warm", hashes=HASHES)["done"] == 3
    assert rank.lookup("r", HASHES) == [3]  # without a wait for the disk
    windows = rank.side.trailing.keys_of(rank.side.keys_of(HASHES), {"swa": 3})
    cache = cache_of(rank.side)
    assert any(map(any, cache.where(windows).values()))
    call("/remove", hashes=HASHES)
    assert not any(map(any, cache.where(windows).values()))


def test_a_prompt_is_warmed_and_removed_with_its_states(
    make_rank: MakeRank, disk: dict[str, Any], call: Callable[..., Any]
) -> None:
    """SGLang kept one at the end of the second page, and one before the last 256 tokens."""
    pool = make_with_states()
    hashes = hashes_of("a", 80)
    first = make_rank(pool=pool, settings=disk)
    for start in range(0, 80, 10):
        states = [1] if start == 0 else [2] if start == 60 else []
        first.store(hashes[start : start + 10], range(1, 11), states=states)
    first.close()
    rank = make_rank(pool=pool, settings=disk)
    assert call("/warm", hashes=hashes)["done"] == 80
    assert rank.lookup("r", hashes) == [70]  # without a wait for the disk
    cache = cache_of(rank.side)

    def where(page: int) -> list[bool]:
        keys = rank.side.trailing.keys_of(rank.side.keys_of(hashes[: page + 1]), {"mamba": 1})
        host, on_disk = cache.where(keys).values()
        return [all(host), all(on_disk)]

    assert [where(9), where(69)] == [[False, True], [True, True]]
    call("/remove", hashes=hashes)
    assert [where(9), where(69)] == [[False, False], [False, False]]


def answer(rank: Rank, **others: Any) -> None:
    """SGLang computes and stores a request with three pages, answer included, which then ends."""
    request = rank.request("r", range(9), **others)
    pages = OwnPages(behind=HASHES[2:])
    rank.lookup("r", HASHES[:2])
    rank.requests.scheduled([request], [], pages)
    rank.store(HASHES, [1, 2, 3])
    request.output_ids.extend(range(4))
    rank.requests.scheduled([], [], pages)
    assert pages.asked == [(2, HASHES[1])]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of requests are seen at once."""
    monkeypatch.setattr(requests, "_LOOK_SECONDS", 0.0)


def test_the_blocks_of_a_conversation_are_removed(
    make_rank: MakeRank, disk: dict[str, Any], call: Callable[..., Any], soon: None
) -> None:
    rank = make_rank(settings=disk)
    rank.store(hashes_of("b", 3), [4, 5, 6])
    answer(rank, session_id="chat", salt="team")
    assert call("/remove_session", session="chat")["blocks"] == 0
    assert in_host(call) == 3
    assert call("/remove_session", session="chat", cache_salt="team")["blocks"] == 3
    assert in_host(call) == 0
    assert rank.lookup("other", hashes_of("b", 3)) == [3]


def test_the_windows_of_a_conversation_are_removed(
    make_rank: MakeRank, call: Callable[..., Any], soon: None
) -> None:
    rank = make_rank(pool=make_windowed(), window=8)
    request = rank.request("r", range(9), session_id="chat")
    pages = OwnPages(behind=HASHES[2:])
    rank.lookup("r", HASHES[:2])
    rank.requests.scheduled([request], [], pages)
    rank.store(HASHES, [1, 2, 3], [3, 1])
    request.output_ids.extend(range(4))
    rank.requests.scheduled([], [], pages)
    keys = rank.side.trailing.keys_of(rank.side.keys_of(HASHES), {"swa": 3})
    cache = cache_of(rank.side)
    assert any(map(any, cache.where(keys).values()))
    assert call("/remove_session", session="chat")["blocks"] == 3
    assert not any(map(any, cache.where(keys).values()))


def test_retained_blocks_stay_until_their_conversation_is_released(
    make_rank: MakeRank, call: Callable[..., Any], soon: None
) -> None:
    rank = make_rank(settings=SMALL)
    answer(rank, session_id="chat", params={"flexkv.retain_seconds": 3600})
    flood(rank, "b")
    assert in_host(call) == 3
    assert call("/release", session="chat")["blocks"] == 3
    flood(rank, "c")
    assert in_host(call) == 0


def test_a_request_releases_what_its_conversation_has_retained(
    make_rank: MakeRank, call: Callable[..., Any], soon: None
) -> None:
    rank = make_rank(settings=SMALL)
    answer(rank, params={"flexkv.retain_seconds": 3600})
    flood(rank, "b")
    assert in_host(call) == 3
    answer(rank, params={"flexkv.release": True})
    flood(rank, "c")
    assert in_host(call) == 0


def test_a_request_demotes_its_blocks(
    make_rank: MakeRank, disk: dict[str, Any], call: Callable[..., Any], soon: None
) -> None:
    rank = make_rank(settings=disk)
    other = hashes_of("b", 2)
    rank.store(other, [4, 5])
    answer(rank, params={"flexkv.demote": True})
    cache = cache_of(rank.side)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while in_host(call):
        assert time.monotonic() < deadline
        rank.side.ended_offloads()
    (places,) = call("/lookup", hashes=HASHES)
    assert [tier["blocks"] for tier in places["tiers"]] == [0, 3]
    assert cache.ready_blocks == 2
    assert rank.side.take_samples()[sample(HINTS.name, "demote", "accepted")] == 1


def test_without_a_disk_a_demotion_is_unsupported(
    make_rank: MakeRank, call: Callable[..., Any], soon: None
) -> None:
    rank = make_rank(settings=SMALL)
    rank.store(HASHES, [1, 2, 3])
    rank.requests.matched(Request("r", list(range(9)), params={"flexkv.demote": True}), 0)
    rank.side.ended_offloads()
    assert in_host(call) == 3
    assert rank.side.take_samples()[sample(HINTS.name, "demote", "unsupported")] == 1


def test_a_request_pins_its_blocks_until_another_unpins_them(
    make_rank: MakeRank, call: Callable[..., Any], soon: None
) -> None:
    rank = make_rank(settings=SMALL | {"request_options": "pin,pin_name,unpin"})
    answer(rank, params={"flexkv.pin": True, "flexkv.pin_name": "system"})
    flood(rank, "b")
    assert in_host(call) == 3
    rank.requests.matched(Request("o", [1], params={"flexkv.unpin": True}), 0)
    flood(rank, "c")
    assert in_host(call) == 3
    named = {"flexkv.unpin": True, "flexkv.pin_name": "system"}
    rank.requests.matched(Request("p", [1], params=named), 0)
    flood(rank, "d")
    assert in_host(call) == 0


def test_a_clear_leaves_a_load_its_pages_and_publishes_no_offload(
    make_rank: MakeRank, disk: dict[str, Any], call: Callable[..., Any]
) -> None:
    rank = make_rank(settings=disk)
    stored, other = rank.fill([1, 2, 3], seed=1), hashes_of("b", 3)
    rank.store(HASHES, [1, 2, 3])
    assert rank.lookup("r", HASHES) == [3]
    assert rank.side.load("r", HASHES, [7, 8, 9])
    rank.side.offload(other, lambda: [4, 5, 6])
    cleared = call("/clear", blocks="all")
    assert (cleared["blocks"], cleared["reason"]) == (3, "")
    rank.side.start_batch()
    for layer in range(LAYERS):
        rank.side.wait_for_layer(layer)
    assert rank.side.finish_batch()
    assert same(rank.read([7, 8, 9]), stored)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not rank.side.ended_offloads():
        assert time.monotonic() < deadline
    rank.side.take_offload()
    for hashes in (HASHES, other):
        (places,) = call("/lookup", hashes=hashes)
        assert [each["blocks"] for each in places["tiers"]] == [0, 0]
    assert rank.store(other, [4, 5, 6])
    rank.close()
    make_rank(settings=disk)
    assert call("/warm", hashes=HASHES)["done"] == 0
    assert call("/warm", hashes=other)["done"] == 3


def test_a_clear_that_sglang_can_not_make_is_refused(
    make_rank: MakeRank, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    rank.store(HASHES, [1, 2, 3])

    with monkeypatch.context() as patch:
        fail_resets(patch, cache_of(rank.side), Reset.EMPTY, RuntimeError("for the test"))
        with pytest.raises(AskError, match="the cache is not cleared, and nothing is loaded"):
            call("/clear", blocks="all")
    assert rank.lookup("r", HASHES) == []
    call("/clear", blocks="all")
    assert rank.store(HASHES, [1, 2, 3])
    assert rank.lookup("s", HASHES) == [3]


def test_no_call_begins_while_sglang_is_in_one(
    make_rank: MakeRank, call: Callable[..., Any]
) -> None:
    rank = make_rank()
    began, early = threading.Event(), list[bool]()
    thread = threading.Thread(target=lambda: (call("/unpin"), began.set()))

    def pages() -> list[int]:
        thread.start()
        early.append(began.wait(0.3))
        return [1, 2, 3]

    rank.side.offload(HASHES, pages)
    thread.join()
    assert began.is_set()
    assert early == [False]


def test_a_closed_side_lets_no_call_in(
    make_rank: MakeRank, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_calls, "_TURN_SECONDS", 0.05)
    rank = make_rank()
    monkeypatch.setattr(rank.side, "_closed", True)
    with pytest.raises(AskError, match="has let no other call in"):
        call("/unpin")
    monkeypatch.undo()
    assert call("/unpin")["name"] == "default"
