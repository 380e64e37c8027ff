# SPDX-License-Identifier: Apache-2.0
"""Time to first token of host hits by load mode, alone and beside requests that decode.

Engines of the three modes take turns, one alive at a time. vLLM schedules no step ahead in any of
them, which is what loading layer by layer needs.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable

from integration.bench.rows import Goal, Row, milliseconds, ratio_row
from integration.bench.setup import Bench
from integration.harness.engine import Engine

MODES = ("async", "layerwise", "auto")
LENGTHS = (8192, 21000)
DECODING = 8
DECODING_PROMPT = 256
# They decode until all hits of a length have been measured.
DECODING_TOKENS = 500
ALONE, BESIDE = "alone", f"beside {DECODING} decoding"

Samples = dict[tuple[str, str, int], list[float]]


def load_mode_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """All rows that compare the modes."""
    ttft: Samples = defaultdict(list)
    gaps: Samples = defaultdict(list)
    for start in range(1, bench.pairs + 1):
        for mode in MODES:
            say(f"start {start} of {bench.pairs}: load_mode {mode}")
            chosen = bench.flexkv(load_mode=mode)
            with bench.engine(chosen, async_scheduling=False) as engine:
                for length in LENGTHS:
                    alone, beside, between = _measure(bench, engine, length)
                    ttft[ALONE, mode, length] += alone
                    ttft[BESIDE, mode, length] += beside
                    gaps[BESIDE, mode, length] += between
    rows = []
    for where, length in itertools.product((ALONE, BESIDE), LENGTHS):
        rows += _rows(where, length, ttft)
    return rows + [_gap_row(length, gaps) for length in LENGTHS]


def _measure(
    bench: Bench, engine: Engine, length: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds to the first token of hits alone and beside others, and between tokens of these."""
    # vLLM's own cache can be emptied only while nothing runs, so each hit has its own prompt.
    prompts = [bench.fresh_prompt(length) for _ in range(bench.samples)]
    for prompt in prompts:
        engine.generate(prompt, max_tokens=1)
    for _ in range(2):  # the first round warms up
        engine.reset_prefix_cache()
        alone = [_hit(engine, prompt) for prompt in prompts]
    engine.reset_prefix_cache()
    others = [
        engine.submit(bench.fresh_prompt(DECODING_PROMPT), max_tokens=DECODING_TOKENS)
        for _ in range(DECODING)
    ]
    for other in others:
        other.wait_first_token()
    beside = [_hit(engine, prompt) for prompt in prompts]
    if any(other.future.done() for other in others):
        raise RuntimeError("requests that should have been decoding had ended")
    times = [other.result().times for other in others]
    return alone, beside, [b - a for each in times for a, b in itertools.pairwise(each)]


def _hit(engine: Engine, prompt: list[int]) -> float:
    before = engine.counter("vllm:external_prefix_cache_hits")
    answer = engine.generate(prompt, max_tokens=1)
    hits = engine.counter("vllm:external_prefix_cache_hits") - before
    if hits < 0.9 * len(prompt):
        raise RuntimeError(f"only {hits:g} of {len(prompt)} tokens were restored")
    return answer.ttft


def _rows(where: str, length: int, ttft: Samples) -> list[Row]:
    by_mode = {mode: ttft[where, mode, length] for mode in MODES}
    better = min(("async", "layerwise"), key=lambda mode: statistics.median(by_mode[mode]))
    what = f"TTFT of a host hit at {length:,} tokens {where}"
    return [
        ratio_row(
            f"{what}, layerwise ÷ async",
            None,
            ("layerwise", by_mode["layerwise"]),
            ("async", by_mode["async"]),
        ),
        ratio_row(
            f"{what}, auto ÷ the better one",
            Goal("<=", 1.05),
            ("auto", by_mode["auto"]),
            (better, by_mode[better]),
        ),
    ]


def _gap_row(length: int, gaps: Samples) -> Row:
    """What the requests that decode feel of hits: their slowest hundredth of tokens."""
    by_mode = {mode: sorted(gaps[BESIDE, mode, length]) for mode in MODES}
    slow = {mode: found[len(found) * 99 // 100] for mode, found in by_mode.items()}
    return Row(
        what=f"inter-token latency of {DECODING} requests beside hits of {length:,} tokens, p99, "
        f"layerwise ÷ async",
        value=slow["layerwise"] / slow["async"],
        unit="ratio",
        goal=None,
        detail="; ".join(
            f"{mode}: median {milliseconds(statistics.median(found))}, p99 "
            f"{milliseconds(slow[mode])}, longest {milliseconds(found[-1])}"
            for mode, found in by_mode.items()
        ),
    )
