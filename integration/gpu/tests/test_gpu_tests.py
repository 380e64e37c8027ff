# SPDX-License-Identifier: Apache-2.0
"""The rows of the tests that need a GPU, made from tests that need none."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from pathlib import Path

import pytest

from integration.bench.rows import Goal, Row
from integration.gpu import gpu_tests, section
from integration.gpu.gpu_tests import SanitizerPart
from integration.gpu.results import Log

JUNIT = (
    '<?xml version="1.0"?><testsuites><testsuite name="pytest" errors="1" failures="2" '
    'skipped="3" tests="10"/></testsuites>'
)


def test_tests_are_counted(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    counts = gpu_tests.read_junit(tmp_path / "junit.xml")
    assert (counts.tests, counts.failed, counts.skipped, counts.passed) == (10, 3, 3, 4)


def test_errors_of_the_sanitizer_are_counted() -> None:
    text = "========= ERROR SUMMARY: 2 errors\n...\n========= ERROR SUMMARY: 1 error\n"
    assert gpu_tests.sanitizer_errors(text) == 3
    assert gpu_tests.sanitizer_errors("========= ERROR SUMMARY: 0 errors") == 0
    hazards = "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"
    assert gpu_tests.sanitizer_errors(hazards) == 2
    with pytest.raises(gpu_tests.TestRunError, match="printed no summary"):
        gpu_tests.sanitizer_errors("compute-sanitizer: not a CUDA program")


def make_tests(folder: Path, body: str) -> str:
    folder.mkdir()
    (folder / "test_it.py").write_text(f"import pytest\n{body}\n")
    return str(folder)


@pytest.mark.parametrize(
    ("body", "failed", "passed"),
    [
        ("def test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('x')", 1, 1),
        ("def test_a(): pass", 0, 1),
    ],
)
def test_a_real_run_of_tests_is_a_row(
    body: str, failed: int, passed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tests, "TESTS", make_tests(tmp_path / "t", body))
    (row,) = list(gpu_tests.test_rows(Log()))
    assert row == Row(
        "GPU tests that fail",
        failed,
        "tests",
        Goal("<=", 0),
        f"{passed} passed, {body.count('skip')} skipped",
    )
    assert row.passed == (failed == 0)


def fake_sanitizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: str, tests: str = "def test_a(): pass"
) -> None:
    """A compute-sanitizer on the PATH that runs the tests and then prints `end`; of two parts."""
    fake = folder / "compute-sanitizer"
    fake.write_text(f'#!/bin/sh\ntool=$2\nshift 4\n"$@"\n{end}\n')
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(gpu_tests, "TESTS", make_tests(folder / "t", tests))
    parts = (SanitizerPart("memcheck", "all"), SanitizerPart("racecheck", "some", ("_b",)))
    monkeypatch.setattr(gpu_tests, "PARTS", parts)


def test_each_part_is_a_row_of_its_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = (
        '[ $tool = memcheck ] && echo "ERROR SUMMARY: 4$PYTORCH_NO_CUDA_MEMORY_CACHING errors"'
    )
    summary += ' || echo "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"'
    tests = "def test_a(): pass\ndef test_b(): pass\ndef test_a_fault_of_the_engine(): assert 0"
    fake_sanitizer(tmp_path, monkeypatch, summary, tests)
    first, second = list(gpu_tests.sanitizer_rows(Log()))
    assert (first.what, first.value, first.passed) == (
        "errors that memcheck finds, all",
        41,
        False,
    )
    assert first.detail == "2 passed, 0 failed, 0 skipped"
    assert (second.what, second.value, second.passed) == (
        "errors that racecheck finds, some",
        0,
        True,
    )
    assert second.detail == "1 passed, 0 failed, 0 skipped"


def test_a_part_that_an_earlier_command_has_finished_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sanitizer(tmp_path, monkeypatch, 'echo "ERROR SUMMARY: 0 errors"', "def test_b(): pass")
    units: list[str] = []
    rows = list(gpu_tests.sanitizer_rows(Log(frozenset({"memcheck, all"}), unit_done=units.append)))
    assert [row.what for row in rows] == ["errors that racecheck finds, some"]
    assert units == ["racecheck, some"]


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("def test_b(): pytest.skip('x')", "memcheck, all: this device runs none of these 1 tests"),
        ("def test_c(): pass", "compute-sanitizer, racecheck, some: no such test"),
    ],
)
def test_a_part_without_a_test_reaches_no_goal(
    tests: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sanitizer(tmp_path, monkeypatch, 'echo "ERROR SUMMARY: 0 errors"', tests)
    log = Log()
    rows = list(gpu_tests.sanitizer_rows(log))
    assert any(note.startswith(said) for note in log.notes)
    assert not any(row.passed for row in rows if "racecheck" in row.what)


def collected() -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]
    done = subprocess.run(
        [*command, gpu_tests.TESTS], cwd=gpu_tests.ROOT, capture_output=True, text=True, check=True
    )
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def chosen(part: SanitizerPart, names: list[str]) -> list[str]:
    """What pytest selects by the part's words."""
    return [
        name
        for name in names
        if all(word in name for word in part.every)
        and (not part.any_of or any(word in name for word in part.any_of))
        and not any(word in name for word in (*gpu_tests.EXEMPT, *part.without))
    ]


def test_memcheck_has_every_test_once_and_no_part_is_empty() -> None:
    names = collected()
    of_memcheck: list[str] = []
    for part in gpu_tests.PARTS:
        assert chosen(part, names), part.unit
        of_memcheck += chosen(part, names) if part.tool == "memcheck" else []
    exempt = [name for name in names if any(word in name for word in gpu_tests.EXEMPT)]
    assert sorted(of_memcheck + exempt) == sorted(names)


def test_the_section_has_time_for_all_parts() -> None:
    assert gpu_tests.SANITIZER_SECONDS <= 200
    assert section.SECONDS["tests"] > gpu_tests.SECONDS
    assert section.SECONDS["sanitizer"] > gpu_tests.SANITIZER_SECONDS * len(gpu_tests.PARTS)


def test_without_a_sanitizer_there_is_a_note_and_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    log = Log()
    assert list(gpu_tests.sanitizer_rows(log)) == []
    assert log.notes == ["compute-sanitizer is not installed: not measured"]


def test_a_sanitizer_that_breaks_off_reaches_no_goal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sanitizer(tmp_path, monkeypatch, "")
    log = Log()
    row, _ = list(gpu_tests.sanitizer_rows(log))
    assert not row.passed
    assert row.detail == "compute-sanitizer printed no summary:"
    assert log.notes[0].startswith("compute-sanitizer, memcheck, all: ")


SLOW = """
def test_a(): pass
def test_b(): assert 0
def test_c(): pytest.skip("x")
def test_d(): import time; time.sleep(600)
"""


def test_a_limit_leaves_the_counts_of_the_tests_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tests, "TESTS", make_tests(tmp_path / "t", SLOW))
    for seconds in (3, 20, 200):  # a slow machine needs a while to begin
        monkeypatch.setattr(gpu_tests, "SECONDS", seconds)
        log = Log()
        with contextlib.suppress(gpu_tests.TestRunError):
            (row,) = list(gpu_tests.test_rows(log))
        if "test_d" in log.notes[-1]:
            break
    assert not row.passed
    assert math.isnan(row.value)
    assert row.detail == f"1 passed, 1 skipped, then did not end within {seconds} s"
    assert "test_d" in log.notes[-1]


def test_lines_of_pytest_are_counted() -> None:
    text = (
        "t.py::test_a[x y] PASSED      [ 10%]\nt.py::test_b FAILED\n"
        "t.py::test_c ERROR   [ 30%]\nt.py::test_d SKIPPED (no)  [ 40%]\nt.py::test_e \n"
    )
    assert gpu_tests.read_lines(text) == gpu_tests.Counts(4, 2, 1)


@pytest.mark.parametrize(
    ("body", "seconds", "message"),
    [
        ("def test_a(): pytest.skip('no CUDA device')", 600, "no test passed"),
        ("import nothing_of_that_name", 600, "nothing_of_that_name"),
        ("def test_a(): import time; time.sleep(600)", 2, "no test passed"),
        ("def test_a(): import os; os._exit(9)", 600, "exit status 9"),
    ],
)
def test_a_run_without_a_result_is_an_error(
    body: str, seconds: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tests, "TESTS", make_tests(tmp_path / "t", body))
    monkeypatch.setattr(gpu_tests, "SECONDS", seconds)
    with pytest.raises(gpu_tests.TestRunError, match=message):
        list(gpu_tests.test_rows(Log()))
