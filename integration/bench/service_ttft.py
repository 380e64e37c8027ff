# SPDX-License-Identifier: Apache-2.0
"""Time to first token of hits by the service, against a cache of the engine's own, on a real
vLLM.

Memory holds one prompt and little more, so a prompt that was not asked for last comes from disk.
Right after that it comes from memory. If the disk is slow just then, the engine may choose to
compute: such a time does not count.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from integration.bench.rows import Goal, Row
from integration.bench.service_process import service_process
from integration.bench.setup import Bench
from integration.harness import connector
from integration.harness.engine import Engine

LENGTH = 8190
PROMPTS = 3
_TOKEN_BYTES = 4096
ARENA_GB = 1.1 * LENGTH * _TOKEN_BYTES / (1 << 30)
DISK_GB = 1.0
_GRANTED = 4 / 3
"""The service's memory: a quarter of it is granted for stores, so that as much is left for hits."""

Samples = dict[str, list[float]]


def ttft_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """Both engines run, and take turns prompt by prompt: what else the machine does meets both."""
    own: Samples = defaultdict(list)
    served: Samples = defaultdict(list)
    for pair in range(1, bench.pairs + 1):
        say(f"pair {pair} of {bench.pairs}: an engine with a cache of its own beside a served one")
        folder = bench.folder / f"service {pair}"
        folder.mkdir()
        alone = connector.plugin(
            cpu_cache_gb=ARENA_GB,
            ssd_cache_gb=DISK_GB,
            ssd_cache_dir=str(folder / "own"),
            runtime_dir=str(bench.folder / "run"),
            recompute=True,
        )
        memory = _GRANTED * ARENA_GB
        with bench.engine(alone) as one, service_process(folder, memory, DISK_GB) as service:
            shared = connector.plugin(
                service=service.root, runtime_dir=str(bench.folder / "run"), recompute=True
            )
            with bench.engine(shared) as other:
                _measure(bench, [(one, own), (other, served)])
    return [_row(source, own, served) for source in ("host hit", "disk hit")]


def _measure(bench: Bench, sides: list[tuple[Engine, Samples]]) -> None:
    prompts = [bench.fresh_prompt(LENGTH) for _ in range(PROMPTS)]
    for prompt in prompts:
        for engine, _ in sides:
            engine.generate(prompt, max_tokens=1)
    for sample in range(bench.samples + 1):
        for prompt in prompts:
            sides.reverse()
            for engine, samples in sides:
                for source in ("disk hit", "host hit"):
                    ttft = _ttft(engine, prompt)
                    if sample > 0 and ttft is not None:  # the first round warms up
                        samples[source].append(ttft)


def _ttft(engine: Engine, prompt: Sequence[int]) -> float | None:
    """Seconds to the first token of a hit; None if the engine has computed the prompt."""
    engine.reset_prefix_cache()
    before = engine.counter("vllm:external_prefix_cache_hits")
    answer = engine.generate(prompt, max_tokens=1)
    hits = engine.counter("vllm:external_prefix_cache_hits") - before
    return answer.ttft if hits >= 0.9 * LENGTH else None


def _row(source: str, own: Samples, served: Samples) -> Row:
    mine, theirs = own[source], served[source]
    if not mine or not theirs:
        raise RuntimeError(f"no {source}: {len(theirs)} served, {len(mine)} embedded")
    medians = statistics.median(theirs), statistics.median(mine)
    return Row(
        f"service: TTFT at {LENGTH:,} tokens, {source}, served ÷ embedded",
        medians[0] / medians[1],
        "ratio",
        Goal("<=", 1.05),
        f"served {medians[0] * 1e3:.4g} ms, embedded {medians[1] * 1e3:.4g} ms, medians of "
        f"{len(theirs)} and {len(mine)}",
        {"own": mine, "served": theirs},
    )
