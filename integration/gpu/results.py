# SPDX-License-Identifier: Apache-2.0
"""What a section found, and its way from the section's process to the report."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from integration.bench.rows import Goal, Row


@dataclass(slots=True)
class Outcome:
    """Of one section.

    Attributes:
        name: of the section.
        rows: what was measured.
        notes: what else is to be said, say why something was not measured.
        failure: why the section did not come to its end; None if it did.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None and all(row.passed for row in self.rows)

    def write(self, path: Path) -> None:
        """As JSON, for `read`, which finds the whole or what was written before."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(path)

    def as_json(self) -> dict[str, Any]:
        """For the report. What was not measured has the value None: JSON knows no NaN."""
        rows = [row.as_json() for row in self.rows]
        for row in rows:
            row["value"] = None if math.isnan(row["value"]) else row["value"]
        return asdict(self) | {"rows": rows}


class Log:
    """What a section tells meanwhile, on the terminal and in its report."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def say(self, text: str) -> None:
        """How far it is."""
        print(f"  {text}", flush=True)

    def note(self, text: str) -> None:
        """What a reader of the report must know."""
        self.say(text)
        self.notes.append(text)


def read(path: Path) -> Outcome:
    """What `Outcome.write` has written. OSError or ValueError if there is none, or half of it."""
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        Row(**(fields | {"goal": None if fields["goal"] is None else Goal(**fields["goal"])}))
        for fields in document.pop("rows")
    ]
    return Outcome(rows=rows, **document)
