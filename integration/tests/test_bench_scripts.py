# SPDX-License-Identifier: Apache-2.0
"""The benchmarks beside the code run on today's code, and each goal has a row that it judges."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from integration.bench import scripts

SMALL: list[tuple[Path, dict[str, Any], Collection[str]]] = [
    (scripts.LOOKUP, {"indexed": 2000, "repeats": 2}, ["lookup"]),
    (scripts.STORE, {"repeats": 2}, ["store"]),
    (scripts.RESET, {"slots": 2000}, ["reset"]),
    (scripts.DISK_INDEX, {"slots": 2000}, ["reopen", "memory"]),
    (scripts.SCHEDULER_STEP, {"repeats": 2, "decoding": [0, 8]}, ["idle step"]),
    (scripts.STEP_CALLS, {"repeats": 1}, scripts.CALL_GOALS),
    (scripts.OFFLOAD_CALLS, {"repeats": 1}, scripts.OFFLOAD_GOALS),
    (scripts.FULL_ARENA, {"repeats": 1}, scripts.FULL_ARENA_GOALS),
    (scripts.SGLANG_CALLS, {"repeats": 1}, scripts.SGLANG_GOALS),
]
"""Each script, options that make it short, and the names of rows that it must have."""


@pytest.mark.parametrize(
    ("script", "options", "names"), [pytest.param(*each, id=each[0].stem) for each in SMALL]
)
def test_a_benchmark_has_a_row_for_each_goal(
    script: Path, options: dict[str, Any], names: Collection[str]
) -> None:
    rows = scripts.report_of(script, **options)
    assert set(names) <= {row["name"] for row in rows}
