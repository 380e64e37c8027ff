# SPDX-License-Identifier: Apache-2.0
"""Whether a real engine finds what `flexkv plan` says that it would.

vLLM serves a slice of a trace, one request after the other and as fast as it can, and records it
(setting `trace`). The plan's replay of the recording must then find as much as the engine did, in
memory of three sizes, with the default eviction policy. Each block of the trace is one small block
of the engine, of tokens of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flexkv.plan.read import read_trace
from flexkv.plan.recording import Measured
from flexkv.plan.replay import Outcome, Setup, replay
from flexkv.plan.trace import Trace
from integration.bench.rows import Goal, Row
from integration.bench.setup import Bench
from integration.bench.workloads import returning_chats
from integration.harness.checkpoint import TINY, write_checkpoint
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.prompts import random_tokens

REQUESTS = 3_000
SIZES = (1_000, 2_000, 4_000)
"""Blocks of host memory. In much smaller memory the order in which requests end decides whether the
guard trusts the policy, and the hits of two equal runs differ by more than a point."""
BLOCK_TOKENS = 32
BLOCK_BYTES = BLOCK_TOKENS * 1536
"""Keys and values of the tiny model, in float32."""
MOST_TOKENS = 8192
ENGINE_BLOCKS = MOST_TOKENS // BLOCK_TOKENS + 45
"""Blocks of vLLM's own cache, of which it keeps one to itself: little more than the longest prompt
has."""
_ANSWER_TOKENS = 2
_GOAL_POINTS = 1.0
_GIB = 1 << 30


def plan_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """A row for each size of memory: by how many points the plan is off."""
    whole = read_trace(str(bench.traces[0])).trace if bench.traces else returning_chats(REQUESTS)
    trace = replace(whole, requests=whole.requests[:REQUESTS])
    rows = []
    for size in SIZES:
        say(f"{trace.name}: {len(trace.requests)} requests, {size} blocks of memory")
        recording = bench.folder / f"recorded-{size}.jsonl"
        _serve(bench, trace, size, recording)
        recorded = read_trace(str(recording))
        assert recorded.measured is not None
        setup = Setup(size, "hazard", engine_blocks=ENGINE_BLOCKS - 1)
        rows.append(_row(size, recorded.measured, replay(recorded.trace, setup)))
    return rows


def _serve(bench: Bench, trace: Trace, size: int, recording: Path) -> None:
    """Send the requests to an engine with memory for `size` blocks, which records them."""
    chosen = bench.flexkv(
        size * BLOCK_BYTES / _GIB,
        block_tokens=BLOCK_TOKENS,
        always_load=True,
        trace=str(recording),
    )
    config = EngineConfig(
        model=write_checkpoint(TINY, bench.folder),
        dtype=TINY.dtype,
        connector=chosen,
        block_size=BLOCK_TOKENS,
        num_blocks=ENGINE_BLOCKS,
        max_model_len=MOST_TOKENS,
    )
    with Engine(config, bench.folder / "logs" / f"plan-{size}.log") as engine:
        for prompt in _prompts(trace):
            engine.generate(prompt, max_tokens=_ANSWER_TOKENS)


def _prompts(trace: Trace) -> Iterator[Sequence[int]]:
    """The tokens of each request, one more than its blocks have: an engine computes the last token
    in any case. Prompts that are too long for the engine are cut."""
    most = (MOST_TOKENS - 1 - _ANSWER_TOKENS) // BLOCK_TOKENS
    for request in trace.requests:
        prompt: list[int] = []
        for block in request.blocks[:most]:
            prompt += random_tokens(block, BLOCK_TOKENS, TINY.vocab)
        yield [*prompt, random_tokens("end", 1, TINY.vocab)[0]]


def _row(size: int, measured: Measured, planned: Outcome) -> Row:
    served = 100 * measured.hit_tokens / measured.prompt_tokens
    own = 100 * measured.engine_tokens / measured.prompt_tokens
    replayed = 100 * planned.hit_rate
    return Row(
        f"flexkv plan beside vLLM, {size:,} blocks of memory",
        abs(served - replayed),
        "points",
        Goal("<=", _GOAL_POINTS),
        f"FlexKV loaded {served:.2f} % of the prompt tokens, the plan says {replayed:.2f} %; "
        f"vLLM's own cache had {own:.2f} %",
    )
