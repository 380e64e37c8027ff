# SPDX-License-Identifier: Apache-2.0
"""Time to first token of prompts that only a slow disk has, against computing them.

The disk is the real one, with reads held back to a given speed. Between two requests for a prompt
others are computed that fill the arena, so that it comes from disk each time.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable

from integration.bench.rows import Goal, Row, milliseconds
from integration.bench.setup import Bench
from integration.harness import connector
from integration.harness.answers import Completion
from integration.harness.engine import Engine

LENGTHS = (2040, 8190)
MEGABYTES_PER_SECOND = (50, 4)
"""The bench model computes 2,048 tokens, 8 MiB of KV, in under a second: at 50 MB/s loading wins,
at 4 MB/s computing does."""
PROMPTS = 2
TOKEN_BYTES = 4096
ARENA_TOKENS = 16384
ARENA_GB = ARENA_TOKENS * TOKEN_BYTES / (1 << 30)


def slow_disk_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """Rows for each speed and length."""
    rows = []
    for speed in MEGABYTES_PER_SECOND:
        hits: dict[int, list[Completion]] = defaultdict(list)
        misses: dict[int, list[float]] = defaultdict(list)
        for start in range(1, bench.pairs + 1):
            say(f"start {start} of {bench.pairs}: a disk of {speed} MB/s")
            chosen = connector.slow_disk(
                speed,
                cpu_cache_gb=ARENA_GB,
                ssd_cache_gb=2.0,
                ssd_cache_dir=str(bench.folder / f"slow-{speed}-{start}"),
                runtime_dir=str(bench.folder / "run"),
            )
            with bench.engine(chosen) as engine:
                for length in LENGTHS:
                    _measure(bench, engine, length, hits[length], misses[length])
        rows += [_row(speed, length, hits[length], misses[length]) for length in LENGTHS]
    return rows


def _measure(
    bench: Bench, engine: Engine, length: int, hits: list[Completion], misses: list[float]
) -> None:
    prompts = [bench.fresh_prompt(length) for _ in range(PROMPTS)]
    for prompt in prompts:
        engine.generate(prompt, max_tokens=1)
    for _ in range(bench.samples):
        for prompt in prompts:
            for _ in range(ARENA_TOKENS // length):
                misses.append(engine.generate(bench.fresh_prompt(length), max_tokens=1).ttft)
            engine.reset_prefix_cache()
            hits.append(engine.generate(prompt, max_tokens=1))


def _row(speed: int, length: int, found: list[Completion], misses: list[float]) -> Row:
    hits = [answer.ttft for answer in found]
    hit, miss = statistics.median(hits), statistics.median(misses)
    loaded = sum(bool(answer.cached_tokens) for answer in found)
    return Row(
        what=f"TTFT at {length:,} tokens, on a disk of {speed} MB/s ÷ computed",
        value=hit / miss,
        unit="ratio",
        goal=Goal("<=", 1.05),
        detail=(
            f"on disk {milliseconds(hit)}, longest {milliseconds(max(hits))}; "
            f"computed {milliseconds(miss)}, medians of {len(hits)} and {len(misses)}; "
            f"{loaded} of {len(hits)} were loaded, or a part of them"
        ),
        samples={"on disk": hits, "computed": misses},
    )
