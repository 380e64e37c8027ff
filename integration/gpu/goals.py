# SPDX-License-Identifier: Apache-2.0
"""What FlexKV is to reach on an H200 with 16 lanes of PCIe 5.0, in one run.

A row that shows one of these goals carries it; the report lists all of them, met or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from integration.bench.rows import Goal, Row

ONE_WAY_LONG = Goal(">=", 0.97, "one way ÷ one large copy, runs of 16 KiB and more")
ONE_WAY_SHORT = Goal(">=", 0.90, "one way ÷ one large copy, runs of 256 bytes")
ONE_WAY_LAYOUTS = Goal(">=", 0.97, "one way ÷ one large copy, layouts of models")
BOTH_WAYS = Goal(">=", 0.97, "both ways at once ÷ two large copies at once")
COPIES_BESIDE = Goal(">=", 0.80, "copies beside a product or attention ÷ large copies alone")
COMPUTE_BESIDE = Goal("<=", 1.02, "a product or attention beside copies that reach that ÷ alone")
MULTIPROCESSORS = Goal("<=", 4, "multiprocessors that copies both ways occupy")
SUBMIT = Goal("<=", 100.0, "microseconds of the engine's thread to order 4,096 pages")
WARM_TTFT = Goal("<=", 0.08, "TTFT of a warm batch ÷ no connector")
WARM_RATE = Goal(">=", 1.3, "requests a minute of a warm batch ÷ no connector")
PEER_TTFT = Goal("<=", 1.0, "TTFT of a warm batch ÷ other connectors")
PEER_RATE = Goal(">=", 1.0, "requests a minute of a warm batch ÷ other connectors")
SAME_TOKENS = Goal("<=", 0, "answers over loaded blocks that differ from computed ones")
NO_WRONG_BYTES = Goal("<=", 0, "wrong bytes")

GOALS = (
    NO_WRONG_BYTES,
    ONE_WAY_LONG,
    ONE_WAY_SHORT,
    ONE_WAY_LAYOUTS,
    BOTH_WAYS,
    COPIES_BESIDE,
    COMPUTE_BESIDE,
    MULTIPROCESSORS,
    SUBMIT,
    SAME_TOKENS,
    WARM_TTFT,
    WARM_RATE,
    PEER_TTFT,
    PEER_RATE,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal, and the row that is furthest from it; None if no row was measured."""

    goal: Goal
    worst: Row | None

    @property
    def text(self) -> str:
        if self.worst is None:
            return "not measured"
        return "met" if self.worst.passed else "missed"


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """One for each goal, by the row that is furthest from it. NaN, and a value that does not count,
    are further than any number."""
    return [Verdict(goal, _worst([row for row in rows if row.goal == goal])) for goal in GOALS]


def _worst(rows: Sequence[Row]) -> Row | None:
    def badness(row: Row) -> tuple[bool, float]:
        assert row.goal is not None
        nothing = row.value != row.value or bool(row.void)
        return nothing, row.value * (-1 if row.goal.relation == ">=" else 1)

    return max(rows, key=badness, default=None)
