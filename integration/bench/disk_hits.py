# SPDX-License-Identifier: Apache-2.0
"""Time to first token of prefixes that only the disk has, on a real engine.

The arena holds one prompt of 21,000 tokens and little more, so whatever was not asked for last has
to come from disk. Right after that it comes from host memory. vLLM recomputes what a failed load
did not bring, so that loads begin while the disk still reads.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from integration.bench import disk_fio
from integration.bench.rows import Goal, Row
from integration.bench.setup import Bench
from integration.harness import connector
from integration.harness.engine import Engine

LENGTHS = (8190, 21000)
TOKEN_BYTES = 4096
BLOCK_BYTES = 128 * TOKEN_BYTES
ARENA_GB = 1.1 * 21000 * TOKEN_BYTES / (1 << 30)
DISK_GB = 1.0
FIO_BYTES = 512 << 20
EXTRA_SECONDS = 0.005
"""What a read may take besides its bytes, in the goal."""


def disk_hit_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """Time to first token of disk hits against host hits and against fio."""
    if not disk_fio.installed():
        raise RuntimeError(disk_fio.HOW_TO_INSTALL)
    root = bench.folder / "ssd"
    root.mkdir()
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    rates: list[float] = []
    for start in range(1, bench.pairs + 1):
        say(f"start {start} of {bench.pairs}: an engine with a small arena and a disk")
        chosen = connector.plugin(
            cpu_cache_gb=ARENA_GB,
            ssd_cache_gb=DISK_GB,
            ssd_cache_dir=str(root / str(start)),
            runtime_dir=str(bench.folder / "run"),
            recompute=True,
        )
        rates.append(_fio_rate(root))
        with bench.engine(chosen) as engine:
            _measure(bench, engine, samples)
    return [_row(length, samples, statistics.median(rates)) for length in LENGTHS]


def _measure(bench: Bench, engine: Engine, samples: dict[tuple[str, int], list[float]]) -> None:
    prompts = [(length, bench.fresh_prompt(length)) for length in (*LENGTHS, LENGTHS[-1])]
    for _, prompt in prompts:
        engine.generate(prompt, max_tokens=1)
    for sample in range(bench.samples + 1):
        for length, prompt in prompts:
            for source in ("disk hit", "host hit"):
                engine.reset_prefix_cache()
                before = engine.counter("vllm:external_prefix_cache_hits")
                answer = engine.generate(prompt, max_tokens=1)
                hits = engine.counter("vllm:external_prefix_cache_hits") - before
                if hits < 0.9 * length:
                    raise RuntimeError(f"{source}: only {hits:g} of {length} tokens were cached")
                if sample > 0:  # the first round warms up
                    samples[source, length].append(answer.ttft)


def _fio_rate(folder: Path) -> float:
    """Bytes per second that fio reads in blocks of the same size, by its better way."""
    best = 0.0
    for name in (disk_fio.ASYNCHRONOUS, disk_fio.THREADS):
        path = folder / "fio"
        read = disk_fio.Fio(name, path, FIO_BYTES, BLOCK_BYTES).read()
        best = max(best, read.size / read.seconds)
        path.unlink()
    return best


def _row(length: int, samples: dict[tuple[str, int], list[float]], rate: float) -> Row:
    disk = statistics.median(samples["disk hit", length])
    host = statistics.median(samples["host hit", length])
    read = length // 128 * BLOCK_BYTES / rate
    return Row(
        what=f"TTFT at {length:,} tokens, disk hit ÷ max(host hit, bytes ÷ fio's rate + 5 ms)",
        value=disk / max(host, read + EXTRA_SECONDS),
        unit="ratio",
        goal=Goal("<=", 1.2),
        detail=(
            f"disk hit {disk * 1e3:.4g} ms, host hit {host * 1e3:.4g} ms, "
            f"fio {read * 1e3:.4g} ms at {rate / 1e9:.2f} GB/s, "
            f"medians of {len(samples['disk hit', length])}"
        ),
    )
