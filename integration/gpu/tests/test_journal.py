# SPDX-License-Identifier: Apache-2.0
"""Files of rows: what is read is what was measured, however the writer ended."""

from __future__ import annotations

import math
import stat
from contextlib import closing
from pathlib import Path

import pytest

from integration.bench.rows import Goal, Row
from integration.gpu import goals
from integration.gpu.journal import Journal, JournalError, Record, read

TITLES = {"one-way": "One way", "submit": "Submit"}
H200 = {"device": "NVIDIA H200"}
ROW = Row("load", 0.9, "ratio", goals.ONE_WAY_LONG, "of 3", {"FlexKV": [1.0, 2.0]}, "GB/s")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "rows.jsonl"


def begun(path: Path, machine: dict[str, str] | None = None, quick: bool = False) -> None:
    with closing(Journal(path)) as file:
        file.machine(machine or H200)
        file.begin("one-way", quick)


def known(*paths: Path) -> Record:
    return read(paths, TITLES)


def test_what_is_written_is_read(path: Path) -> None:
    begun(path, quick=True)
    with closing(Journal(path)) as file:
        file.row("one-way", ROW)
        file.note("one-way", "a\nnote")
        file.note("one-way", "a\nnote")
        file.unit("one-way", "256 B rows")
        file.row("one-way", Row("errors", math.nan, "errors", Goal("<=", 0), ""))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    record = known(path)
    assert record.machine == H200
    (progress,) = record.sections.values()
    assert progress.outcome.name == "One way"
    assert progress.outcome.rows[0] == ROW
    assert math.isnan(progress.outcome.rows[1].value)
    assert progress.outcome.notes == ["a\nnote"]
    assert (progress.units, progress.quick, progress.ended) == ({"256 B rows"}, True, False)


def test_what_is_kept_is_read_and_a_later_value_counts(path: Path) -> None:
    begun(path)
    with closing(Journal(path)) as file:
        for value in (1.5, {"new": [1, 2]}):
            file.keep("one-way", "batch 1", value)
    assert known(path).sections["one-way"].kept == {"batch 1": {"new": [1, 2]}}


def test_an_end_is_known_until_the_section_goes_on(path: Path) -> None:
    begun(path)
    with closing(Journal(path)) as file:
        file.end("one-way", "exit status 1")
    progress = known(path).sections["one-way"]
    assert (progress.ended, progress.outcome.failure) == (True, "exit status 1")
    begun(path)
    progress = known(path).sections["one-way"]
    assert (progress.ended, progress.outcome.failure) == (False, None)


def test_a_later_row_takes_the_place_of_an_earlier_one(path: Path) -> None:
    begun(path)
    with closing(Journal(path)) as file:
        for what, value in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
            file.row("one-way", Row(what, value, "s", None, ""))
    rows = known(path).sections["one-way"].outcome.rows
    assert [(row.what, row.value) for row in rows] == [("a", 3.0), ("b", 2.0)]


def test_a_line_that_was_cut_is_lost_and_no_other(path: Path) -> None:
    begun(path)
    with path.open("a") as file:
        file.write('{"kind": "row", "section": "one-way", "row": {"what": "cu')
    with closing(Journal(path)) as journal:
        journal.row("one-way", ROW)
    assert known(path).sections["one-way"].outcome.rows == [ROW]


def test_files_are_merged_and_copied(path: Path, tmp_path: Path) -> None:
    other, both = tmp_path / "other.jsonl", tmp_path / "both.jsonl"
    begun(path)
    with closing(Journal(other)) as file:
        file.machine(H200 | {"date": "later"})
        file.begin("submit", False)
        file.row("submit", ROW)
        file.end("submit", None)
    record = known(path, other)
    assert list(record.sections) == ["one-way", "submit"]
    assert record.machine["date"] == "later"
    with closing(Journal(both)) as file:
        file.copy_from(path)
        file.copy_from(other)
    assert known(both) == record


def test_files_that_cannot_be_used_are_named(path: Path, tmp_path: Path) -> None:
    begun(path)
    other = tmp_path / "other.jsonl"
    begun(other, {"device": "NVIDIA L4"})
    with pytest.raises(JournalError, match=r"other.jsonl has rows of 'NVIDIA L4', .* one device"):
        known(path, other)
    with pytest.raises(JournalError, match=r"none.jsonl cannot be read: No such file"):
        known(tmp_path / "none.jsonl")
    (tmp_path / "text").write_text("no rows\n[1]\n")
    with pytest.raises(JournalError, match=r"text names no machine; allowed: "):
        known(tmp_path / "text")
