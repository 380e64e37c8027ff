# SPDX-License-Identifier: Apache-2.0
"""A real SGLang with FlexKV records its requests, and `flexkv plan` reads them."""

from __future__ import annotations

import stat
import time
from pathlib import Path

from flexkv.plan.curve import LRUCurve
from flexkv.plan.read import TraceFile, read_trace
from integration.harness.checkpoint import TINY
from integration.harness.prompts import random_tokens
from integration.sglang.linker import PAGE_TOKENS, linker_config
from integration.sglang.server import SglangServer

ANSWER = 20
PATIENCE = 60.0


def test_what_sglang_computes_is_recorded(tmp_path: Path, model: Path, sglang: Path) -> None:
    path = tmp_path / "trace.jsonl"
    settings = {
        "FLEXKV_CPU_CACHE_GB": "0.05",
        "FLEXKV_RUNTIME_DIR": str(tmp_path / "run"),
        "FLEXKV_ALWAYS_LOAD": "1",
        "FLEXKV_TRACE": str(path),
    }
    stem = random_tokens("recorded", 200, TINY.vocab)
    with SglangServer(linker_config(model, TINY, settings), tmp_path / "log") as server:
        answer = server.generate(stem, ANSWER)
        turn = [*stem, *answer.tokens, *random_tokens("next", 50, TINY.vocab)]
        own = server.generate(turn, ANSWER).cached_tokens
        server.flush()
        loaded = server.generate([*turn, 5], ANSWER, extra_key="").cached_tokens
        server.generate(stem, ANSWER, extra_key="tenant")
        read = recorded(path, 4)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    trace, measured = read.trace, read.measured
    assert (trace.block_tokens, trace.block_bytes) == (
        PAGE_TOKENS,
        TINY.kv_bytes_per_token * PAGE_TOKENS,
    )
    # SGLang sends itself short requests when it starts.
    ours = [each for each in trace.requests if each.output_tokens == ANSWER]
    assert [each.prompt_tokens for each in ours] == [200, 270, 271, 200]
    first, second, third, other = ours
    assert second.blocks[: len(first.blocks) + len(first.answer)] == [*first.blocks, *first.answer]
    assert third.blocks[: len(second.blocks)] == second.blocks
    assert set(other.blocks).isdisjoint(first.blocks)
    assert measured is not None
    assert (measured.engine_tokens, measured.hit_tokens) == (own, loaded)
    assert own > 0 < loaded
    # With all of memory, what SGLang had itself and what FlexKV loaded is all that can be hit.
    assert LRUCurve(trace, None).at(10_000).hit_tokens == own + loaded


def recorded(path: Path, requests: int) -> TraceFile:
    """The recording, once it has so many requests."""
    deadline = time.monotonic() + PATIENCE
    while path.read_text().count(f'"out":{ANSWER},') < requests and time.monotonic() < deadline:
        time.sleep(0.2)
    return read_trace(str(path))
