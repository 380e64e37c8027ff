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
EXPLAINED = dataclasses.replace(MUTANT, survives="x is always 0")


@pytest.mark.parametrize(
    ("mutant", "ending", "verdict"),
    [
        (MUTANT, Ending.FAILED, Verdict.KILLED),
        (MUTANT, Ending.TIMED_OUT, Verdict.KILLED),
        (MUTANT, Ending.PASSED, Verdict.SURVIVED),
        (MUTANT, Ending.BROKEN, Verdict.ERROR),
        (EXPLAINED, Ending.PASSED, Verdict.EXPLAINED),
        (EXPLAINED, Ending.FAILED, Verdict.ERROR),
        (EXPLAINED, Ending.TIMED_OUT, Verdict.ERROR),
        (EXPLAINED, Ending.BROKEN, Verdict.ERROR),
    ],
)
def test_how_its_tests_ended_decides(mutant: Mutant, ending: Ending, verdict: Verdict) -> None:
    assert verdicts.judge(mutant, Outcome(ending, 1.0, "why")).verdict is verdict


def _results(**counts: int) -> list[Result]:
    return [
        Result(MUTANT, Verdict[name.upper()], "")
        for name, count in counts.items()
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("results", "passes"),
    [
        (_results(killed=1), True),
        (_results(killed=19, explained=1), True),
        (_results(killed=18, explained=1), False),
        (_results(killed=99, survived=1), False),
        (_results(killed=99, error=1), False),
        ([], False),
    ],
)
def test_a_run_passes_if_enough_is_killed_and_the_rest_explained(
    results: list[Result], passes: bool
) -> None:
    assert verdicts.passes(results) is passes


def test_the_table_counts_by_area() -> None:
    disk = Result(dataclasses.replace(MUTANT, area="disk"), Verdict.SURVIVED, "")
    rows = [line.split() for line in verdicts.table([*_results(killed=3), disk]).splitlines()]
    assert rows == [
        ["area", "killed", "explained", "survived", "error", "score"],
        ["core", "3", "0", "0", "0", "100.0%"],
        ["disk", "0", "0", "1", "0", "0.0%"],
        ["all", "3", "0", "1", "0", "75.0%"],
    ]
