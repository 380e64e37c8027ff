# SPDX-License-Identifier: Apache-2.0
"""Time to first token of host hits by load mode, alone and beside requests that decode.

Starts of one and the same engine differ by more than the modes do, so the modes take turns in each:
every request says how it is to be loaded. vLLM schedules no step ahead, which is what loading layer
by layer needs.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from integration.bench.rows import Goal, Row, milliseconds, ratio_row
from integration.bench.setup import Bench
from integration.harness.engine import Engine

MODES = ("async", "layerwise", "auto")
LENGTHS = (8190, 21000)
DECODING = 8
DECODING_PROMPT = 256
# They decode until all hits of a round have been measured.
DECODING_TOKENS = 150
# Beside others a hit may come anywhere in a step: half of 30 samples were 15 % apart, and medians
# of as many differed by 8 % where nothing else did.
HITS_IN_A_ROUND = 8
ALONE, BESIDE = "alone", f"beside {DECODING} decoding"

Samples = dict[tuple[str, str, int], list[float]]


def load_mode_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """All rows that compare the modes."""
    ttft: Samples = defaultdict(list)
    gaps: Samples = defaultdict(list)
    for start in range(1, bench.pairs + 1):
        say(f"start {start} of {bench.pairs}: an engine with load_mode auto")
        chosen = bench.flexkv(load_mode="auto")
        with bench.engine(chosen, async_scheduling=False) as engine:
            for length in LENGTHS:
                prompts = [bench.fresh_prompt(length) for _ in range(HITS_IN_A_ROUND)]
                for prompt in prompts:
                    engine.generate(prompt, max_tokens=1)
                for mode in _turns(2):  # warms up, and `auto` learns what loading takes
                    _alone(engine, prompts, mode)
                    _beside(bench, engine, prompts, mode)
                for mode in _turns(bench.samples):
                    ttft[ALONE, mode, length] += _alone(engine, prompts, mode)
                    hits, between = _beside(bench, engine, prompts, mode)
                    ttft[BESIDE, mode, length] += hits
                    gaps[BESIDE, mode, length] += between
    rows = []
    for where, length in itertools.product((ALONE, BESIDE), LENGTHS):
        rows += _rows(where, length, ttft)
    return rows + [_gap_row(length, gaps) for length in LENGTHS]


def _turns(rounds: int) -> Iterator[str]:
    """The modes, each `rounds` times, in an order that favours none."""
    for number in range(rounds):
        first = number % len(MODES)
        yield from MODES[first:] + MODES[:first]


def _alone(engine: Engine, prompts: Sequence[list[int]], mode: str) -> list[float]:
    """Seconds to the first token of each prompt's hit while nothing else runs."""
    engine.reset_prefix_cache()
    return [_hit(engine, prompt, mode) for prompt in prompts]


def _beside(
    bench: Bench, engine: Engine, prompts: Sequence[list[int]], mode: str
) -> tuple[list[float], list[float]]:
    """Seconds to the first token of each prompt's hit beside requests that decode, and between the
    tokens of these."""
    # vLLM's own cache can be emptied only while nothing runs, so each hit has its own prompt.
    engine.reset_prefix_cache()
    others = [
        engine.submit(bench.fresh_prompt(DECODING_PROMPT), max_tokens=DECODING_TOKENS)
        for _ in range(DECODING)
    ]
    for other in others:
        other.wait_first_token()
    hits = [_hit(engine, prompt, mode) for prompt in prompts]
    if any(other.future.done() for other in others):
        raise RuntimeError("requests that should have been decoding had ended")
    times = [other.result().times for other in others]
    return hits, [b - a for each in times for a, b in itertools.pairwise(each)]


def _hit(engine: Engine, prompt: list[int], mode: str) -> float:
    before = engine.counter("vllm:external_prefix_cache_hits")
    answer = engine.generate(prompt, max_tokens=1, transfer_params={"flexkv.load_mode": mode})
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
