# SPDX-License-Identifier: Apache-2.0
"""Copies whose ends no poll finds: SGLang gets its pages back; the log says what is disabled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
from sglang_world import PATIENCE_SECONDS, Rank, hashes_of
from test_side_ranks import Engine, engine  # noqa: F401, a fixture

from flexkv.engine.boundary import LASTING
from flexkv.figures.definitions import sample
from packages.inside import cache_of
from packages.inside_adapters import worker_of


class InjectedError(Exception):
    """Nobody expects it."""


def fail(*_: object) -> None:
    raise InjectedError


def break_polls(rank: Rank, patch: pytest.MonkeyPatch, call: str) -> None:
    """Make every poll of a rank fail: on its own copies, or on all ranks' reports."""
    side: Any = rank.side
    owner = worker_of(side) if call == "finished" else cache_of(side)
    patch.setattr(owner, call, fail)


def offload(rank: Rank, text: str) -> None:
    rank.side.offload(hashes_of(text, 3), lambda: [1, 2, 3])


CALLS = pytest.mark.parametrize("call", ["finished", "poll"])


@CALLS
def test_pages_come_back_if_every_poll_fails(
    make_rank: Callable[..., Rank],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    rank = make_rank()
    side = rank.side
    assert rank.store(hashes_of("before", 3), [4, 5, 6])
    side.take_samples()
    offload(rank, "a")
    offload(rank, "b")
    break_polls(rank, monkeypatch, call)
    with caplog.at_level(logging.ERROR):
        ended = [side.ended_offloads() for _ in range(LASTING + 1)]
    assert ended == [0] * (LASTING - 1) + [2, 2]
    assert [side.take_offload() for _ in range(2)] == [False, False]
    (said,) = [each.getMessage() for each in caplog.records if "consecutive" in each.message]
    assert f"{LASTING} consecutive errors in polling copies: the copies of rank 0 end" in said
    samples = side.take_samples()
    assert samples[sample("health", "off", "stopped", "")] == 1
    assert samples[sample("failures", "internal", "")] == LASTING + 1
    # From then on all is a miss, and no page waits.
    assert side.lookup("r", hashes_of("before", 3)) == []
    assert not side.load("r", hashes_of("before", 3), [7, 8, 9])
    offload(rank, "c")
    assert side.ended_offloads() == 1
    assert not side.take_offload()


@CALLS
def test_a_poll_that_succeeds_again_enables_nothing(
    make_rank: Callable[..., Rank],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    """The copies have ended for good."""
    rank = make_rank()
    side = rank.side
    assert rank.store(hashes_of("before", 3), [4, 5, 6])
    offload(rank, "a")
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        break_polls(rank, patch, call)
        assert [side.ended_offloads() for _ in range(LASTING)][-1] == 1
    assert not side.take_offload()
    for change in (
        lambda: side.weights_changed(flushed=True),
        side.reset,
        side.clear,
    ):
        assert side.ended_offloads() == 0
        change()
        assert not side.load("r", hashes_of("before", 3), [7, 8, 9])
        offload(rank, "b")
        assert side.ended_offloads() == 1
        assert not side.take_offload()
        assert side.lookup("r", hashes_of("b", 3)) == []
    assert not side.clear()
    assert len([each for each in caplog.records if "consecutive" in each.message]) == 1


@CALLS
def test_polls_that_fail_now_and_then_disable_nothing(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    rank = make_rank()
    for text in "abc":
        offload(rank, text)
        with monkeypatch.context() as patch:
            break_polls(rank, patch, call)
            assert [rank.side.ended_offloads() for _ in range(LASTING - 1)] == [0] * (LASTING - 1)
        await_end(rank)
        assert rank.side.take_offload()
        assert rank.lookup("r", hashes_of(text, 3)) == [3]


def test_blocks_whose_pages_sglang_has_back_are_never_found(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may still copy out of pages that SGLang gives to others."""
    rank = make_rank()
    cache = cache_of(rank.side)
    offload(rank, "a")
    with monkeypatch.context() as patch:
        break_polls(rank, patch, "poll")
        while not rank.side.ended_offloads():
            pass
    while cache.status.under_way:
        cache.poll()
    assert cache.ready_blocks == 0


@pytest.mark.parametrize(
    ("owner", "fallback"), [("_worker", "stop_copying"), ("_cache", "end_transfer")]
)
def test_pages_stay_locked_until_their_copies_have_ended(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, owner: str, fallback: str
) -> None:
    rank = make_rank()
    offload(rank, "a")
    break_polls(rank, monkeypatch, "finished")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(rank.side, owner), fallback, fail)
        assert [rank.side.ended_offloads() for _ in range(2 * LASTING)] == [0] * (2 * LASTING)
    assert rank.side.ended_offloads() == 1


def test_a_rank_that_ends_its_copies_disables_the_cache_of_all(
    engine: Engine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = engine.ranks
    engine.both(lambda rank: rank.store(hashes_of("a", 3), [1, 2, 3]))
    break_polls(second, monkeypatch, "finished")
    for _ in range(LASTING):
        second.side.ended_offloads()
    engine.both(lambda rank: offload(rank, "b"))
    await_end(first)
    assert second.side.ended_offloads() == 1
    assert not all(engine.both(lambda rank: rank.side.take_offload()))
    assert first.lookup("r", hashes_of("a", 3)) == []
    assert first.side.take_samples()[sample("health", "off", "stopped", "")] == 1


def await_end(rank: Rank) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not rank.side.ended_offloads():
        assert time.monotonic() < deadline
