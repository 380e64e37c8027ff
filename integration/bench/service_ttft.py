# SPDX-License-Identifier: Apache-2.0
"""Time to first token of hits by the service, against a cache of the engine's own, on a real
vLLM."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable

from integration.bench import disk_hits
from integration.bench.rows import Goal, Row
from integration.bench.service_process import service_process
from integration.bench.setup import Bench
from integration.harness import connector

_GRANTED = 4 / 3
"""The service's memory: a quarter of it is granted for stores, so that as much is left for hits."""

Samples = dict[tuple[str, int], list[float]]


def ttft_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """Engines with both take turns."""
    own: Samples = defaultdict(list)
    served: Samples = defaultdict(list)
    for pair in range(1, bench.pairs + 1):
        say(f"pair {pair} of {bench.pairs}: an engine with a cache of its own")
        folder = bench.folder / f"service {pair}"
        folder.mkdir()
        chosen = connector.plugin(
            cpu_cache_gb=disk_hits.ARENA_GB,
            ssd_cache_gb=disk_hits.DISK_GB,
            ssd_cache_dir=str(folder / "own"),
            runtime_dir=str(bench.folder / "run"),
            recompute=True,
        )
        with bench.engine(chosen) as engine:
            disk_hits.measure_hits(bench, engine, own)
        say(f"pair {pair} of {bench.pairs}: an engine of a service")
        memory = _GRANTED * disk_hits.ARENA_GB
        with service_process(folder, memory, disk_hits.DISK_GB) as service:
            chosen = connector.plugin(
                service=service.root, runtime_dir=str(bench.folder / "run"), recompute=True
            )
            with bench.engine(chosen) as engine:
                disk_hits.measure_hits(bench, engine, served)
    return [_row(*key, own, served) for key in sorted(own)]


def _row(source: str, length: int, own: Samples, served: Samples) -> Row:
    mine, theirs = own[source, length], served[source, length]
    medians = statistics.median(theirs), statistics.median(mine)
    return Row(
        f"service: TTFT at {length:,} tokens, {source}, served ÷ embedded",
        medians[0] / medians[1],
        "ratio",
        Goal("<=", 1.05),
        f"served {medians[0] * 1e3:.4g} ms, embedded {medians[1] * 1e3:.4g} ms, medians of "
        f"{len(theirs)} and {len(mine)}",
        {"own": mine, "served": theirs},
    )
