# SPDX-License-Identifier: Apache-2.0
"""The rows of the tests that need a GPU, made from tests that need none."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest

from integration.bench.rows import Goal, Row
from integration.gpu import gpu_tests
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


def fake_sanitizer(folder: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A compute-sanitizer on the PATH that runs the tests and then prints `end`."""
    fake = folder / "compute-sanitizer"
    fake.write_text(f'#!/bin/sh\nshift 4\n"$@"\n{end}\n')
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(gpu_tests, "TESTS", make_tests(folder / "t", "def test_a(): pass"))


def test_a_sanitizer_is_used_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = 'echo "========= ERROR SUMMARY: 4$PYTORCH_NO_CUDA_MEMORY_CACHING errors"'
    fake_sanitizer(tmp_path, monkeypatch, summary)
    (row,) = list(gpu_tests.sanitizer_rows(Log()))
    assert (row.value, row.passed) == (41, False)
    assert row.detail == "1 passed, 0 failed, 0 skipped"


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
    (row,) = list(gpu_tests.sanitizer_rows(log))
    assert not row.passed
    assert row.detail == "compute-sanitizer printed no summary:"
    assert len(log.notes) == 1


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
