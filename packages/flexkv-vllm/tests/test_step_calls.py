# SPDX-License-Identifier: Apache-2.0
"""The calls of an idle step, of a match and of a request with a hit stay few. What depends on when
a disk answers is a row of the benchmark alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "step_calls.py"
MOST = {
    "an idle decoding step: calls": 45,
    "an idle decoding step: files": 10,
    "match of a host hit: calls": 22,
    "a request with a host hit: calls": 730,  # 678, and once more the figures, if they are due
    "a host hit: keys cut before its load": 2,
    "a host hit: searches of the index before its load": 2,
}


def test_steps_matches_and_requests_make_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("step_calls", BENCH)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(bench, "PLACES", bench.PLACES[:1])
    counts = {row["name"]: row["count"] for row in bench.run(3)}
    assert {name: counts[name] for name in MOST if counts[name] > MOST[name]} == {}
