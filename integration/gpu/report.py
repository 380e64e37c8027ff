# SPDX-License-Identifier: Apache-2.0
"""The report: a page of the site, and the same with all samples as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from integration.bench.rows import Row
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
    for outcome in outcomes:
        lines += ["", *_section(outcome)]
    return "\n".join(lines) + "\n"


def _summary(outcomes: Sequence[Outcome]) -> str:
    goals = [row for outcome in outcomes for row in outcome.rows if row.goal is not None]
    met = sum(row.passed for row in goals)
    text = f"{met} of {len(goals)} rows with a goal reach it."
    failed = [outcome.name for outcome in outcomes if outcome.failure is not None]
    return text + (f" Sections that failed: {', '.join(failed)}." if failed else "")


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
    unit = "" if row.unit == "ratio" else f" {row.unit}"
    value = f"{row.value:.3f}" if row.value < 10 else f"{row.value:.1f}"
    value = "not measured" if math.isnan(row.value) else value + unit
    goal = "" if row.goal is None else str(row.goal)
    verdict = "" if row.goal is None else "ok" if row.passed else "**missed**"
    cells = (row.what, value, goal, verdict, row.detail)
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    """As one cell: neither a new line nor a bar may end it, and "<" must not begin a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
