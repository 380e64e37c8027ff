# SPDX-License-Identifier: Apache-2.0
"""Batches of long prompts that a real vLLM answers, new and seen before, with each connector.

The batch is the one that Tencent's FlexKV is advertised with: prompts of 21,000 tokens, answers of
1,000, 8 at once. The weights are vLLM's dummy ones: `tokens` compares answers.

An engine takes minutes. Each batch is kept in the journal as soon as it was measured, so that a
later command goes on with the next batch, also within an engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from integration.gpu.results import Log
from integration.harness.answers import EngineError
from integration.harness.checkpoint import ModelSpec, write_config
from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.engine import Engine
from integration.harness.prompts import random_tokens

NONE, NATIVE, FLEXKV, LMCACHE = "no connector", "OffloadingConnector", "FlexKV", "LMCache"
OURS = (NONE, FLEXKV)
"""Without these nothing can be compared; another that fails is left out."""

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


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch took.

    Attributes:
        seconds: from the first request to the last answer.
        ttfts: seconds to the first token, of each request.
        tpots: seconds per token after the first, of each request.
    """

    seconds: float
    ttfts: list[float]
    tpots: list[float]

    @property
    def ttft(self) -> float:
        """Median over the requests."""
        return statistics.median(self.ttfts)

    @property
    def tpot(self) -> float:
        """Median over the requests."""
        return statistics.median(self.tpots)


Batches = Mapping[tuple[str, str], list[Batch]]
"""By contender, and whether the prompts were new or seen before."""


def measure(
    load: Workload, contenders: Mapping[str, Connector], folder: Path, log: Log
) -> Iterator[tuple[str, Batches]]:
    """Let the contenders take turns, one engine alive at a time; each is a unit of the log. Gives
    the name and all batches so far after each, with those that earlier commands have measured.

    Raises:
        RuntimeError: a prompt that was seen before was computed, or a new one was not.
    """
    batches: dict[tuple[str, str], list[Batch]] = {}
    for name in contenders:
        known = _kept(load, name, log)
        if len(known) == load.repeats:
            batches |= _by_kind(name, known)
    for name in log.units(contenders, str):
        try:
            found = _measured(load, name, contenders[name], folder, log)
        except (EngineError, RuntimeError) as error:
            if name in OURS:
                raise
            log.note(f"no {name}: {type(error).__name__}: {error}")
            continue
        batches |= _by_kind(name, found)
        yield name, batches


def _measured(
    load: Workload, name: str, chosen: Connector, folder: Path, log: Log
) -> list[dict[str, Batch]]:
    """All repeats of one contender. An engine is started for those that are not kept yet."""
    found = _kept(load, name, log)
    if len(found) == load.repeats:
        return found
    log.say(f"{load.batch} requests of {load.prompt_tokens:,} tokens: the engine starts")
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
        for repeat in range(len(found), load.repeats):
            unit = _unit(name, repeat)
            prompts = _prompts(load, unit)
            taken = {NEW: _ask(engine, load, prompts, cached=0.0)}
            engine.reset_prefix_cache()
            if name != NONE:
                taken[SEEN] = _ask(engine, load, prompts, cached=0.9)
                engine.reset_prefix_cache()
            found.append(taken)
            log.keep(unit, {kind: asdict(batch) for kind, batch in taken.items()})
            log.say(f"{unit} of {load.repeats}")
    return found


def _unit(name: str, repeat: int) -> str:
    return f"{name}, batch {repeat + 1}"


def _kept(load: Workload, name: str, log: Log) -> list[dict[str, Batch]]:
    """The first repeats of a contender, as far as earlier commands have measured them."""
    found: list[dict[str, Batch]] = []
    for repeat in range(load.repeats):
        kept = log.kept.get(_unit(name, repeat))
        if kept is None:
            break
        found.append({kind: Batch(**fields) for kind, fields in kept.items()})
    return found


def _by_kind(name: str, found: list[dict[str, Batch]]) -> dict[tuple[str, str], list[Batch]]:
    return {(name, kind): [taken[kind] for taken in found] for kind in found[0]}


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
    return Batch(seconds, [answer.ttft for answer in answers], [answer.tpot for answer in answers])
