# SPDX-License-Identifier: Apache-2.0
"""Tokens are equal, and a conversation stays, while `hazard` chooses which blocks leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests.corpus import CONCURRENT, EVICTED, NEW_TOKENS, Tokens
from integration.tests.disks import gigabytes, settle
from integration.tests.reference import Reference
from integration.tests.steps import whole_blocks

HOST_SLOTS, DISK_SLOTS = 40, 50
"""Two fifths and half of the blocks of EVICTED."""
TURNS = CONCURRENT[:4]
"""Four prompts of which each begins with the one before: a conversation of 21 blocks."""


@pytest.fixture
def hazard_engine(
    host: EngineHost,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
    tmp_path: Path,
) -> Engine:
    settings = flexkv(
        eviction_policy="hazard",
        cpu_cache_gb=gigabytes(HOST_SLOTS),
        ssd_cache_gb=gigabytes(DISK_SLOTS),
        ssd_cache_dir=str(tmp_path),
        # Other admissions do not offer a disk what `hazard` refuses.
        ssd_admission="on_evict",
        ssd_timeout_seconds=600,
        always_load=True,
    )
    return host.get(engine_config(connector.plugin(**settings)))


def test_a_conversation_stays_while_others_pass_through_both_tiers(
    hazard_engine: Engine, reference: Reference
) -> None:
    engine = hazard_engine

    def restored(prompt: Tokens, what: str, **parameters: object) -> int:
        answer = engine.generate(
            prompt, max_tokens=NEW_TOKENS, logprobs=True, transfer_params=parameters
        )
        reference.check(prompt, answer, what=what)
        settle(engine)
        engine.forget()
        return answer.cached_tokens or 0

    def count(name: str, tier: str) -> float:
        return engine.counter(f"vllm:flexkv_{name}", tier=tier)

    chat = {"flexkv.session": "chat", "flexkv.returns": True}
    found = [restored(turn, "turn", **chat) for turn in TURNS]
    assert found == [0, *(whole_blocks(len(turn)) for turn in TURNS[:-1])]
    for prompt in EVICTED:
        assert restored(prompt, "passes") == 0
    # The latest first: some come back from disk.
    again = sum(restored(prompt, "passes again") for prompt in EVICTED[::-1])
    assert 0 < count("hit_tokens", "disk") <= again
    for tier, slots in (("host", HOST_SLOTS), ("disk", DISK_SLOTS)):
        assert count("evicted_blocks", tier) > slots, tier

    # 24 prompts of 8 blocks have passed. LRU would have kept the latest of them.
    hits = count("hit_tokens", "host")
    assert restored(TURNS[-1], "the conversation") == whole_blocks(len(TURNS[-1]))
    assert count("hit_tokens", "host") - hits == whole_blocks(len(TURNS[-1]))
