# SPDX-License-Identifier: Apache-2.0
"""What a recorder is told of SGLang's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sglang_requests import Request
from sglang_world import Rank

from flexkv.engine.recorder import open_recorder
from flexkv.plan.read import read_trace
from flexkv.plan.trace import Trace
from flexkv.settings import load_config
from flexkv_sglang import following
from flexkv_sglang.following import FollowedRequests
from flexkv_sglang.recording import RequestRecorder

PAGE = 4


@pytest.fixture
def followed(
    make_rank: Callable[..., Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FollowedRequests]:
    monkeypatch.setattr(following, "_LOOK_SECONDS", 0.0)
    config = load_config({"trace": str(tmp_path / "trace")}, environ={})
    recorder = open_recorder(config, engine="sglang", block_tokens=PAGE, block_bytes=64)
    assert recorder is not None
    side = make_rank().side
    assert side._cache is not None
    made = FollowedRequests(side._cache, PAGE, side.keys_of, RequestRecorder(recorder, PAGE))
    yield made
    made.close()


def recorded(followed: FollowedRequests, tmp_path: Path) -> Trace:
    followed.close()
    return read_trace(str(tmp_path / "trace")).trace


def no_hashes(request: object) -> list[str]:
    return []


def test_a_request_is_recorded_once_with_its_answer(
    followed: FollowedRequests, tmp_path: Path
) -> None:
    request = Request("a", list(range(10)), prefix=8)
    followed.loads("a", 1)
    followed.batch([request], [], no_hashes)
    request.prefix_len = 9  # the next part of its prompt
    followed.batch([request], [], no_hashes)
    request.output_ids.extend([50, 51, 52])
    followed.batch([], [], no_hashes)
    followed.batch([], [], no_hashes)
    trace = recorded(followed, tmp_path)
    (found,) = trace.requests
    assert (found.prompt_tokens, found.output_tokens) == (10, 3)
    assert (len(found.blocks), len(found.answer)) == (2, 1)
    measured = read_trace(str(tmp_path / "trace")).measured
    assert measured is not None
    assert (measured.engine_tokens, measured.hit_tokens) == (4, 4)


def test_equal_prompts_of_two_tenants_are_different_blocks(
    followed: FollowedRequests, tmp_path: Path
) -> None:
    prompt = list(range(9))
    requests = [Request("a", prompt), Request("b", prompt), Request("c", prompt, tenant="t")]
    followed.batch(requests, [], no_hashes)
    trace = recorded(followed, tmp_path)
    first, second, other = (each.blocks for each in trace.requests)
    assert first == second
    assert set(first).isdisjoint(other)
