# SPDX-License-Identifier: Apache-2.0
"""The benchmarks beside the code run on today's code, and each goal has a row that it judges."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from integration.bench import scripts
from integration.harness.config import forked_environment
from integration.harness.vllm_forks import fork_server

SMALL: list[tuple[Path, dict[str, Any], Collection[str]]] = [
    (scripts.LOOKUP, {"indexed": 2000, "repeats": 2}, ["lookup"]),
    (scripts.STORE, {"repeats": 2}, ["store"]),
    (scripts.RESET, {"slots": 2000}, ["reset"]),
    (scripts.DISK_INDEX, {"slots": 2000}, ["reopen", "memory"]),
    (scripts.SCHEDULER_STEP, {"repeats": 2, "decoding": [0, 8]}, ["idle step"]),
    (scripts.STEP_CALLS, {"repeats": 1}, scripts.CALL_GOALS),
    (scripts.OFFLOAD_CALLS, {"repeats": 1}, scripts.OFFLOAD_GOALS),
    (
        scripts.FULL_ARENA,
        {"repeats": 1, "decoding": [(16, 1312)], "slots": 1 << 14},
        scripts.FULL_ARENA_GOALS,
    ),
    (scripts.SGLANG_CALLS, {"repeats": 1}, scripts.SGLANG_GOALS),
]
"""Each script, options that make it short, and the names of rows that it must have."""


def forked_report_of(script: Path, log_path: Path, **options: Any) -> list[dict[str, Any]]:
    """As `report_of`, in a fork of a process that has imported vLLM, as most of them do."""
    arguments = [str(script), json.dumps(options)]
    with log_path.open("wb") as log:
        process = fork_server().run(scripts.__name__, forked_environment(), log.fileno(), arguments)
    process.wait()
    said = log_path.read_text(errors="replace")
    rows = [line for line in said.splitlines() if line.startswith("[{")]
    assert len(rows) == 1, said
    report: list[dict[str, Any]] = json.loads(rows[0])
    return report


@pytest.mark.parametrize(
    ("script", "options", "names"), [pytest.param(*each, id=each[0].stem) for each in SMALL]
)
def test_a_benchmark_has_a_row_for_each_goal(
    script: Path, options: dict[str, Any], names: Collection[str], tmp_path: Path
) -> None:
    rows = forked_report_of(script, tmp_path / "log", **options)
    assert set(names) <= {row["name"] for row in rows}


def test_a_benchmark_runs_in_a_process_of_its_own() -> None:
    script, options, names = SMALL[0]
    assert set(names) <= {row["name"] for row in scripts.report_of(script, **options)}
