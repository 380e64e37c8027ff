# SPDX-License-Identifier: Apache-2.0
"""What a recorder is told of SGLang's batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sglang_requests import OwnPages, Request
from sglang_world import Rank, hashes_of

from flexkv.plan.read import TraceFile, read_trace
from flexkv_sglang import requests


@pytest.fixture
def rank(make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rank:
    monkeypatch.setattr(requests, "_LOOK_SECONDS", 0.0)
    return make_rank(settings={"trace": str(tmp_path / "trace")})


def recorded(rank: Rank, tmp_path: Path) -> TraceFile:
    rank.close()
    return read_trace(str(tmp_path / "trace"))


def test_a_request_is_recorded_once_with_its_answer(rank: Rank, tmp_path: Path) -> None:
    hashes = hashes_of("a", 3)
    rank.store(hashes[1:2], [1])
    request = rank.request("a", range(10), 8)
    assert rank.lookup("a", hashes[1:2], 4) == [1]
    assert rank.load("a", hashes[1:2], [2])
    pages = OwnPages(hashes[:1], hashes[2:])
    rank.requests.scheduled([request], [], pages)
    request.prefix_len = 9  # the next part of its prompt
    rank.requests.scheduled([request], [], pages)
    request.output_ids.extend([50, 51, 52])
    rank.requests.scheduled([], [], pages)
    rank.requests.scheduled([], [], pages)
    found = recorded(rank, tmp_path)
    (one,) = found.trace.requests
    assert (one.prompt_tokens, one.output_tokens) == (10, 3)
    assert (len(one.blocks), len(one.answer)) == (2, 1)
    assert found.measured is not None
    assert (found.measured.engine_tokens, found.measured.hit_tokens) == (4, 4)


def test_blocks_are_recorded_by_their_hashes(rank: Rank, tmp_path: Path) -> None:
    """Hashes of SGLang cover the tenant."""
    prompt = list(range(9))
    for rid, name in (("a", "one"), ("b", "one"), ("c", "other")):
        request = Request(rid, prompt)
        pages = OwnPages(behind=hashes_of(name, 2))
        rank.requests.scheduled([request], [], pages)
        request.output_ids.append(1)
        rank.requests.scheduled([], [], pages)
    first, second, other = (each.blocks for each in recorded(rank, tmp_path).trace.requests)
    assert len(first) == 2
    assert first == second
    assert set(first).isdisjoint(other)
