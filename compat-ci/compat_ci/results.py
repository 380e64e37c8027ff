# SPDX-License-Identifier: Apache-2.0
"""What came out of testing a version, and the files that keep it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from compat_ci.matrix import Level


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one level said of one version.

    Attributes:
        passed: whether nothing was wrong.
        checked: what was done, in a few words.
        date: of the run, ISO 8601, UTC.
        commit: of our code.
        digest: of our code's files that concern the engine, by `code.digest`.
        reasons: what was wrong, one line each.
    """

    passed: bool
    checked: str
    date: str
    commit: str
    digest: str
    reasons: list[str] = field(default_factory=list)


Outcomes = dict[Level, Outcome]
"""By level; those that were not run are missing."""

Table = dict[str, dict[str, Outcomes]]
"""By engine and version."""


def read(path: Path) -> Table:
    """What `write` wrote; empty if there is no such file."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {
        engine: {
            version: {Level.parse(level): Outcome(**kept) for level, kept in outcomes.items()}
            for version, outcomes in versions.items()
        }
        for engine, versions in found.items()
    }


def write(path: Path, table: Table) -> None:
    """Keep `table` as JSON."""
    plain = {
        engine: {
            version: {
                str(level): dataclasses.asdict(outcome)
                for level, outcome in sorted(outcomes.items())
            }
            for version, outcomes in versions.items()
        }
        for engine, versions in table.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def merge(table: Table, newer: Table) -> Table:
    """`table` with what `newer` found.

    Of a version that passed, levels that were not run this time keep what was found before; of one
    that failed they lose it, since each level includes those before it.
    """
    merged = {engine: dict(versions) for engine, versions in table.items()}
    for engine, versions in newer.items():
        for version, outcomes in versions.items():
            kept = merged.setdefault(engine, {}).get(version, {})
            failed = any(not outcome.passed for outcome in outcomes.values())
            merged[engine][version] = outcomes if failed else kept | outcomes
    return merged
