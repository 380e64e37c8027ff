# SPDX-License-Identifier: Apache-2.0
"""Models that keep KV in other ways than Llama: tokens are those of the engine's own hits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flexkv.host.board import board_bytes
from integration.harness import connector, processes
from integration.harness.answers import Completion
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.families import VOCAB, write_family
from integration.harness.host import EngineHost
from integration.harness.plain_engine import PlainEngine
from integration.harness.prompts import random_tokens
from integration.tests import corpus
from integration.tests.corpus import Tokens
from integration.tests.reference import check_equal
from integration.tests.steps import ask, ask_each, ask_together, refusal

# Prompts of one step and of several.
PROMPTS = tuple(tuple(random_tokens(f"family {n}", n, VOCAB)) for n in (200, 704, 1500))
STEM = PROMPTS[1]
PARTED = tuple(STEM + tuple(random_tokens(f"family part {n}", 60 + n, VOCAB)) for n in range(3))


@dataclass(frozen=True, slots=True)
class Family:
    """A family, how many tokens of a prompt of so many FlexKV restores, and what its engine needs.

    ``repeats`` is whether answers do not depend on what else is computed in the same step.
    """

    name: str
    hit: Callable[[int], int]
    engine: dict[str, Any] = field(default_factory=dict)
    repeats: bool = True


def _without_the_last(block: int) -> Callable[[int], int]:
    return lambda tokens: (tokens - 1) // block * block


FAMILIES = (
    Family("gemma3", _without_the_last(corpus.ENGINE_BLOCK)),
    Family("mistral", _without_the_last(corpus.ENGINE_BLOCK)),
    # vLLM's CPU kernels for linear attention take bfloat16 only. A block has 640 tokens, so that a
    # page of attention holds as much as a state in float32. By default states are in float32 only
    # where the processor has AVX-512 BF16.
    Family(
        "qwen3_next",
        _without_the_last(640),
        {
            "dtype": "bfloat16",
            "block_size": None,
            "max_num_batched_tokens": 1024,
            "extra_args": {"mamba_cache_mode": "align", "mamba_ssm_cache_dtype": "float32"},
        },
        repeats=False,
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """An engine with FlexKV, and what one without answers: cold, and by its own prefix cache."""

    family: Family
    engine: Engine
    cold: dict[Tokens, Completion]
    own_hit: dict[Tokens, Completion]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def case(
    request: pytest.FixtureRequest,
    host: EngineHost,
    work_dir: Path,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
) -> Case:
    family: Family = request.param
    changes = {"model": write_family(family.name, work_dir), **family.engine}
    plain = PlainEngine(host.start, engine_config(connector.NONE, **changes))
    cold, own_hit = (
        {
            prompt: plain.generate(prompt, max_tokens=corpus.NEW_TOKENS, logprobs=True)
            for prompt in (*PROMPTS, *PARTED)
        }
        for _ in range(2)
    )
    engine = host.start(engine_config(connector.plugin(**flexkv()), **changes))
    return Case(family, engine, cold, own_hit)


@pytest.fixture
def fresh(case: Case) -> Case:
    """The same, with nothing cached anywhere."""
    case.engine.reset_prefix_cache(reset_connector=True)
    return case


def test_warm(fresh: Case) -> None:
    for prompt, answer in zip(PROMPTS, ask_each(fresh.engine, PROMPTS), strict=True):
        check_equal(answer, fresh.cold[prompt], f"cold, {len(prompt)} tokens")
    fresh.engine.forget()
    for prompt, answer in zip(PROMPTS, ask_each(fresh.engine, PROMPTS), strict=True):
        check_equal(answer, fresh.own_hit[prompt], f"warm, {len(prompt)} tokens")
        assert answer.cached_tokens == fresh.family.hit(len(prompt))


def test_together(fresh: Case) -> None:
    if not fresh.family.repeats:
        pytest.skip("in bfloat16 answers depend on the batch")
    ask_each(fresh.engine, PROMPTS)
    fresh.engine.forget()
    for prompt, answer in zip(PROMPTS, ask_together(fresh.engine, PROMPTS), strict=True):
        check_equal(answer, fresh.own_hit[prompt], f"together, {len(prompt)} tokens")
        assert answer.cached_tokens == fresh.family.hit(len(prompt))


def test_prompts_that_part(fresh: Case) -> None:
    """A sliding window beside full attention is stored where they part once the second prompt has
    shown where that is."""
    hits = []
    for prompt in PARTED:
        answer = ask(fresh.engine, prompt)
        hits.append(answer.cached_tokens)
        assert answer.tokens in (fresh.cold[prompt].tokens, fresh.own_hit[prompt].tokens)
        fresh.engine.forget()
    assert hits[-1] == fresh.family.hit(len(STEM) + 1)


def test_wrong_bytes_would_be_noticed(fresh: Case) -> None:
    prompt = PROMPTS[2]
    ask(fresh.engine, prompt)
    fresh.engine.forget()
    arena = next(
        arena
        for pid in fresh.engine.pids()
        for arena in processes.memory_files(pid, "flexkv-arena")
    )
    with arena.open("r+b") as file:
        slots = file.seek(board_bytes(ranks=1))
        # Numbers of about 0.7, all of them.
        file.write(b"\x3f" * (arena.stat().st_size - slots))
    answer = ask(fresh.engine, prompt)
    assert answer.cached_tokens == fresh.family.hit(len(prompt))
    # Of a hybrid model perhaps only in the log probabilities.
    with pytest.raises(AssertionError, match="wrong bytes"):
        check_equal(answer, fresh.own_hit[prompt], "wrong bytes")


@pytest.mark.skipif(
    "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"),
    reason="this processor has the instructions for vLLM's other kernels",
)
def test_what_vllm_cannot_continue_is_refused(
    host: EngineHost,
    work_dir: Path,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
) -> None:
    """Latent attention (DeepSeek V2) on CPUs: behind any prefix that it did not compute itself in
    the same step vLLM gives other tokens, and turns its own prefix cache off."""
    model = write_family("deepseek_v2", work_dir)
    config = engine_config(connector.plugin(**flexkv()), model=model)
    said = refusal(lambda: host.start(config))
    assert "behind a cached prefix" in said
