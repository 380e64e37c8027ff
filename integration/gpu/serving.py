# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with a batch of long prompts, new and seen before: with FlexKV, with vLLM's own
OffloadingConnector, and with neither.

The batch is the one that Tencent's FlexKV is advertised with: prompts of 21,000 tokens, answers of
1,000, 8 at once. The weights are vLLM's dummy ones: nothing is said about answers here.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration.bench.rows import Goal, Row, ratio_row
from integration.gpu.results import Log
from integration.harness import connector
from integration.harness.checkpoint import ModelSpec, write_config
from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.engine import Completion, Engine
from integration.harness.prompts import random_tokens

NONE, NATIVE, FLEXKV = "no connector", "OffloadingConnector", "FlexKV"
NEW, SEEN = "new", "seen"
BLOCK_SLACK = 1.2
"""KV cache and host memory for so many batches: answers, and blocks that are not full."""

LLAMA_8B = ModelSpec(
    name="llama-8b",
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=128256,
    dtype="bfloat16",
    init_range=0.0,
)
"""The dimensions of Llama 3.1 8B: 128 KiB of KV cache for a token."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked.

    Attributes:
        model: its dimensions.
        prompt_tokens: of each request.
        new_tokens: of each answer.
        batch: requests at once.
        repeats: batches of new prompts, each of which is then asked once more.
        engine_args: further ones of vLLM.
        forked: as in ``EngineConfig``.
    """

    model: ModelSpec
    prompt_tokens: int
    new_tokens: int
    batch: int
    repeats: int
    engine_args: dict[str, Any] = field(default_factory=dict)
    forked: bool = False

    @property
    def gigabytes(self) -> float:
        """GiB of KV cache that a batch fills, with some to spare."""
        tokens = self.batch * (self.prompt_tokens + self.new_tokens)
        return BLOCK_SLACK * tokens * self.model.kv_bytes_per_token / (1 << 30)


FULL = Workload(LLAMA_8B, 21000, 1000, 8, 3, {"enforce_eager": False})
QUICK = Workload(LLAMA_8B, 21000, 100, 4, 1)


@dataclass(slots=True)
class Batch:
    """What a batch took.

    Attributes:
        seconds: from the first request to the last answer.
        answers: one for each request.
    """

    seconds: float
    answers: list[Completion]

    @property
    def ttft(self) -> float:
        """Median over the requests."""
        return statistics.median(answer.ttft for answer in self.answers)

    @property
    def tpot(self) -> float:
        """Median over the requests."""
        return statistics.median(answer.tpot for answer in self.answers)


Batches = Mapping[tuple[str, str], list[Batch]]
"""By contender, and whether the prompts were new or seen before."""


def serving_rows(quick: bool, log: Log) -> Iterator[Row]:
    """All rows, or none and the reason where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        log.note("vLLM is not installed: not measured")
        return
    load = QUICK if quick else FULL
    contenders = {
        NONE: connector.NONE,
        NATIVE: connector.native_offloading(load.gigabytes),
        FLEXKV: connector.plugin(cpu_cache_gb=load.gigabytes),
    }
    with tempfile.TemporaryDirectory(prefix="flexkv-serving-") as folder:
        yield from rows(load, measure(load, contenders, Path(folder), log))


def measure(load: Workload, contenders: Mapping[str, Connector], folder: Path, log: Log) -> Batches:
    """Let the contenders take turns, one engine alive at a time.

    Raises:
        RuntimeError: a prompt that was seen before was computed, or a new one was not.
    """
    batches = defaultdict(list)
    for name, chosen in contenders.items():
        log.say(f"{load.batch} requests of {load.prompt_tokens:,} tokens: {name}")
        config = EngineConfig(
            model=write_config(load.model, folder),
            dtype=load.model.dtype,
            connector=chosen,
            max_model_len=load.prompt_tokens + load.new_tokens + 1,
            max_num_batched_tokens=8192,
            kv_cache_bytes=int(load.gigabytes * (1 << 30)),
            forked=load.forked,
            extra_args={"load_format": "dummy"} | load.engine_args,
        )
        with Engine(config, folder / f"{name}.log") as engine:
            _warm_up(engine, load)
            for repeat in range(load.repeats):
                prompts = _prompts(load, f"{name} {repeat}")
                batches[name, NEW].append(_ask(engine, load, prompts, cached=0.0))
                engine.reset_prefix_cache()
                if name != NONE:
                    batches[name, SEEN].append(_ask(engine, load, prompts, cached=0.9))
                    engine.reset_prefix_cache()
    return batches


def rows(load: Workload, batches: Batches) -> list[Row]:
    """FlexKV against both others."""
    ttft = {key: [batch.ttft for batch in found] for key, found in batches.items()}
    tpot = {key: [batch.tpot for batch in found] for key, found in batches.items()}
    what = f"batch of {load.batch}, {load.prompt_tokens:,} tokens in, {load.new_tokens:,} out"
    found = [
        ratio_row(
            f"TTFT of prompts seen before ÷ computing them, {what}",
            Goal("<=", 0.1),
            (FLEXKV, ttft[FLEXKV, SEEN]),
            (NONE, ttft[NONE, NEW]),
        ),
        ratio_row(
            f"TTFT of new prompts ÷ without a connector, {what}",
            None,
            (FLEXKV, ttft[FLEXKV, NEW]),
            (NONE, ttft[NONE, NEW]),
        ),
    ]
    for kind in (SEEN, NEW):
        side = f"prompts {kind}{' before' if kind == SEEN else ''} ÷ {NATIVE}, {what}"
        found += [
            ratio_row(
                f"TTFT of {side}",
                Goal("<=", 1.0),
                (FLEXKV, ttft[FLEXKV, kind]),
                (NATIVE, ttft[NATIVE, kind]),
            ),
            ratio_row(
                f"TPOT of {side}",
                Goal("<=", 1.0),
                (FLEXKV, tpot[FLEXKV, kind]),
                (NATIVE, tpot[NATIVE, kind]),
            ),
            _per_minute_row(f"requests per minute of {side}", load, batches, kind),
        ]
    return found


def _per_minute_row(what: str, load: Workload, batches: Batches, kind: str) -> Row:
    by_name = {
        name: [60 * load.batch / batch.seconds for batch in batches[name, kind]]
        for name in (FLEXKV, NATIVE)
    }
    ours, theirs = (statistics.median(by_name[name]) for name in (FLEXKV, NATIVE))
    return Row(
        what=what,
        value=ours / theirs,
        unit="ratio",
        goal=Goal(">=", 1.0),
        detail=f"{FLEXKV} {ours:.4g} ÷ {NATIVE} {theirs:.4g}",
        samples=by_name,
        unit_of_samples="requests per minute",
    )


def _prompts(load: Workload, seed: str) -> list[list[int]]:
    """That no engine has seen."""
    return [
        random_tokens(f"{seed} {number}", load.prompt_tokens, load.model.vocab)
        for number in range(load.batch)
    ]


def _warm_up(engine: Engine, load: Workload) -> None:
    """An engine's first steps are slow: it compiles and measures what it needs only then."""
    prompts = _prompts(load, "warm-up")
    for _ in range(2):
        engine.generate_many(prompts, max_tokens=load.new_tokens)
        engine.reset_prefix_cache()


def _ask(engine: Engine, load: Workload, prompts: list[list[int]], cached: float) -> Batch:
    """All at once; `cached` of each prompt must come from a cache at least, or nothing at all."""
    begun = time.perf_counter()
    answers = engine.generate_many(prompts, max_tokens=load.new_tokens)
    seconds = time.perf_counter() - begun
    for answer in answers:
        share = (answer.cached_tokens or 0) / load.prompt_tokens
        if share < cached or (share > 0) != (cached > 0):
            raise RuntimeError(
                f"{answer.cached_tokens} of {load.prompt_tokens} tokens were cached, where "
                f"{cached:.0%} were to be"
            )
    return Batch(seconds, answers)
