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
from integration.tests import test_equality_evicted
from integration.tests.corpus import CONCURRENT, EVICTED, FLEXKV_BLOCK, NEW_TOKENS, Tokens
from integration.tests.disks import PATIENT_SECONDS, gigabytes, settle
from integration.tests.reference import Reference
from integration.tests.steps import whole_blocks

HOST_SLOTS, DISK_SLOTS = 40, 50
TURNS = CONCURRENT[:4]
"""Four prompts of which each begins with the one before: a conversation of 21 blocks."""
PASSING = EVICTED[:6]
"""48 blocks, asked for once in each round, with a salt of its own."""
MOST_ROUNDS = 40
"""Four times what a model of the tier needed, with any time from 0.01 to 60 s between requests."""


@pytest.fixture
def tiny_arena(
    host: EngineHost,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
    work_dir: Path,
) -> Engine:
    settings = flexkv(
        eviction_policy="auto",
        cpu_cache_gb=gigabytes(HOST_SLOTS),
        ssd_cache_gb=gigabytes(DISK_SLOTS),
        ssd_cache_dir=str(work_dir / "hazard-disk"),
        ssd_admission="on_evict",
        ssd_timeout_seconds=PATIENT_SECONDS,
    )
    engine = host.get(engine_config(connector.plugin(**settings)))
    engine.reset_prefix_cache(reset_connector=True)
    return engine


def test_a_conversation_stays_while_others_pass_through_both_tiers(
    tiny_arena: Engine, reference: Reference
) -> None:
    """The policy learns how soon blocks come back, so that it may take a slow machine some rounds:
    there all that is known of the conversation is older."""
    engine = tiny_arena
    assert "host memory evicts by hazard (eviction_policy is auto)" in engine.log()

    def restored(
        prompt: Tokens, what: str, salt: str | None = None, params: dict[str, object] | None = None
    ) -> int:
        answer = engine.generate(
            prompt,
            max_tokens=NEW_TOKENS,
            logprobs=True,
            cache_salt=salt,
            transfer_params=params,
        )
        reference.check(prompt, answer, what=what)
        settle(engine)
        engine.forget()
        return answer.cached_tokens or 0

    def count(name: str, tier: str) -> float:
        return engine.counter(f"vllm:flexkv_{name}", tier=tier)

    chat: dict[str, object] = {"flexkv.session": "chat", "flexkv.returns": True}
    found = [restored(turn, "turn", params=chat) for turn in TURNS]
    assert found == [0, *(whole_blocks(len(turn)) for turn in TURNS[:-1])]

    # LRU would keep the latest of a round's prompts.
    assert sum(len(prompt) // FLEXKV_BLOCK for prompt in PASSING) > HOST_SLOTS
    whole, stays, rounds = whole_blocks(len(TURNS[-1])), False, 0
    tiers = {"host": HOST_SLOTS, "disk": DISK_SLOTS}
    while not stays or any(count("evicted_blocks", tier) <= tiers[tier] for tier in tiers):
        assert rounds < MOST_ROUNDS, (stays, [count("evicted_blocks", tier) for tier in tiers])
        for prompt in PASSING:
            assert restored(prompt, "passes", f"round {rounds}") == 0
        hits = count("hit_tokens", "host")
        cached = restored(TURNS[-1], "the conversation", params=chat)
        stays = cached == count("hit_tokens", "host") - hits == whole
        rounds += 1

    # The latest first: some come back from disk.
    hits, again = count("hit_tokens", "disk"), 0
    for number in reversed(range(rounds)):
        again += sum(restored(prompt, "again", f"round {number}") for prompt in PASSING[::-1])
        if count("hit_tokens", "disk") > hits:
            break
    assert 0 < count("hit_tokens", "disk") - hits <= again


test_eviction_under_concurrency = test_equality_evicted.test_eviction_under_concurrency
test_a_prompt_larger_than_the_arena = test_equality_evicted.test_a_prompt_larger_than_the_arena
