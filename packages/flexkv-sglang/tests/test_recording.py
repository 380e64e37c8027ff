# SPDX-License-Identifier: Apache-2.0
"""What a recorder is told of SGLang's batches."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv.adapter.recorder import open_recorder
from flexkv.config_sources import load_config
from flexkv.plan.read import read_trace
from flexkv.plan.trace import Trace
from flexkv_sglang import recording
from flexkv_sglang.recording import BatchRecorder

PAGE = 4


class Request:
    """A request as SGLang's scheduler has it, by what is read of it."""

    def __init__(self, rid: str, prompt: list[int], prefix: int = 0, tenant: str = "") -> None:
        self.rid = rid
        self.origin_input_ids = prompt
        self.output_ids = array("q")
        self.prefix_len = prefix
        self.extra_key = tenant or None

    def finished(self) -> bool:
        return len(self.output_ids) > 0


@pytest.fixture
def batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchRecorder]:
    monkeypatch.setattr(recording, "_LOOK_SECONDS", 0.0)
    config = load_config({"trace": str(tmp_path / "trace")}, environ={})
    recorder = open_recorder(config, engine="sglang", block_tokens=PAGE, block_bytes=64)
    assert recorder is not None
    made = BatchRecorder(recorder, PAGE)
    yield made
    made.close()


def recorded(batches: BatchRecorder, tmp_path: Path) -> Trace:
    batches.close()
    return read_trace(str(tmp_path / "trace")).trace


def test_a_request_is_recorded_once_with_its_answer(batches: BatchRecorder, tmp_path: Path) -> None:
    request = Request("a", list(range(10)), prefix=8)
    loaded = {"a": 4, "later": 8}
    batches.batch([request], loaded)
    assert loaded == {"later": 8}
    request.prefix_len = 9  # the next part of its prompt
    batches.batch([request], {})
    request.output_ids.extend([50, 51, 52])
    batches.batch([], {})
    batches.batch([], {})
    trace = recorded(batches, tmp_path)
    (found,) = trace.requests
    assert (found.prompt_tokens, found.output_tokens) == (10, 3)
    assert (len(found.blocks), len(found.answer)) == (2, 1)
    measured = read_trace(str(tmp_path / "trace")).measured
    assert measured is not None
    assert (measured.engine_tokens, measured.hit_tokens) == (4, 4)


def test_equal_prompts_of_two_tenants_are_different_blocks(
    batches: BatchRecorder, tmp_path: Path
) -> None:
    prompt = list(range(9))
    requests = [Request("a", prompt), Request("b", prompt), Request("c", prompt, tenant="t")]
    batches.batch(requests, {})
    trace = recorded(batches, tmp_path)
    first, second, other = (each.blocks for each in trace.requests)
    assert first == second
    assert set(first).isdisjoint(other)
