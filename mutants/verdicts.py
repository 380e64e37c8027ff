# SPDX-License-Identifier: Apache-2.0
"""What became of the mutants, and the table of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from mutants.entries import Mutant
from mutants.fork_server import Ending, Outcome


class Verdict(enum.Enum):
    """What became of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    ERROR = "error"
    """Nothing is known: its tests fail without it, it does not build, or the list is wrong."""


@dataclass(frozen=True, slots=True)
class Result:
    """A mutant's verdict. reason: the test that noticed it, or why there is no such test."""

    mutant: Mutant
    verdict: Verdict
    reason: str
    seconds: float = 0.0

    def __str__(self) -> str:
        mutant = self.mutant
        name = f"{mutant.file}:{mutant.line}" if mutant.line else f"{mutant.area}: {mutant.name}"
        head = f"{self.verdict.value:9} {name}"
        return f"{head} ({self.seconds:.0f} s) {self.reason}".rstrip()


def judge(mutant: Mutant, outcome: Outcome) -> Result:
    """The verdict of a mutant whose tests pass without it and ended so with it."""
    verdict, reason = Verdict.ERROR, outcome.reason
    match outcome.ending:
        case Ending.FAILED | Ending.TIMED_OUT:
            verdict = Verdict.KILLED
        case Ending.PASSED:
            verdict = Verdict.SURVIVED
        case Ending.BROKEN if mutant.line:
            verdict = Verdict.KILLED  # its file cannot be imported
    return Result(mutant, verdict, reason, outcome.seconds)


def passes(results: Sequence[Result]) -> bool:
    """Whether there are mutants, and all were killed."""
    return bool(results) and all(result.verdict is Verdict.KILLED for result in results)


def table(results: Sequence[Result]) -> str:
    """How many mutants of each area got which verdict."""
    areas = sorted({r.mutant.area for r in results})
    width = max(len("area"), len("all"), *map(len, areas)) if areas else len("area")
    head = "".join(f"{verdict.value:>11}" for verdict in Verdict)
    lines = [f"{'area':{width}}{head}"]
    rows = {area: [r for r in results if r.mutant.area == area] for area in areas}
    for area, row in (*rows.items(), ("all", list(results))):
        counts = (sum(r.verdict is verdict for r in row) for verdict in Verdict)
        cells = "".join(f"{count:11}" for count in counts)
        lines.append(f"{area:{width}}{cells}")
    return "\n".join(lines) + "\n"
