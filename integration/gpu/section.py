# SPDX-License-Identifier: Apache-2.0
"""``python -m integration.gpu.section NAME OUT``: one section, in this process.

`__main__` starts it; by hand it is of use to look into a failure.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator
from pathlib import Path

from integration.bench.rows import Row, table
from integration.gpu.results import Log, Outcome

SECTIONS = {
    "tests": "Tests",
    "one-way": "One way",
    "both-ways": "Both ways at once",
    "matmul": "Beside a matrix product",
    "submit": "What a transfer costs the engine's thread",
    "serving": "A model that serves",
}
"""Names on the command line, and in the report."""

SECONDS = {
    "tests": 360,
    "one-way": 300,
    "both-ways": 90,
    "matmul": 90,
    "submit": 60,
    "serving": 1200,
}
"""After which a section is ended, so that one that hangs leaves time for the others."""


def measure(name: str, quick: bool, log: Log) -> Iterator[Row]:
    """The rows of a section. Imports what it needs only then: torch, and CUDA's mover."""
    if name == "tests":
        from integration.gpu.gpu_tests import test_rows

        yield from test_rows(quick, log)
        return
    if name == "serving":
        from integration.gpu.serving import serving_rows

        yield from serving_rows(quick, log)
        return
    from integration.gpu.both_ways import both_ways_rows
    from integration.gpu.lab import open_lab
    from integration.gpu.matmul import matmul_rows
    from integration.gpu.one_way import one_way_rows
    from integration.gpu.submit import submit_rows

    parts = {
        "one-way": one_way_rows,
        "both-ways": both_ways_rows,
        "matmul": matmul_rows,
        "submit": submit_rows,
    }
    with open_lab(quick) as lab:
        for note in lab.notes:
            log.note(note)
        yield from parts[name](lab, log)


def main() -> None:
    """Measure, print the table, write the outcome."""
    parser = argparse.ArgumentParser(description="one section of the report")
    parser.add_argument("name", choices=list(SECTIONS))
    parser.add_argument("out", type=Path, help="a JSON file")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    log = Log()
    rows = measure(options.name, options.quick, log)
    outcome = collect(SECTIONS[options.name], rows, log, options.out)
    print(table(outcome.rows))


def collect(title: str, rows: Iterator[Row], log: Log, path: Path) -> Outcome:
    """All rows, or those until an error, which is reported. Each is in the file at `path` as soon
    as it was measured, for a section that is ended by its limit."""
    outcome = Outcome(title, notes=log.notes)
    try:
        for row in rows:
            outcome.rows.append(row)
            outcome.write(path)
    except Exception:  # noqa: BLE001 - what was measured before it must not be lost
        outcome.failure = traceback.format_exc()
    outcome.write(path)
    return outcome


if __name__ == "__main__":
    main()
