# SPDX-License-Identifier: Apache-2.0
"""Blocks on disk: requests wait for them out of the scheduler's sight, and restarts find them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_requests import OwnPages
from sglang_world import Rank, hashes_of, same, wait_for

from flexkv.client import Reset
from flexkv.engine.choice.chooser import LoadChooser
from packages.inside import cache_of, fail_resets, urgencies_of

MakeRank = Callable[..., Rank]


def test_a_restart_finds_what_the_last_engine_stored(
    make_rank: MakeRank, disk: dict[str, Any]
) -> None:
    first = make_rank(settings=disk)
    hashes = hashes_of("a", 3)
    stored = first.fill([1, 2, 3], seed=1)
    assert first.store(hashes, [1, 2, 3])
    first.close()

    second = make_rank(settings=disk)
    assert second.side.may_wait
    assert second.lookup("r", hashes) == []
    second.look_ahead("other", hashes_of("b", 3))
    second.look_ahead("r", hashes)
    assert second.side.held(["other", "r"]) == [False, True]
    wait_for(second, "r")
    assert second.lookup("r", hashes) == [3]
    assert second.side.load("r", hashes, [7, 8, 9])
    assert second.side.fetched_tokens("r") == 12
    assert second.side.cancel("r")
    assert second.side.fetched_tokens("r") == 0
    # Now host memory has them. The disk has given them to this request all the same.
    assert second.side.held(["r"]) == [False]
    assert second.lookup("r", hashes) == [3]
    assert second.load("r", hashes, [7, 8, 9])
    assert same(second.read([7, 8, 9]), stored)
    second.requests.scheduled([second.request("r", prefix=12)], [], OwnPages())
    samples = second.side.take_samples()
    assert samples["hit_tokens:disk"] == 12
    assert samples.get("hit_tokens:host", 0) == 0
    # Once it has left the queue, its id may be another request's.
    second.side.held([])
    assert second.lookup("r", hashes) == [3]
    assert second.side.load("r", hashes, [7, 8, 9])
    assert second.side.fetched_tokens("r") == 0
    assert second.side.cancel("r")


def test_a_fetch_has_the_priority_of_its_request(make_rank: MakeRank, disk: dict[str, Any]) -> None:
    first = make_rank(settings=disk)
    hashes = hashes_of("a", 3)
    first.fill([1, 2, 3], seed=1)
    assert first.store(hashes, [1, 2, 3])
    first.close()
    second = make_rank(settings=disk)
    second.look_ahead("r", hashes, params={"flexkv.priority": 7})
    assert [urgency.turn for urgency in urgencies_of(cache_of(second.side))] == [-7]


def test_a_cleared_cache_has_nothing_in_any_tier(make_rank: MakeRank, disk: dict[str, Any]) -> None:
    rank = make_rank(settings=disk)
    hashes = hashes_of("a", 3)
    rank.store(hashes, [1, 2, 3])
    assert rank.side.clear()
    assert rank.lookup("r", hashes) == []
    rank.look_ahead("r", hashes)
    assert rank.side.held(["r"]) == [False]
    assert rank.store(hashes, [1, 2, 3])
    assert rank.lookup("r", hashes) == [3]
    rank.close()
    # Blocks that were stored before are gone for good.
    other = make_rank(settings=disk)
    other.look_ahead("r", hashes)
    assert other.lookup("r", hashes) == []


def test_new_weights_find_nothing_on_disk_and_leave_the_pages_of_old_ones_there(
    make_rank: MakeRank, disk: dict[str, Any]
) -> None:
    """The next process loads the model's files, whose weights are the old ones."""
    first = make_rank(settings=disk)
    hashes = hashes_of("a", 3)
    old = first.fill([1, 2, 3], seed=1)
    first.store(hashes, [1, 2, 3])
    first.close()
    rank = make_rank(settings=disk)
    rank.side.weights_changed(flushed=True)
    rank.look_ahead("r", hashes)
    assert rank.side.held(["r"]) == [False]
    assert rank.lookup("r", hashes) == []
    rank.fill([4, 5, 6], seed=2)
    rank.store(hashes, [4, 5, 6])
    assert rank.lookup("r", hashes) == [3]
    rank.close()

    other = make_rank(settings=disk)
    other.look_ahead("r", hashes)
    assert other.side.held(["r"]) == [True]
    wait_for(other, "r")
    assert other.lookup("r", hashes) == [3]
    assert other.load("r", hashes, [7, 8, 9])
    assert same(other.read([7, 8, 9]), old)


def test_after_a_failed_clear_nothing_is_found_until_one_succeeds(
    make_rank: MakeRank, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(settings=disk)
    hashes = hashes_of("a", 3)
    rank.store(hashes, [1, 2, 3])

    with monkeypatch.context() as patch:
        fail_resets(patch, cache_of(rank.side), Reset.CLEAR, OSError("nobody expects it"))
        assert not rank.side.clear()
    assert rank.lookup("r", hashes) == []
    assert rank.side.clear()
    assert rank.store(hashes, [1, 2, 3])


def test_a_request_that_left_waits_for_nothing(make_rank: MakeRank, disk: dict[str, Any]) -> None:
    first = make_rank(settings=disk)
    hashes = hashes_of("a", 3)
    first.store(hashes, [1, 2, 3])
    first.close()
    second = make_rank(settings=disk)
    second.look_ahead("r", hashes)
    assert second.side.held([]) == []
    assert second.requests.waiting.is_new("r")
    assert second.side.held(["r"]) == [False]


def test_nothing_waits_without_a_disk(make_rank: MakeRank) -> None:
    assert not make_rank().side.may_wait


def test_a_waiting_request_is_new_once(make_rank: MakeRank) -> None:
    rank = make_rank()
    side, requests = rank.side, rank.requests
    assert requests.waiting.is_new("r")
    assert not requests.waiting.is_new("r")
    side.held(["r"])
    assert not requests.waiting.is_new("r")
    side.held([])  # it was scheduled; retracted, it waits anew
    assert requests.waiting.is_new("r")


def test_a_model_of_other_weights_finds_nothing(
    make_rank: MakeRank, disk: dict[str, Any], tmp_path: Path
) -> None:
    first = make_rank(settings=disk)
    hashes = hashes_of("a", 3)
    first.store(hashes, [1, 2, 3])
    first.close()
    (tmp_path / "model.safetensors").write_bytes(b"other")
    second = make_rank(settings=disk)
    second.look_ahead("r", hashes)
    assert second.side.held(["r"]) == [False]


def test_a_request_does_not_wait_for_what_it_computes_sooner(
    make_rank: MakeRank, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_rank(settings=disk)
    hashes = hashes_of("a", 3)
    first.store(hashes, [1, 2, 3])
    first.close()
    second = make_rank(settings=disk)
    second.look_ahead("r", hashes)
    monkeypatch.setattr(LoadChooser, "is_worth_waiting", lambda *_: False)
    assert second.side.held(["r"]) == [False]
