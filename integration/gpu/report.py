# SPDX-License-Identifier: Apache-2.0
"""The report: a page of the site, and the same with all samples as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from integration.bench.rows import Row
from integration.gpu.goals import Verdict, verdicts
from integration.gpu.results import Outcome


def write_report(
    path: Path, machine: Mapping[str, str], outcomes: Sequence[Outcome], partial: bool
) -> None:
    """Write `path` (Markdown) and, beside it, the same name with .json. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".json")
    path.write_text(markdown(machine, outcomes, partial, beside.name), encoding="utf-8")
    document = {
        "machine": dict(machine),
        "partial": partial,
        "passed": all(outcome.passed for outcome in outcomes),
        "goals": [
            {"goal": f"{found.goal.name}: {found.goal}", "verdict": found.text}
            for found in verdicts([row for outcome in outcomes for row in outcome.rows])
        ],
        "sections": [outcome.as_json() for outcome in outcomes],
    }
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def markdown(
    machine: Mapping[str, str], outcomes: Sequence[Outcome], partial: bool, json_name: str
) -> str:
    """The page."""
    lines = [f"# Measured on {machine['device']}", "", _summary(outcomes)]
    if partial:
        lines += [
            "",
            "**A partial run**: fewer sections, less memory or fewer repeats than a full one.",
        ]
    lines += [
        "",
        f"Every sample is in [{json_name}]({json_name}). What the rows mean is on the page "
        "[On a GPU](../gpu.md).",
        "",
        "| | |",
        "|---|---|",
        *(f"| {_cell(name)} | {_cell(value)} |" for name, value in machine.items()),
    ]
    lines += ["", *_goals(outcomes)]
    for outcome in outcomes:
        lines += ["", *_section(outcome)]
    return "\n".join(lines) + "\n"


def _summary(outcomes: Sequence[Outcome]) -> str:
    goals = [row for outcome in outcomes for row in outcome.rows if row.goal is not None]
    met = sum(row.passed for row in goals)
    text = f"{met} of {len(goals)} rows with a goal reach it."
    failed = [outcome.name for outcome in outcomes if outcome.failure is not None]
    return text + (f" Sections that failed: {', '.join(failed)}." if failed else "")


def _goals(outcomes: Sequence[Outcome]) -> list[str]:
    """The project's goals, each with the row that is furthest from it."""
    found = verdicts([row for outcome in outcomes for row in outcome.rows])
    return [
        "## Goals",
        "",
        "| | goal | measured | | row furthest from it |",
        "|---|---:|---:|---|---|",
        *(_goal(verdict) for verdict in found),
    ]


def _goal(verdict: Verdict) -> str:
    goal, worst = verdict.goal, verdict.worst
    measured, row = ("", "") if worst is None else (_value(worst), worst.what)
    text = "**missed**" if verdict.text == "missed" else verdict.text
    return "| " + " | ".join(map(_cell, (goal.name, str(goal), measured, text, row))) + " |"


def _section(outcome: Outcome) -> list[str]:
    lines = [f"## {outcome.name}"]
    if outcome.failure is not None:
        lines += ["", "**Failed:**", "", "```text", outcome.failure.replace("```", "'''"), "```"]
    if outcome.rows:
        lines += ["", "| | measured | goal | | from |", "|---|---:|---:|---|---|"]
        lines += [_row(row) for row in outcome.rows]
    if outcome.notes:
        lines += ["", *(f"- {_cell(note)}" for note in outcome.notes)]
    return lines


def _row(row: Row) -> str:
    value = _value(row)
    goal = "" if row.goal is None else str(row.goal)
    verdict = "" if row.goal is None else "ok" if row.passed else "**missed**"
    cells = (row.what, value, goal, verdict, row.remark)
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _value(row: Row) -> str:
    if math.isnan(row.value):
        return "not measured"
    value = f"{row.value:.3f}" if row.value < 10 else f"{row.value:.1f}"
    return value if row.unit == "ratio" else f"{value} {row.unit}"


def _cell(text: str) -> str:
    """As one cell: neither a new line nor a bar may end it, and "<" must not begin a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
