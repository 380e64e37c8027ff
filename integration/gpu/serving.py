# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with a batch of long prompts, new and seen before: with FlexKV, without a connector,
with vLLM's own OffloadingConnector and with LMCache.

The batch is the one that Tencent's FlexKV is advertised with: prompts of 21,000 tokens, answers of
1,000, 8 at once. The weights are vLLM's dummy ones: `tokens` compares answers.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration.bench.rows import Goal, Row, ratio_row
from integration.gpu import goals
from integration.gpu.results import Log
from integration.gpu.timing import median_row
from integration.harness import connector
from integration.harness.answers import Completion, EngineError
from integration.harness.checkpoint import ModelSpec, write_config
from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.engine import Engine
from integration.harness.prompts import random_tokens

NONE, NATIVE, FLEXKV, LMCACHE = "no connector", "OffloadingConnector", "FlexKV", "LMCache"
OURS = (NONE, FLEXKV)
"""Without these nothing can be said; another that fails is left out."""

NEW, SEEN = "new", "seen"
_PROMPTS = {NEW: "new", SEEN: "seen before"}
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
        FLEXKV: connector.plugin(cpu_cache_gb=load.gigabytes),
        NATIVE: connector.native_offloading(load.gigabytes),
    }
    if importlib.util.find_spec("lmcache") is None:
        log.note("LMCache is not installed: not measured")
    else:
        contenders[LMCACHE] = connector.lmcache(load.gigabytes)
    with tempfile.TemporaryDirectory(prefix="flexkv-serving-") as folder:
        yield from rows(load, measure(load, contenders, Path(folder), log))


def measure(
    load: Workload, contenders: Mapping[str, Connector], folder: Path, log: Log
) -> Iterator[tuple[str, Batches]]:
    """Let the contenders take turns, one engine alive at a time. Gives the name and all batches so
    far after each.

    Raises:
        RuntimeError: a prompt that was seen before was computed, or a new one was not.
    """
    batches: dict[tuple[str, str], list[Batch]] = {}
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
        try:
            batches |= _batches(load, name, config, folder / f"{name}.log")
        except (EngineError, RuntimeError) as error:
            if name in OURS:
                raise
            log.note(f"no {name}: {type(error).__name__}: {error}")
            continue
        yield name, batches


def _batches(load: Workload, name: str, config: EngineConfig, path: Path) -> Batches:
    """The batches of one engine."""
    new, seen = [], []
    with Engine(config, path) as engine:
        _warm_up(engine, load)
        for repeat in range(load.repeats):
            prompts = _prompts(load, f"{name} {repeat}")
            new.append(_ask(engine, load, prompts, cached=0.0))
            engine.reset_prefix_cache()
            if name != NONE:
                seen.append(_ask(engine, load, prompts, cached=0.9))
                engine.reset_prefix_cache()
    return {(name, NEW): new} | ({(name, SEEN): seen} if seen else {})


def rows(load: Workload, measured: Iterator[tuple[str, Batches]]) -> Iterator[Row]:
    """Figures of each contender as soon as it was measured, and FlexKV against each other one."""
    what = f"batch of {load.batch}, {load.prompt_tokens:,} tokens in, {load.new_tokens:,} out"
    for name, batches in measured:
        for kind in (NEW, SEEN):
            if (name, kind) in batches:
                yield from _figures(load, name, kind, batches[name, kind], what)
        if name == FLEXKV:
            yield from _against_none(load, batches, what)
        elif name != NONE:
            yield from _against_peer(load, name, batches, what)


def _figures(load: Workload, name: str, kind: str, found: list[Batch], what: str) -> Iterator[Row]:
    side = f"{name}, prompts {_PROMPTS[kind]}, {what}"
    yield median_row(f"TTFT of {side}", None, [1e3 * batch.ttft for batch in found], "ms", "")
    yield median_row(f"TPOT of {side}", None, [1e3 * batch.tpot for batch in found], "ms", "")
    rates = _per_minute(load, found)
    yield median_row(f"requests a minute of {side}", None, rates, "a minute", "")


def _against_none(load: Workload, batches: Batches, what: str) -> Iterator[Row]:
    computed = batches[NONE, NEW]
    for kind, ttft, rate in ((SEEN, goals.WARM_TTFT, goals.WARM_RATE), (NEW, None, None)):
        ours = batches[FLEXKV, kind]
        side = f"prompts {_PROMPTS[kind]} ÷ {NONE}, {what}"
        yield _ttft_row(f"TTFT of {side}", ttft, NONE, ours, computed)
        yield _rate_row(f"requests a minute of {side}", rate, load, NONE, ours, computed)


def _against_peer(load: Workload, peer: str, batches: Batches, what: str) -> Iterator[Row]:
    no_worse = Goal("<=", 1.0), Goal(">=", 1.0)
    for kind, (ttft, rate) in ((SEEN, (goals.PEER_TTFT, goals.PEER_RATE)), (NEW, no_worse)):
        ours, theirs = batches[FLEXKV, kind], batches[peer, kind]
        side = f"prompts {_PROMPTS[kind]} ÷ {peer}, {what}"
        yield _ttft_row(f"TTFT of {side}", ttft, peer, ours, theirs)
        yield ratio_row(
            f"TPOT of {side}",
            Goal("<=", 1.0),
            (FLEXKV, [batch.tpot for batch in ours]),
            (peer, [batch.tpot for batch in theirs]),
        )
        yield _rate_row(f"requests a minute of {side}", rate, load, peer, ours, theirs)


def _ttft_row(
    what: str, goal: Goal | None, name: str, ours: list[Batch], theirs: list[Batch]
) -> Row:
    first = (FLEXKV, [batch.ttft for batch in ours])
    return ratio_row(what, goal, first, (name, [batch.ttft for batch in theirs]))


def _rate_row(  # noqa: PLR0917
    what: str,
    goal: Goal | None,
    load: Workload,
    name: str,
    ours: list[Batch],
    theirs: list[Batch],
) -> Row:
    by_name = {FLEXKV: _per_minute(load, ours), name: _per_minute(load, theirs)}
    first, second = (statistics.median(rates) for rates in by_name.values())
    return Row(
        what=what,
        value=first / second,
        unit="ratio",
        goal=goal,
        detail=f"{FLEXKV} {first:.4g} ÷ {name} {second:.4g}",
        samples=by_name,
        unit_of_samples="requests a minute",
    )


def _per_minute(load: Workload, found: list[Batch]) -> list[float]:
    return [60 * load.batch / batch.seconds for batch in found]


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
