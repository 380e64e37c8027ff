# SPDX-License-Identifier: Apache-2.0
"""LoRA: the same prompt has other KV with each adapter, and shares nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration.harness import connector
from integration.harness.adapter import Adapter, write_adapter
from integration.harness.checkpoint import TINY
from integration.harness.config import EngineConfig
from integration.harness.connector import NONE
from integration.harness.host import EngineHost
from integration.harness.plain_engine import Generates, PlainEngine
from integration.tests.corpus import SALTED
from integration.tests.steps import whole_blocks

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
NEW_TOKENS = 12


def ask(engine: Generates, adapter: Adapter | None) -> tuple[list[int], int]:
    """The answer to the one prompt, and how much of that was cached."""
    answer = engine.generate(SALTED, max_tokens=NEW_TOKENS, adapter=adapter)
    return answer.tokens, answer.cached_tokens or 0


def test_two_adapters_and_none_share_nothing(
    host: EngineHost,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
    tmp_path: Path,
) -> None:
    adapters = [None, *(write_adapter(TINY, tmp_path, f"adapter-{n}", n) for n in (1, 2))]
    plain = PlainEngine(host.start, engine_config(NONE, extra_args=LORA, prefix_caching=False))
    expected = [ask(plain, adapter)[0] for adapter in adapters]
    assert len(set(map(tuple, expected))) == len(adapters), "they do not differ: this shows nothing"

    engine = host.start(engine_config(connector.plugin(**flexkv()), extra_args=LORA))
    hit = whole_blocks(len(SALTED))
    for cached in (0, hit):
        for adapter, tokens in zip(adapters, expected, strict=True):
            assert ask(engine, adapter) == (tokens, cached), adapter
            engine.forget()
