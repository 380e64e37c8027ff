# SPDX-License-Identifier: Apache-2.0
"""The record of what tests take."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.lanes.record import FileTimes, Record, report

FILES = {
    "a/test_one.py": FileTimes(100.25, 40.5, 3, 1.0, {"vLLM": 2}),
    "b/test_two.py": FileTimes(10.0, 4.0, 5),
}
RECORD = Record("commit", "", 2, 60.0, 5.0, 1.5, FILES)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    RECORD.write(path)
    assert Record.read(path) == RECORD
    assert sum('test_one.py"' in line for line in path.read_text().splitlines()) == 1
    assert len(path.read_text().splitlines()) == 2 + len(FILES)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"files": 3}', '{"files": {"a": [1]}}', '{"files": {}, "more": 1}']
)
def test_a_file_that_holds_no_record_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"times\.json holds no record of tests"):
        Record.read(path)


def test_a_whole_run_becomes_the_record() -> None:
    new = {"a/test_one.py": FileTimes(1.0, 1.0, 1), "c/test_three.py": FileTimes(2.0, 1.0, 1)}
    run = Record("later", "", 3, 50.0, 4.0, 0.5, new)
    updated = RECORD.updated(run, new)
    assert updated == run


def test_a_part_of_the_tests_leaves_the_commit_and_what_did_not_run() -> None:
    part = {"a/test_one.py": FileTimes(1.0, 1.0, 1), "b/test_two.py": FileTimes(20.0, 8.0, 5)}
    updated = RECORD.updated(Record("", "", 1, 9.0, 1.0, 0.0, part), FILES)
    assert updated.whole == "commit"
    assert updated.wall == RECORD.wall
    assert updated.files == {**FILES, "b/test_two.py": part["b/test_two.py"]}, "3 tests, not 1"


def test_a_file_that_is_gone_leaves_the_record() -> None:
    updated = RECORD.updated(Record(), ["b/test_two.py"])
    assert [*updated.files] == ["b/test_two.py"]


def test_a_report_begins_with_the_most_costly_files() -> None:
    files = {f"test_{n}.py": FileTimes(float(n), 1.0, 1) for n in range(30)}
    lines = [*report(Record(files=files), Record())]
    assert [line.split()[-1] for line in lines[2:12]] == [f"test_{n}.py" for n in range(29, 19, -1)]
    assert lines[-1].startswith("not in the record: test_0.py test_1.py")


def test_a_report_names_the_engines_and_the_waits() -> None:
    first, *_ = report(RECORD, RECORD)
    assert "110 s of tests in 2 workers, 44 s of processor time" in first
    assert "1 s of waiting for a worker" in first
    assert first.endswith("engines started: 2 of vLLM")


def test_a_report_names_what_differs_from_the_record() -> None:
    known = {
        "slower.py": FileTimes(10.0, 1.0, 2),
        "as before.py": FileTimes(10.0, 1.0, 2),
        "a part.py": FileTimes(100.0, 1.0, 9),
        "short.py": FileTimes(0.5, 1.0, 2),
        "engines.py": FileTimes(10.0, 1.0, 2, 0.0, {"vLLM": 1}),
    }
    now = {
        "slower.py": FileTimes(20.0, 1.0, 2),
        "as before.py": FileTimes(12.0, 1.0, 2),
        "a part.py": FileTimes(9.0, 1.0, 1),
        "short.py": FileTimes(4.0, 1.0, 2),
        "engines.py": FileTimes(10.0, 1.0, 2, 0.0, {"vLLM": 2}),
    }
    lines = [*report(Record(files=now), Record(files=known))]
    changed = lines[lines.index("changed against the record most:") + 1 :]
    assert [line.split()[-1] for line in changed] == ["slower.py", "engines.py"]


def test_the_committed_record_can_be_read() -> None:
    assert Record.committed().workers >= 1
