# SPDX-License-Identifier: Apache-2.0
"""Tokens are equal however blocks come back: layer by layer, or as `auto` chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests import corpus
from integration.tests.corpus import ABORTED, CONCURRENT, LONG, NEW_TOKENS, PARTIAL, PREFIX, WARM
from integration.tests.reference import Reference
from integration.tests.steps import ask, ask_each, ask_together, external_hits

# Loads of these prompts take some milliseconds.
DELAYS = [0.001 * step for step in range(12)]


@pytest.fixture(
    scope="module",  # all tests of one engine together
    params=[("auto", 1), ("layerwise", 2)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def mode(request: pytest.FixtureRequest) -> tuple[str, int]:
    """A load mode, and how many ranks."""
    load_mode, ranks = request.param
    return load_mode, ranks


@pytest.fixture
def engine(
    mode: tuple[str, int],
    host: EngineHost,
    reference: Reference,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
) -> Engine:
    """With nothing cached anywhere."""
    load_mode, ranks = mode
    chosen = connector.plugin(**flexkv(load_mode=load_mode))
    config = engine_config(chosen, async_scheduling=False, tensor_parallel_size=ranks)
    found = host.get(config)
    found.reset_prefix_cache(reset_connector=True)
    return found


def restored(tokens: int) -> set[int]:
    """Tokens that may be restored of a prompt of whose blocks all are cached: layer by layer, vLLM
    computes one token at least."""
    whole = tokens // corpus.FLEXKV_BLOCK * corpus.FLEXKV_BLOCK
    return {whole, min(whole, tokens - 1)}


def test_warm(engine: Engine, reference: Reference) -> None:
    prompts = (*WARM, *LONG)
    reference.check_all(prompts, ask_each(engine, prompts), what="cold")
    engine.forget()
    warm = ask_each(engine, prompts)
    reference.check_all(prompts, warm, what="warm")
    for prompt, answer in zip(prompts, warm, strict=True):
        assert answer.cached_tokens in restored(len(prompt))


def test_prefixes(engine: Engine, reference: Reference) -> None:
    ask(engine, PREFIX)
    for case in PARTIAL:
        engine.forget()
        reference.check(case.prompt, ask(engine, case.prompt), what=case.name)


def test_together(engine: Engine, reference: Reference) -> None:
    ask_each(engine, CONCURRENT)
    for _ in range(2):
        engine.forget()
        before = external_hits(engine)
        reference.check_all(CONCURRENT, ask_together(engine, CONCURRENT), what="together")
        assert external_hits(engine) > before


def test_aborts_during_loads(engine: Engine, reference: Reference) -> None:
    ask_each(engine, ABORTED)
    ask_each(engine, WARM)
    for delay in DELAYS:
        engine.forget()
        aborted = [
            engine.submit(prompt, max_tokens=NEW_TOKENS, abort_after=delay) for prompt in ABORTED
        ]
        survivors = ask_together(engine, WARM)
        reference.check_all(WARM, survivors, what=f"beside aborts after {delay} s")
        for generation in aborted:
            generation.result()
    engine.forget()
    reference.check_all(ABORTED, ask_each(engine, ABORTED), what="after the aborts")
