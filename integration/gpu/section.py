# SPDX-License-Identifier: Apache-2.0
"""``python -m integration.gpu.section NAME ROWS``: one section, in this process.

`__main__` starts it; by hand it is of use to look into a failure. An error is printed, and the exit
status is 1; the rows before it are in the file.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from integration.bench.rows import Row, table
from integration.gpu import journal
from integration.gpu.journal import Journal
from integration.gpu.results import Log
from integration.gpu.sizes import FULL, QUICK, Sizes

if TYPE_CHECKING:
    from integration.gpu.device import Gpu

SECTIONS = {
    "sweep": "Sweep",
    "smoke": "Every byte",
    "one-way": "One way",
    "both-ways": "Both ways at once",
    "beside": "Beside a computing engine",
    "submit": "What a transfer costs the engine's thread",
    "tests": "Tests",
    "sanitizer": "Tests under compute-sanitizer",
    "tokens": "Tokens of a model over loaded blocks",
    "serving": "A model that serves",
}
"""Names on the command line, and in the report, in the order in which they run."""

SECONDS = {
    "sweep": 240,
    "smoke": 150,
    "one-way": 540,
    "both-ways": 150,
    "beside": 300,
    "submit": 60,
    "tests": 240,
    "sanitizer": 2000,
    "tokens": 1100,
    "serving": 1500,
}
"""After which a section is ended, so that one that hangs leaves time for the others. Not tuned: no
device has run them yet."""

ON_DEVICE = ("sweep", "smoke", "one-way", "both-ways", "beside", "submit")
"""Those that copy between memory of their own and measure that."""


def measure(name: str, quick: bool, log: Log) -> Iterator[Row]:
    """The rows of a section. Imports what it needs only then: torch, and CUDA's mover."""
    if name in ON_DEVICE:
        from integration.gpu.device import TorchGpu

        yield from copy_rows(name, TorchGpu(), QUICK if quick else FULL, log)
    elif name in {"tests", "sanitizer"}:
        from integration.gpu import gpu_tests

        yield from (gpu_tests.test_rows if name == "tests" else gpu_tests.sanitizer_rows)(log)
    elif name == "tokens":
        from integration.gpu.tokens import token_rows

        yield from token_rows(log)
    else:
        from integration.gpu.serving import serving_rows

        yield from serving_rows(quick, log)


def copy_rows(name: str, gpu: Gpu, sizes: Sizes, log: Log) -> Generator[Row, None, None]:
    """The rows of a section that measures copies."""
    from integration.gpu.beside import beside_rows
    from integration.gpu.both_ways import both_ways_rows
    from integration.gpu.lab import open_lab
    from integration.gpu.one_way import one_way_rows
    from integration.gpu.smoke import smoke_rows
    from integration.gpu.submit import submit_rows
    from integration.gpu.sweep import sweep_rows

    parts = {
        "sweep": sweep_rows,
        "smoke": smoke_rows,
        "one-way": one_way_rows,
        "both-ways": both_ways_rows,
        "beside": beside_rows,
        "submit": submit_rows,
    }
    with open_lab(gpu, sizes) as lab:
        for note in lab.notes:
            log.note(note)
        yield from parts[name](lab, log)


def write_rows(name: str, rows: Iterator[Row], file: Journal) -> list[Row]:
    """Each row is in the file as soon as it was measured. Returns all."""
    found = []
    for row in rows:
        file.row(name, row)
        found.append(row)
    return found


def log_for(name: str, file: Journal) -> Log:
    """Continues what the file has of the section."""
    known = journal.read([file.path], SECTIONS, begun=False).sections.get(name)
    return Log(
        known.units if known is not None else frozenset(),
        lambda text: file.note(name, text),
        lambda unit: file.unit(name, unit),
        kept=known.kept if known is not None else {},
        keep=lambda part, value: file.keep(name, part, value),
    )


def end_with_parent() -> None:
    """End this process group as soon as standard input ends: the process that holds it is gone, and
    the next one would measure beside what goes on here."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="ends with its parent", daemon=True).start()


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="one section of the report")
    parser.add_argument("name", choices=list(SECTIONS))
    parser.add_argument("rows", type=Path, help="the file of rows, to be continued")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--watch", action="store_true", help="end when standard input ends")
    options = parser.parse_args()
    if options.watch:
        end_with_parent()
    with closing(Journal(options.rows)) as file:
        log = log_for(options.name, file)
        print(table(write_rows(options.name, measure(options.name, options.quick, log), file)))


if __name__ == "__main__":
    main()
