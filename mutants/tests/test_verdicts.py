# SPDX-License-Identifier: Apache-2.0
"""What counts as killed, and what fails a run."""

from __future__ import annotations

import dataclasses

import pytest

from mutants import verdicts
from mutants.entries import Mutant
from mutants.fork_server import Ending, Outcome
from mutants.verdicts import Result, Verdict

MUTANT = Mutant("core", "twice_is_once", "twice.py", "2 * x", "x", ("test_twice.py",))


@pytest.mark.parametrize(
    ("ending", "verdict"),
    [
        (Ending.FAILED, Verdict.KILLED),
        (Ending.TIMED_OUT, Verdict.KILLED),
        (Ending.PASSED, Verdict.SURVIVED),
        (Ending.BROKEN, Verdict.ERROR),
    ],
)
def test_how_its_tests_ended_decides(ending: Ending, verdict: Verdict) -> None:
    assert verdicts.judge(MUTANT, Outcome(ending, 1.0, "why")).verdict is verdict


def _results(**counts: int) -> list[Result]:
    return [
        Result(MUTANT, Verdict[name.upper()], "")
        for name, count in counts.items()
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("results", "passes"),
    [
        (_results(killed=2), True),
        (_results(killed=99, survived=1), False),
        (_results(killed=99, error=1), False),
        ([], False),
    ],
)
def test_a_run_passes_if_all_mutants_are_killed(results: list[Result], passes: bool) -> None:
    assert verdicts.passes(results) is passes


def test_the_table_counts_by_area() -> None:
    disk = Result(dataclasses.replace(MUTANT, area="disk"), Verdict.SURVIVED, "")
    rows = [line.split() for line in verdicts.table([*_results(killed=3), disk]).splitlines()]
    assert rows == [
        ["area", "killed", "survived", "error"],
        ["core", "3", "0", "0"],
        ["disk", "0", "1", "0"],
        ["all", "3", "1", "0"],
    ]
