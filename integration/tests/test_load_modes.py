# SPDX-License-Identifier: Apache-2.0
"""Tokens are equal however blocks come back: layer by layer, or as `auto` chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from integration.harness import connector
from integration.harness.engine import Engine, EngineConfig
from integration.harness.host import EngineHost
from integration.tests import corpus
from integration.tests.corpus import CONCURRENT, LONG, PARTIAL, PREFIX, WARM
from integration.tests.reference import Reference
from integration.tests.steps import ask, ask_each, ask_together, external_hits


@pytest.fixture(params=["layerwise", "auto"])
def engine(
    request: pytest.FixtureRequest,
    host: EngineHost,
    reference: Reference,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
) -> Engine:
    """An engine of the load mode, with nothing cached anywhere."""
    settings = flexkv(load_mode=request.param)
    found = host.get(engine_config(connector.plugin(**settings), async_scheduling=False))
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
