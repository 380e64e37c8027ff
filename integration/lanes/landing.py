# SPDX-License-Identifier: Apache-2.0
"""Which tests run before a change lands; `landing.toml` holds the rules.

The change is all that differs from the commit of the last run of all tests, which the record names.
`nox -s nightly` runs all tests.
"""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

from integration.lanes.change import ROOT, changed_files, has_commit
from integration.lanes.importers import FROM_ROOT, SOURCES, TESTS, Importers, is_test
from integration.lanes.record import Record

RULES = ROOT / "integration" / "lanes" / "landing.toml"

SETUP_SECONDS = 300.0
"""Of lint and of making the environments. Measured: 120 s on two idle cores."""

MOST_MINUTES, LEAST_MINUTES = 85, 10

_WITH_TESTS = ("packages", "kernels", "docs", "dashboards", "compat-ci", "mutants", "integration")


@dataclass(frozen=True, slots=True)
class Room:
    """Tests, and the changes that concern them beside changes of what they import.

    Attributes:
        tests: patterns of their files. The first room that fits a file has it.
        changed: patterns of files.
        importers: folders; a change of all that is imported there concerns the tests.
        imports: whether a change of what the tests import from the packages concerns them.
    """

    tests: tuple[str, ...]
    changed: tuple[str, ...] = ()
    importers: tuple[str, ...] = ()
    imports: bool = True


@dataclass(frozen=True, slots=True)
class Nightly:
    """Tests of an engine that no landing needs.

    Attributes:
        tests: pattern of their ids.
        smoke: patterns of ids of those among them that run before a landing, too.
        found_by: what finds their faults before a landing: files of tests without an engine, tests
            with one, or names of mutants.
    """

    tests: str
    smoke: tuple[str, ...]
    found_by: tuple[str, ...]

    def leaves_out(self, test: str) -> bool:
        """Whether a landing leaves out a test, by its id."""
        return _is_named(test, (self.tests,)) and not _is_named(test, self.smoke)


@dataclass(frozen=True, slots=True)
class Rules:
    """What `landing.toml` says.

    Attributes:
        whole: patterns of files whose change runs all tests.
        harmless: patterns of files whose change runs the tests without a room, and those of the
            rooms that name them.
        rooms: of tests.
        nightly: tests that run every night and, before a landing, if they change.
    """

    whole: tuple[str, ...]
    harmless: tuple[str, ...]
    rooms: tuple[Room, ...]
    nightly: tuple[Nightly, ...]

    @classmethod
    def read(cls, path: Path = RULES) -> Self:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(
            tuple(found["whole"]),
            tuple(found["harmless"]),
            tuple(Room(**_tuples(each)) for each in found["room"]),
            tuple(
                Nightly(each["tests"], tuple(each.get("smoke", ())), tuple(each["found_by"]))
                for each in found["nightly"]
            ),
        )

    def unfit(self, tests: Sequence[str]) -> list[str]:
        """The patterns of nightly tests that fit none of these ids, if some are of their files."""
        files = {test.partition("::")[0] for test in tests}
        unfit = []
        for each in self.nightly:
            if any(_fits(file, [each.tests.partition("::")[0]]) for file in files):
                named = [test for test in tests if _is_named(test, (each.tests,))]
                unfit += [] if named else [each.tests]
                unfit += [p for p in each.smoke if not any(_is_named(test, (p,)) for test in named)]
        return unfit

    def room_of(self, file: str) -> Room | None:
        """The room of a file of tests."""
        return next((room for room in self.rooms if _fits(file, room.tests)), None)


@dataclass(frozen=True, slots=True)
class Lane:
    """The tests that run.

    Attributes:
        whole: why all of them run; "" if some are left out.
        files: files of tests that are left out.
        nightly: tests that are left out.
        kept: files of tests that differ, or import what differs of the tests' own: all of their
            tests run, whatever `nightly` says.
    """

    whole: str = ""
    files: frozenset[str] = frozenset()
    nightly: tuple[Nightly, ...] = ()
    kept: frozenset[str] = field(default=frozenset())

    @classmethod
    def of(cls, changed: Iterable[str], rules: Rules, importers: Importers) -> Self:
        """The tests that a change concerns."""
        changed = set(changed)
        for file in sorted(changed):
            if reason := _concerns_all(file, rules):
                return cls(f"{file} {reason}")
        reached = importers.reached(changed)
        kept = importers.reached(f for f in changed if not f.startswith(SOURCES))
        files = {
            test
            for test in files_of_tests(importers.root)
            if test not in kept and not _is_concerned(test, rules.room_of(test), changed, reached)
        }
        return cls("", frozenset(files), rules.nightly, frozenset(filter(is_test, kept)))

    @classmethod
    def of_landing(cls, root: Path = ROOT) -> Self:
        """The tests that the change in a checkout concerns."""
        base = Record.committed().whole
        if not has_commit(base, root):
            return cls(f"the record names {base!r}, which this checkout does not build on")
        try:
            return cls.of(changed_files(root, base, removed=True), Rules.read(), Importers(root))
        except subprocess.CalledProcessError as error:
            return cls(f"git fails ({error})")

    def leaves_out(self, test: str) -> bool:
        """Whether a test is left out, by its id."""
        file = test.partition("::")[0]
        if file in self.files:
            return True
        return file not in self.kept and any(each.leaves_out(test) for each in self.nightly)

    def minutes(self, record: Record) -> tuple[float, float]:
        """The minutes that `.ci/run` takes by the record, and those after which it ends: twice as
        many."""
        if not record.files:
            return MOST_MINUTES, MOST_MINUTES
        seconds = SETUP_SECONDS + record.collecting + record.idle
        for file, each in record.files.items():
            if file not in self.files:
                parted = file not in self.kept and any(file in each.tests for each in self.nightly)
                seconds += (each.seconds + each.waited) / record.workers * (0.5 if parted else 1.0)
        expected = seconds / 60
        return expected, min(MOST_MINUTES, max(LEAST_MINUTES, 2 * expected))

    def to_plain(self) -> dict[str, Any]:
        """For a worker of pytest-xdist."""
        return {
            "whole": self.whole,
            "files": sorted(self.files),
            "nightly": [astuple(each) for each in self.nightly],
            "kept": sorted(self.kept),
        }

    @classmethod
    def from_plain(cls, said: Mapping[str, Any]) -> Self:
        """What `to_plain` gave."""
        nightly = tuple(Nightly(t, tuple(s), tuple(f)) for t, s, f in said["nightly"])
        return cls(said["whole"], frozenset(said["files"]), nightly, frozenset(said["kept"]))


def files_of_tests(root: Path = ROOT) -> Iterator[str]:
    """Files of tests, as paths from `root`."""
    for folder in _WITH_TESTS:
        for path in sorted(root.joinpath(folder).rglob("test_*.py")):
            yield str(path.relative_to(root))


def left_out(tests: Sequence[str], ran: Iterable[str]) -> Iterator[str]:
    """Lines that name tests that are left out: whole files by their names."""
    files = {test.partition("::")[0] for test in ran}
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    for file, found in by_file.items():
        if file in files:
            yield from found
        else:
            yield f"{file} ({len(found)} tests)"


def _concerns_all(file: str, rules: Rules) -> str:
    """Why a change of a file runs all tests; "" if it does not."""
    if _fits(file, rules.whole):
        return "changed, which runs all tests"
    known = (*rules.harmless, *(p for room in rules.rooms for p in (*room.tests, *room.changed)))
    if _fits(file, known) or (file.endswith(".py") and file.startswith((*TESTS, *FROM_ROOT))):
        return ""
    return "changed, which no rule of landing.toml knows"


def _is_concerned(test: str, room: Room | None, changed: set[str], reached: set[str]) -> bool:
    if room is None or (room.imports and test in reached):
        return True
    if any(_fits(file, room.changed) for file in changed):
        return True
    return bool(room.importers) and any(file.startswith(room.importers) for file in reached)


def _fits(file: str, patterns: Iterable[str]) -> bool:
    """Whether a path is in one of the folders, which end with "/", or fits one of the patterns,
    whose "*" are parts of one name."""
    return any(
        file.startswith(pattern)
        if pattern.endswith("/")
        else file.count("/") == pattern.count("/") and fnmatchcase(file, pattern)
        for pattern in patterns
    )


def _is_named(test: str, patterns: Iterable[str]) -> bool:
    """Whether a test's id fits one of the patterns, in which only "*" is special."""
    return any(fnmatchcase(test, pattern.replace("[", "[[]")) for pattern in patterns)


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {n: tuple(v) if isinstance(v, list) else v for n, v in entry.items()}
