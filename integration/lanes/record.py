# SPDX-License-Identifier: Apache-2.0
"""Where the time of the tests goes: what a run writes, and the record that git keeps.

Both are one JSON object with a line for each file of tests. `nox -s test-times -- --write` takes
the last run into the record.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from integration.lanes.change import ROOT

RECORD = ROOT / "integration" / "lanes" / "times.json"
LAST_RUN = ROOT / "test-times.json"
SHOWN = 10
"""Files that a run prints."""

_NOISE = 1.3
"""Times that differ by less are not reported. Of files that take more than 5 s, two runs of one
commit on two cores differed by up to 1.25."""
_NOISE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class FileTimes:
    """What the tests of one file took.

    Attributes:
        seconds: from the start of each test to its end, with its fixtures.
        cpu: seconds of processor time of the tests and of all processes that they started.
        tests: how many ran.
        waited: seconds in which the file's worker waited for its tests: for another worker's test
            that runs alone, and for pytest-xdist.
        starts: of engines, by kind.
    """

    seconds: float
    cpu: float
    tests: int
    waited: float = 0.0
    starts: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: FileTimes) -> FileTimes:
        return FileTimes(
            self.seconds + other.seconds,
            self.cpu + other.cpu,
            self.tests + other.tests,
            self.waited + other.waited,
            dict(Counter(self.starts) + Counter(other.starts)),
        )


@dataclass(frozen=True, slots=True)
class Record:
    """What tests took.

    Attributes:
        whole: the commit of the last run in which all tests ran and passed, those that failed when
            they ran once more; "" if none is known.
        failed: the commit of a run of all tests of which some failed, until these pass; else "".
        workers: processes that ran tests at the same time.
        wall: seconds from the start of pytest to its end.
        collecting: seconds until each worker had all tests.
        idle: seconds in which a worker had no more tests and another one had.
        files: what each file took, by its path from the root.
    """

    whole: str = ""
    failed: str = ""
    workers: int = 1
    wall: float = 0.0
    collecting: float = 0.0
    idle: float = 0.0
    files: Mapping[str, FileTimes] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record in a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no record.
        """
        said = path.read_text(encoding="utf-8")
        try:
            found = json.loads(said)
            files = {name: FileTimes(*each) for name, each in found.pop("files").items()}
            return cls(**found, files=files)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} holds no record of tests ({error})") from error

    @classmethod
    def committed(cls) -> Self:
        """The record that git keeps."""
        return cls.read(RECORD)

    def write(self, path: Path) -> None:
        """Write the record into a file, a line for each file of tests."""
        head = {name: _rounded(getattr(self, name)) for name in self.__slots__ if name != "files"}
        lines = [
            f"  {json.dumps(name)}: {json.dumps([_rounded(getattr(each, n)) for n in _FIELDS])}"
            for name, each in sorted(self.files.items())
        ]
        body = ",\n".join(lines)
        text = json.dumps(head)[:-1] + ', "files": {\n' + body + "\n}}\n"
        path.write_text(text, encoding="utf-8")

    def updated(self, run: Record, there: Container[str]) -> Record:
        """This record with the times of a run, without files of tests that are not `there`. A run
        that is not whole may have run a part of a file, which then keeps its times."""
        files = dict(self.files)
        for name, each in run.files.items():
            if run.whole or name not in files or each.tests >= files[name].tests:
                files[name] = each
        files = {name: each for name, each in files.items() if name in there}
        if not run.whole:
            return dataclasses.replace(self, files=files)
        return dataclasses.replace(run, files=files)

    def total(self) -> FileTimes:
        """What all files took together."""
        return sum(self.files.values(), FileTimes(0.0, 0.0, 0))


_FIELDS = FileTimes.__slots__


def report(run: Record, record: Record) -> Iterator[str]:
    """A run's last lines: its sums, the files that cost most, and what differs from the record."""
    total = run.total()
    starts = ", ".join(f"{count} of {kind}" for kind, count in sorted(total.starts.items()))
    yield (
        f"{total.seconds:.0f} s of tests in {run.workers} workers, {total.cpu:.0f} s of processor "
        f"time; {run.collecting:.0f} s of collecting, {total.waited:.0f} s of waiting for a "
        f"worker, {run.idle:.0f} s idle at the end; engines started: {starts or 'none'}"
    )
    costly = sorted(run.files.items(), key=lambda each: -each[1].seconds)[:SHOWN]
    yield f"{'seconds':>8} {'processor':>9} {'record':>7} {'tests':>6} {'starts':>6}"
    for name, each in costly:
        yield _row(name, each, record.files.get(name))
    changed = [
        (name, each, known)
        for name, each in run.files.items()
        if (known := record.files.get(name)) and _differs(each, known)
    ]
    if changed:
        yield "changed against the record most:"
        changed.sort(key=lambda row: -abs(row[1].seconds - row[2].seconds))
        for name, each, known in changed[:SHOWN]:
            yield _row(name, each, known)
    if new := [name for name in run.files if name not in record.files]:
        yield f"not in the record: {' '.join(sorted(new))}"


def _row(name: str, each: FileTimes, known: FileTimes | None) -> str:
    recorded = "new" if known is None else f"{known.seconds:.1f}"
    starts = sum(each.starts.values()) or ""
    return f"{each.seconds:8.1f} {each.cpu:9.1f} {recorded:>7} {each.tests:6} {starts:>6} {name}"


def _differs(each: FileTimes, known: FileTimes) -> bool:
    """Whether a file's time, or its number of engines, differs by more than two runs do."""
    if each.tests != known.tests:  # a lane ran a part of it
        return False
    low, high = sorted((each.seconds, known.seconds))
    return each.starts != known.starts or high > max(low * _NOISE, low + _NOISE_SECONDS)


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value
