# SPDX-License-Identifier: Apache-2.0
"""Tokens are equal when the KV cache is so small that requests are preempted again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests.corpus import PREEMPTED, PREEMPTED_NEW_TOKENS
from integration.tests.reference import Reference
from integration.tests.steps import ask_together, external_hits, flexkv_counters

# The 16 requests grow to 8 blocks each; one more block is vLLM's own.
BLOCKS = 45


@pytest.fixture
def small_engine(
    host: EngineHost,
    reference: Reference,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
) -> Engine:
    """With loads layer by layer; `test_entry_paths` has those between steps. By the path of our
    module, as one of the ways into vLLM."""
    config = engine_config(
        connector.module_path(**flexkv(load_mode="layerwise")),
        async_scheduling=False,
        num_blocks=BLOCKS,
        max_model_len=1024,
    )
    return host.get(config)


def test_preempted_requests(host: EngineHost, small_engine: Engine, reference: Reference) -> None:
    """Cold, then warm: vLLM takes blocks away under running stores and gives them to others."""
    hit_at_first = 0
    for what in ("cold", "warm", "warm again"):
        preemptions = small_engine.counter("vllm:num_preemptions")
        hits = external_hits(small_engine)
        # They begin together, so that they outgrow the blocks long before one ends.
        answers = ask_together(small_engine, PREEMPTED, PREEMPTED_NEW_TOKENS, all_queued=True)
        reference.check_all(PREEMPTED, answers, PREEMPTED_NEW_TOKENS, what)
        assert small_engine.counter("vllm:num_preemptions") > preemptions
        assert (external_hits(small_engine) > hits) == (what != "cold")
        hit_at_first += sum(answer.cached_tokens != 0 for answer in answers)
        small_engine.forget()

    # vLLM counts no hits of requests that resume after a preemption; FlexKV counts their loads.
    host.close()
    assert flexkv_counters(small_engine)["loads"] > hit_at_first
