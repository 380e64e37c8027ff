# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmarks that live beside the code they measure, and judges what they report.

Each is a file with a function ``run()`` that returns a list of dicts. It runs in a process of its
own, so that its memory and its imports (torch, for one) are gone before the next one starts:
``python scripts.py FILE OPTIONS`` prints what ``run(**OPTIONS)`` returns as one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from integration.bench.rows import Goal, Row

_ROOT = Path(__file__).resolve().parents[2]
COPIES = _ROOT / "kernels" / "bench" / "copies.py"
LOOKUP = _ROOT / "packages" / "flexkv" / "bench" / "lookup.py"
STORE = _ROOT / "packages" / "flexkv" / "bench" / "store.py"
RESET = _ROOT / "packages" / "flexkv" / "bench" / "reset.py"
DISK_INDEX = _ROOT / "packages" / "flexkv" / "bench" / "disk_index.py"
SCHEDULER_STEP = _ROOT / "packages" / "flexkv-vllm" / "bench" / "scheduler_step.py"
STEP_CALLS = _ROOT / "packages" / "flexkv-vllm" / "bench" / "step_calls.py"
OFFLOAD_CALLS = _ROOT / "packages" / "flexkv-vllm" / "bench" / "offload_calls.py"
FULL_ARENA = _ROOT / "packages" / "flexkv-vllm" / "bench" / "full_arena.py"
SGLANG_CALLS = _ROOT / "packages" / "flexkv-sglang" / "bench" / "scheduler_calls.py"
SGLANG_GOALS = {
    "lookup, a hit": Goal("<=", 1000),
    "lookup, a miss": Goal("<=", 1000),
    "offload of new pages": Goal("<=", 10_000),
    "offload of known pages": Goal("<=", 1000),
    "a step's look-ahead, 64 requests wait": Goal("<=", 2000),
}
CALL_GOALS = {
    "an idle decoding step: calls": Goal("<=", 60),
    "an idle decoding step: files": Goal("<=", 12),
    "match of a host hit: calls": Goal("<=", 30),
    "a request with a host hit: calls": Goal("<=", 800),
    "a request with a disk hit: calls": Goal("<=", 1300),
    "a host hit: keys cut before its load": Goal("<=", 2),
    "a disk hit: keys cut before its load": Goal("<=", 2),
    "a host hit: searches of the index before its load": Goal("<=", 2),
    "a disk hit: searches of the index before its load": Goal("<=", 2),
}
FULL_ARENA_GOALS = {
    "a decoding step with stores": Goal("<=", 100),
    "a lookup": Goal("<=", 150),
    "the same lookup, next step": Goal("<=", 150),
    "ordering the stores": Goal("<=", 500),
    "seeing the stores end": Goal("<=", 500),
    "presence of 8,000 blocks": Goal("<=", 3000),
}
OFFLOAD_GOALS = {
    "lookups of a prompt": Goal("<=", 300),
    "sources of the hit": Goal("<=", 500),
}
_QUEUED_GOAL = Goal("<=", 100)


def script_rows() -> list[Row]:
    """Copies, lookup, store and the scheduler's path against their goals."""
    return [
        *_copy_rows(report_of(COPIES)),
        *_time_rows(report_of(LOOKUP), "lookup of 1,312 blocks", "case", Goal("<=", 150)),
        *_time_rows(
            report_of(STORE), "store of a block in a full arena, behind", "prefix", Goal("<=", 20)
        ),
        *_time_rows(report_of(RESET), "a million blocks", "index", Goal("<=", 300)),
        *_time_rows(
            report_of(SCHEDULER_STEP),
            "scheduler step with nothing to do, requests decoding",
            "decoding",
            Goal("<=", 20),
        ),
        *_call_rows(report_of(STEP_CALLS)),
        *_full_arena_rows(report_of(FULL_ARENA)),
        *_offload_rows(report_of(OFFLOAD_CALLS)),
        *_sglang_rows(report_of(SGLANG_CALLS)),
    ]


def report_of(script: Path, **options: Any) -> list[dict[str, Any]]:
    """What a benchmark's ``run()`` returns, called with these options; CalledProcessError when it
    fails."""
    done = subprocess.run(
        [sys.executable, "-m", "integration.bench.scripts", str(script), json.dumps(options)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return report


def _copy_rows(report: list[dict[str, Any]]) -> list[Row]:
    return [
        Row(
            what=(
                f"copy, {row['direction']}, pages of {row['page_bytes'] // 1024} KiB, "
                f"{row['threads']} thread(s)"
            ),
            value=row["ratio"],
            unit="ratio",
            goal=Goal(">=", 0.85),
            detail=(
                f"{row['gb_per_s']:.1f} GB/s ÷ memcpy {row['memcpy_gb_per_s']:.1f} GB/s, "
                f"medians of {row['repeats']}"
            ),
        )
        for row in report
        if row["name"] == "copy"
    ]


def _call_rows(report: list[dict[str, Any]]) -> list[Row]:
    return [
        Row(
            what=f"FlexKV in vLLM's step: {row['name']}",
            value=row["count"],
            unit="",
            goal=CALL_GOALS.get(row["name"]),
            detail=f"median of {row['repeats']}; see {STEP_CALLS.name}",
        )
        for row in report
    ]


def _full_arena_rows(report: list[dict[str, Any]]) -> list[Row]:
    return [
        Row(
            what=f"full arena, {row['case']}: {row['name']}",
            value=row["microseconds"],
            unit="us",
            goal=FULL_ARENA_GOALS.get(row["name"], _QUEUED_GOAL),
            detail=f"median of {row['repeats']}, least {row['least']:.0f}",
        )
        for row in report
    ]


def _offload_rows(report: list[dict[str, Any]]) -> list[Row]:
    return [
        Row(
            what=f"OffloadingConnector, {row['name']}: FlexKV's share",
            value=row["share"],
            unit="us",
            goal=OFFLOAD_GOALS[row["name"]],
            detail=(
                f"of {row['microseconds']:.0f}, medians of {row['repeats']}; {row['calls']:g} "
                f"calls, {row['searches']:g} searches of the index"
            ),
        )
        for row in report
    ]


def _sglang_rows(report: list[dict[str, Any]]) -> list[Row]:
    return [
        Row(
            what=f"SGLang's scheduler, 32,768 tokens, pages of {row['page']}: {row['name']}",
            value=row["microseconds"],
            unit="us",
            goal=SGLANG_GOALS.get(row["name"]),
            detail=f"of {row['repeats']}; see {SGLANG_CALLS.name}",
        )
        for row in report
    ]


def _time_rows(report: list[dict[str, Any]], what: str, case: str, goal: Goal) -> list[Row]:
    return [
        Row(
            what=f"{what}: {row[case]}",
            value=row["microseconds"],
            unit="us",
            goal=goal,
            detail=f"median of {row['repeats']}",
        )
        for row in report
    ]


def _run_script(path: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up the module they are defined in.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    rows: list[dict[str, Any]] = module.run(**options)
    return rows


if __name__ == "__main__":
    print(json.dumps(_run_script(Path(sys.argv[1]), json.loads(sys.argv[2]))))
