# SPDX-License-Identifier: Apache-2.0
"""Time to first token of hits and of misses, and time per output token, on real engines.

Engines without and with FlexKV take turns, one alive at a time, so that a drift of the machine
hits both. In every engine with FlexKV, hits in host memory and in vLLM's own cache take turns.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable

from integration.bench.rows import Goal, Row, ratio_row
from integration.bench.setup import LENGTHS, Bench
from integration.harness import connector
from integration.harness.answers import Completion
from integration.harness.engine import Engine

COLD_LENGTHS = LENGTHS[:2]
EXAMPLE_LENGTH = LENGTHS[0]
BATCH = 8
BATCH_PROMPT = 256
# Every request fills one block of 128 tokens and stores it on the way.
BATCH_NEW_TOKENS = 160

WITH, WITHOUT = "FlexKV", "none"
Samples = dict[tuple[str, str, int], list[float]]


def engine_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """All rows that need the bench model."""
    samples: Samples = defaultdict(list)
    for pair in range(1, bench.pairs + 1):
        say(f"pair {pair} of {bench.pairs}: an engine without FlexKV")
        with bench.engine(connector.NONE) as engine:
            _measure_misses(bench, engine, WITHOUT, samples)
            _measure_own_hits(bench, engine, samples)
        say(f"pair {pair} of {bench.pairs}: an engine with FlexKV")
        with bench.engine(bench.flexkv()) as engine:
            _measure_misses(bench, engine, WITH, samples)
            _measure_host_hits(bench, engine, samples)
    say("vLLM's ExampleConnector")
    with bench.engine(bench.example()) as engine:
        _measure_example(bench, engine, samples)
    return _rows(samples)


def _rows(samples: Samples) -> list[Row]:
    rows = []
    for length in LENGTHS:
        host = ("host hit", samples["host hit", WITH, length])
        own = ("own hit", samples["own hit", WITH, length])
        plain = ("own hit", samples["own hit", WITHOUT, length])
        what = f"TTFT at {length:,} tokens, host hit ÷ vLLM's own hit"
        rows.append(ratio_row(f"{what}, same engine", Goal("<=", 1.25), host, own))
        rows.append(ratio_row(f"{what}, engine without FlexKV", Goal("<=", 1.25), host, plain))
    rows.append(
        ratio_row(
            f"TTFT at {EXAMPLE_LENGTH:,} tokens, host hit ÷ vLLM's ExampleConnector",
            Goal("<", 1.0),
            ("host hit", samples["host hit", WITH, EXAMPLE_LENGTH]),
            ("ExampleConnector", samples["host hit", "example", EXAMPLE_LENGTH]),
        )
    )
    for length in COLD_LENGTHS:
        rows.append(
            ratio_row(
                f"TTFT at {length:,} tokens, all misses, with ÷ without FlexKV",
                Goal("<=", 1.03),
                ("with", samples["miss", WITH, length]),
                ("without", samples["miss", WITHOUT, length]),
            )
        )
    rows.append(
        ratio_row(
            f"time per output token, batch {BATCH}, with ÷ without FlexKV",
            Goal("<=", 1.02),
            ("with", samples["token", WITH, BATCH]),
            ("without", samples["token", WITHOUT, BATCH]),
        )
    )
    return rows


def _ttft(engine: Engine, prompt: list[int]) -> Completion:
    return engine.generate(prompt, max_tokens=1)


def _warm_up(bench: Bench, engine: Engine) -> None:
    """An engine's first steps are slow: it loads and compiles what it needs only then."""
    for length in (EXAMPLE_LENGTH, 300):
        _ttft(engine, bench.fresh_prompt(length))
    _time_per_token(bench, engine, new_tokens=16)


def _measure_misses(bench: Bench, engine: Engine, kind: str, samples: Samples) -> None:
    _warm_up(bench, engine)
    for _ in range(bench.samples):
        for length in COLD_LENGTHS:
            answer = _ttft(engine, bench.fresh_prompt(length))
            _expect(answer, cached=0)
            samples["miss", kind, length].append(answer.ttft)
        samples["token", kind, BATCH].append(_time_per_token(bench, engine, BATCH_NEW_TOKENS))


def _time_per_token(bench: Bench, engine: Engine, new_tokens: int) -> float:
    """Median over the requests of a batch, in seconds."""
    prompts = [bench.fresh_prompt(BATCH_PROMPT) for _ in range(BATCH)]
    answers = engine.generate_many(prompts, max_tokens=new_tokens)
    return statistics.median(answer.tpot for answer in answers)


def _measure_own_hits(bench: Bench, engine: Engine, samples: Samples) -> None:
    for length in LENGTHS:
        prompt = bench.fresh_prompt(length)
        _ttft(engine, prompt)
        _ttft(engine, prompt)
        for _ in range(bench.samples):
            answer = _ttft(engine, prompt)
            _expect_hit(answer, length)
            samples["own hit", WITHOUT, length].append(answer.ttft)


def _measure_host_hits(bench: Bench, engine: Engine, samples: Samples) -> None:
    for length in LENGTHS:
        prompt = bench.fresh_prompt(length)
        _ttft(engine, prompt)
        for sample in range(bench.samples + 1):
            before = engine.counter("vllm:external_prefix_cache_hits")
            engine.reset_prefix_cache()
            host = _ttft(engine, prompt)
            _expect_hit(host, length)
            if not engine.counter("vllm:external_prefix_cache_hits") > before:
                raise RuntimeError(f"{length} tokens were not taken from host memory")
            own = _ttft(engine, prompt)
            _expect_hit(own, length)
            if sample > 0:  # the first round warms up
                samples["host hit", WITH, length].append(host.ttft)
                samples["own hit", WITH, length].append(own.ttft)


def _measure_example(bench: Bench, engine: Engine, samples: Samples) -> None:
    _warm_up(bench, engine)
    prompt = bench.fresh_prompt(EXAMPLE_LENGTH)
    _ttft(engine, prompt)
    for sample in range(bench.samples * bench.pairs + 1):
        engine.reset_prefix_cache()
        answer = _ttft(engine, prompt)
        _expect_hit(answer, EXAMPLE_LENGTH)
        if sample > 0:
            samples["host hit", "example", EXAMPLE_LENGTH].append(answer.ttft)


def _expect(answer: Completion, cached: int) -> None:
    if answer.cached_tokens != cached:
        raise RuntimeError(f"{answer.cached_tokens} tokens were cached instead of {cached}")


def _expect_hit(answer: Completion, length: int) -> None:
    """A hit leaves at most some blocks at the end to compute."""
    if (answer.cached_tokens or 0) < 0.9 * length:
        raise RuntimeError(f"only {answer.cached_tokens} of {length} tokens were cached")
