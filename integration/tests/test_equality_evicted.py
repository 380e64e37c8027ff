# SPDX-License-Identifier: Apache-2.0
"""Tokens are equal with an arena that holds a third of what is asked for, and after aborts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from integration.harness import connector
from integration.harness.checkpoint import TINY
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests.corpus import ABORTED, EVICTED, FLEXKV_BLOCK
from integration.tests.reference import Reference
from integration.tests.steps import ask, ask_each, ask_together, whole_blocks

SLOTS = 33
# Half a slot more, because FlexKV keeps whole slots.
ARENA_GB = (SLOTS + 0.5) * FLEXKV_BLOCK * TINY.kv_bytes_per_token / (1 << 30)


@pytest.fixture
def tiny_arena(
    host: EngineHost,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
) -> Engine:
    """Some of these tests count on the order of use, and on a slot for each new block;
    `test_equality_hazard` runs the others with `hazard`."""
    settings = flexkv(cpu_cache_gb=ARENA_GB, eviction_policy="lru")
    engine = host.get(engine_config(connector.plugin(**settings)))
    engine.reset_prefix_cache(reset_connector=True)
    return engine


def _restored(engine: Engine, reference: Reference, what: str) -> list[int]:
    """Ask for all prompts, the last one first; restored tokens of each, in that order."""
    prompts = EVICTED[::-1]
    answers = ask_each(engine, prompts)
    reference.check_all(prompts, answers, what=what)
    return [answer.cached_tokens or 0 for answer in answers]


def test_eviction(tiny_arena: Engine, reference: Reference) -> None:
    blocks = len(EVICTED[0]) // FLEXKV_BLOCK
    assert all(len(prompt) // FLEXKV_BLOCK == blocks for prompt in EVICTED)
    assert blocks * len(EVICTED) > 2 * SLOTS
    reference.check_all(EVICTED, ask_each(tiny_arena, EVICTED), what="cold")
    for what in ("warm", "warm again"):
        tiny_arena.forget()
        restored = _restored(tiny_arena, reference, what)
        # The last prompts are still there as a whole, the first ones cannot be.
        assert restored[0] == whole_blocks(len(EVICTED[-1])), what
        assert 0 in restored, what
        assert sum(restored) <= SLOTS * FLEXKV_BLOCK, what
        tiny_arena.forget()
        reference.check_all(EVICTED, ask_each(tiny_arena, EVICTED), what=what)


def test_aborts_leave_no_slot_behind(tiny_arena: Engine, reference: Reference) -> None:
    """Loads and stores cut short must give back their slots, or soon nothing can be stored."""
    prompt = EVICTED[0]
    for number in range(3 * SLOTS):
        ask(tiny_arena, prompt, max_tokens=1)
        tiny_arena.forget()
        tiny_arena.submit(prompt, abort_after=0.0005 * (number % 12)).result()
        other = EVICTED[1 + number % 3]
        tiny_arena.submit(other, abort_after=0.001 * (number % 12)).result()
    tiny_arena.forget()
    for prompt in EVICTED[-3:]:
        reference.check(prompt, ask(tiny_arena, prompt), what="after the aborts")
        tiny_arena.forget()
        answer = ask(tiny_arena, prompt)
        reference.check(prompt, answer, what="warm after the aborts")
        assert answer.cached_tokens == whole_blocks(len(prompt))
        tiny_arena.forget()


def test_eviction_under_concurrency(tiny_arena: Engine, reference: Reference) -> None:
    """Blocks are evicted while others are stored and loaded."""
    for what in ("cold", "warm", "warm again"):
        reference.check_all(EVICTED, ask_together(tiny_arena, EVICTED), what=what)
        tiny_arena.forget()


def test_a_prompt_larger_than_the_arena(tiny_arena: Engine, reference: Reference) -> None:
    prompt = ABORTED[0]
    assert len(prompt) > SLOTS * FLEXKV_BLOCK
    for what in ("cold", "warm"):
        reference.check(prompt, ask(tiny_arena, prompt), what=what)
        tiny_arena.forget()
