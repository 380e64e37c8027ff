# SPDX-License-Identifier: Apache-2.0
"""Resident memory of all processes of an engine while it serves 10,000 requests."""

from __future__ import annotations

import random
from collections.abc import Callable

from integration.bench.rows import Goal, Row
from integration.bench.setup import Bench
from integration.harness import connector
from integration.harness.checkpoint import TINY
from integration.harness.connector import Connector
from integration.harness.engine import Engine
from integration.harness.prompts import random_tokens

FIRST, LAST = 1_000, 10_000
BATCH = 100
PROMPT_TOKENS = (40, 400)
NEW_TOKENS = 4
# The prompts are drawn from this many. Together they are several times the arena and the engine's
# own cache, so that blocks are loaded, stored and evicted all the time, from before the first
# measurement on.
DISTINCT_PROMPTS = 1_000
ARENA_GB = 0.0625
MIB = 1 << 20


def memory_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """With FlexKV against the goal, and without it for comparison."""
    return [
        _measure(bench, bench.flexkv(ARENA_GB), "", Goal("<=", 1.02), say),
        _measure(bench, connector.NONE, " without FlexKV", None, say),
    ]


def _measure(
    bench: Bench, chosen: Connector, name: str, goal: Goal | None, say: Callable[[str], None]
) -> Row:
    say(f"{LAST:,} requests{name}")
    rng = random.Random(0)
    resident: dict[int, int] = {}
    with bench.small_engine(chosen) as engine:
        for served in range(BATCH, LAST + 1, BATCH):
            engine.generate_many([_prompt(rng) for _ in range(BATCH)], max_tokens=NEW_TOKENS)
            if served % FIRST == 0:
                resident[served] = engine.memory().rss
        hits = _share_of_hits(engine)
    first, last = resident[FIRST], resident[LAST]
    return Row(
        what=f"resident memory after {LAST:,} ÷ after {FIRST:,} requests{name}",
        value=last / first,
        unit="ratio",
        goal=goal,
        detail=f"{last / MIB:,.0f} MiB ÷ {first / MIB:,.0f} MiB, {hits:.0%} of tokens from FlexKV",
        samples={f"every {FIRST} requests": [size / MIB for size in resident.values()]},
        unit_of_samples="MiB",
    )


def _prompt(rng: random.Random) -> list[int]:
    number = rng.randrange(DISTINCT_PROMPTS)
    length = random.Random(number).randint(*PROMPT_TOKENS)
    return random_tokens(f"memory {number}", length, TINY.vocab)


def _share_of_hits(engine: Engine) -> float:
    prompt_tokens = engine.counter("vllm:prompt_tokens")
    return engine.counter("vllm:external_prefix_cache_hits") / prompt_tokens
