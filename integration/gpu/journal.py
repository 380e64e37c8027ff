# SPDX-License-Identifier: Apache-2.0
"""The rows of a run, in a file that grows by a line for each: what was measured is never lost.

A run may take several commands, and its file may come from several machines of one kind. Reading a
file gives what each section has found so far, and what is left to do.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from integration.bench.rows import Goal, Row
from integration.gpu.results import Outcome


class JournalError(Exception):
    """Files of rows that cannot be used; the message says why, and what is allowed."""


class Journal:
    """Appends lines to a file, which is made if it is not there. Several processes may do so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # behind a line that was cut when its writer was killed

    def machine(self, machine: Mapping[str, str]) -> None:
        """The machine of all that follows."""
        self._append("machine", machine=dict(machine))

    def begin(self, section: str, quick: bool) -> None:
        """A section begins, or goes on."""
        self._append("begin", section=section, quick=quick)

    def row(self, section: str, row: Row) -> None:
        """A section has measured a row."""
        fields = asdict(row)
        fields["value"] = None if math.isnan(row.value) else row.value
        self._append("row", section=section, row=fields)

    def note(self, section: str, text: str) -> None:
        """A section has something to say."""
        self._append("note", section=section, text=text)

    def unit(self, section: str, unit: str) -> None:
        """All rows of a part of a section are there."""
        self._append("unit", section=section, unit=unit)

    def keep(self, section: str, name: str, value: Any) -> None:
        """A section has measured a part of what a later row is made from."""
        self._append("kept", section=section, name=name, value=value)

    def end(self, section: str, failure: str | None) -> None:
        """A section has come to its end, or failed."""
        self._append("end", section=section, failure=failure)

    def copy_from(self, path: Path) -> None:
        """Append all lines of another journal. JournalError if it cannot be read."""
        for line in _lines(path):
            os.write(self._fd, line.rstrip("\n").encode() + b"\n")

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, **fields}, allow_nan=False) + "\n"
        os.write(self._fd, line.encode())  # one call: lines of two processes do not mix


@dataclass(slots=True)
class Progress:
    """What is known of a section.

    Attributes:
        outcome: what it found so far. A later row takes the place of one with the same text.
        units: its parts that are finished.
        kept: what it has kept for rows to come, by name; a later value takes the place of another.
        quick: whether it was measured with less memory and fewer repeats.
        ended: whether it has come to its end, or failed.
    """

    outcome: Outcome
    units: set[str] = field(default_factory=set)
    kept: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    ended: bool = False


@dataclass(slots=True)
class Record:
    """What files of rows say.

    Attributes:
        machine: as `describe_machine` has it; the last one counts.
        sections: by name, those that have begun.
    """

    machine: dict[str, str] = field(default_factory=dict)
    sections: dict[str, Progress] = field(default_factory=dict)


def read(paths: Iterable[Path], titles: Mapping[str, str], *, begun: bool = True) -> Record:
    """What is in the files, read one after the other. Lines that were cut are skipped.

    Args:
        paths: of the files.
        titles: of the sections, by name. Sections that are not in it are skipped.
        begun: whether each file must name the machine.

    Raises:
        JournalError: a file cannot be read or names no machine, or devices differ.
    """
    record = Record()
    for path in paths:
        named = False
        for line in _lines(path):
            event = _parse(line)
            if event.get("kind") == "machine":
                named = True
                _take_machine(record, event["machine"], path)
            elif event.get("section") in titles:
                _take(record, event, titles)
        if begun and not named:
            raise JournalError(f"{path} names no machine; allowed: a file that a run has written")
    return record


def _take_machine(record: Record, machine: dict[str, str], path: Path) -> None:
    known, found = record.machine.get("device"), machine.get("device")
    if known is not None and found != known:
        raise JournalError(
            f"{path} has rows of {found!r}, earlier ones are of {known!r}; allowed: one device"
        )
    record.machine = machine


def _take(record: Record, event: Mapping[str, Any], titles: Mapping[str, str]) -> None:
    name = event["section"]
    progress = record.sections.setdefault(name, Progress(Outcome(titles[name])))
    outcome = progress.outcome
    match event["kind"]:
        case "begin":
            progress.quick |= event["quick"]
            progress.ended, outcome.failure = False, None
        case "row":
            _put(outcome.rows, _row(event["row"]))
        case "note":
            if event["text"] not in outcome.notes:
                outcome.notes.append(event["text"])
        case "unit":
            progress.units.add(event["unit"])
        case "kept":
            progress.kept[event["name"]] = event["value"]
        case "end":
            progress.ended, outcome.failure = True, event["failure"]


def _put(rows: list[Row], row: Row) -> None:
    places = [i for i, other in enumerate(rows) if other.what == row.what]
    if places:
        rows[places[0]] = row
    else:
        rows.append(row)


def _row(fields: dict[str, Any]) -> Row:
    goal = None if fields["goal"] is None else Goal(**fields["goal"])
    value = math.nan if fields["value"] is None else fields["value"]
    return Row(**(fields | {"goal": goal, "value": value}))


def _parse(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error
