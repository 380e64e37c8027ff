# SPDX-License-Identifier: Apache-2.0
"""A row of the table: what was measured, against which goal, and from which samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Relation = Literal["<=", "<", ">="]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a value must be; ``relation`` is between the value and ``bound``. ``name`` says what is
    to be reached, where a goal stands for several rows."""

    relation: Relation
    bound: float
    name: str = ""

    def met_by(self, value: float) -> bool:
        """Whether ``value`` reaches the goal; a NaN never does."""
        match self.relation:
            case "<=":
                return value <= self.bound
            case "<":
                return value < self.bound
            case ">=":
                return value >= self.bound

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured value.

    ``goal`` None means that the row is there for comparison only. ``detail`` says in words what
    the value was made from, ``samples`` holds the single measurements in ``unit_of_samples``.
    ``void`` says why the value does not count, so that the goal is not met whatever it is.
    """

    what: str
    value: float
    unit: str
    goal: Goal | None
    detail: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    unit_of_samples: str = "s"
    void: str = ""

    @property
    def passed(self) -> bool:
        """Whether the goal is met; a row without one always passes."""
        return self.goal is None or (not self.void and self.goal.met_by(self.value))

    @property
    def remark(self) -> str:
        """The detail, and why the value does not count."""
        return f"{self.detail}; does not count: {self.void}" if self.void else self.detail

    def as_json(self) -> dict[str, Any]:
        """For the JSON file."""
        goal = None if self.goal is None else str(self.goal)
        return asdict(self) | {"goal": goal, "passed": self.passed}


def ratio_row(
    what: str,
    goal: Goal | None,
    ours: tuple[str, Sequence[float]],
    theirs: tuple[str, Sequence[float]],
) -> Row:
    """The ratio of two medians of seconds; each side is its name and its samples."""
    (our_name, our_samples), (their_name, their_samples) = ours, theirs
    our_median, their_median = statistics.median(our_samples), statistics.median(their_samples)
    return Row(
        what=what,
        value=our_median / their_median,
        unit="ratio",
        goal=goal,
        detail=(
            f"{our_name} {milliseconds(our_median)} ÷ {their_name} {milliseconds(their_median)}, "
            f"medians of {len(our_samples)} and {len(their_samples)}"
        ),
        samples={our_name: list(our_samples), their_name: list(their_samples)},
    )


def milliseconds(seconds: float) -> str:
    """For people: four significant digits are more than such measurements hold."""
    return f"{seconds * 1e3:.4g} ms"


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one line each, aligned."""
    cells = [("", "what", "measured", "goal", "from")]
    for row in rows:
        verdict = "" if row.goal is None else ("ok" if row.passed else "MISSED")
        unit = "" if row.unit == "ratio" else f" {row.unit}"
        value = f"{row.value:.3f}" if row.value < 10 else f"{row.value:.1f}"
        goal = "" if row.goal is None else str(row.goal)
        cells.append((verdict, row.what, f"{value}{unit}", goal, row.remark))
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]
        )
        for line in cells
    )
