# SPDX-License-Identifier: Apache-2.0
"""The report says what the runs found, and the page what the report says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from compat_ci import __main__ as command
from compat_ci import code, matrix, report, results
from compat_ci.matrix import Level
from compat_ci.results import Outcome, Table

ENGINES = matrix.load()
NOW = code.digest(ENGINES["vllm"])
GOOD = Outcome(True, "7 tests", "2026-01-02", "0123abcd", NOW)
LATER = Outcome(True, "8 tests", "2026-02-03", "4567cdef", NOW)
OLDER = Outcome(True, "8 tests", "2026-02-03", "4567cdef", "another")
BAD = Outcome(False, "8 tests", "2026-02-03", "4567cdef", NOW, ["connector.py:1: `name` is gone"])


def test_the_committed_page_says_what_the_committed_report_says(tmp_path: Path) -> None:
    assert command.main(["report", "--check", "--results", str(tmp_path)]) == 0


def test_what_is_written_is_read(tmp_path: Path) -> None:
    table: Table = {"vllm": {"0.31.0": {Level.STATIC: GOOD, Level.ENGINE: BAD}}}
    results.write(tmp_path / "new" / "report.json", table)
    assert results.read(tmp_path / "new" / "report.json") == table
    assert results.read(tmp_path / "none.json") == {}


def test_higher_levels_stay_true_only_while_lower_ones_pass() -> None:
    table: Table = {"vllm": {"1": {Level.STATIC: GOOD, Level.ENGINE: GOOD}, "2": {}}}
    passed = results.merge(table, {"vllm": {"1": {Level.STATIC: LATER}}})
    assert passed["vllm"] == {"1": {Level.STATIC: LATER, Level.ENGINE: GOOD}, "2": {}}
    failed = results.merge(table, {"vllm": {"1": {Level.STATIC: BAD}}})
    assert failed["vllm"]["1"] == {Level.STATIC: BAD}


def test_the_page_has_a_row_for_each_version_and_says_what_was_not_run() -> None:
    engines = matrix.load()
    lines = report.page(engines, {"vllm": {"0.31.0": {Level.STATIC: GOOD}}}).splitlines()
    for release in engines["vllm"].releases:
        assert sum(line.startswith(f"| {release.version} |") for line in lines) == 1
    (row,) = (line for line in lines if line.startswith("| 0.31.0 |"))
    assert "| passed, 7 tests, 2026-01-02, 0123abcd | not run yet | not run yet |" in row


def test_a_result_of_other_code_is_older_and_due() -> None:
    engines = {"vllm": ENGINES["vllm"]}
    releases = ENGINES["vllm"].releases
    table: Table = {
        "vllm": {each.version: dict.fromkeys(each.level.upto(), LATER) for each in releases}
    }
    assert report.due(engines, table) == []
    assert "older*" not in report.page(engines, table).split("## vLLM")[1]
    third, second, newest = (each.version for each in releases[-3:])
    table["vllm"][third] = table["vllm"][third] | {Level.SCHEDULER: OLDER}
    table["vllm"][newest] = {Level.STATIC: LATER}
    table["vllm"][second] = table["vllm"][second] | {Level.STATIC: BAD}
    assert report.due(engines, table) == [("vllm", each) for each in (newest, second, third)]
    (row,) = (line for line in report.page(engines, table).splitlines() if f"| {third} |" in line)
    assert row.count("4567cdef, *older* |") == 1


def test_a_changed_file_changes_the_digest_of_its_engine(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    engine = dataclasses.replace(ENGINES["vllm"], concerns=(tmp_path / "adapter",))
    digests = {code.digest(engine)}
    for name, text in (("a.py", "one"), ("a.py", "two"), ("b.py", "two"), ("a.py", "")):
        (tmp_path / "adapter" / name).write_text(text)
        digests.add(code.digest(engine))
    assert len(digests) == 5
    (tmp_path / "adapter" / "a.pyc").touch()
    assert code.digest(engine) in digests


def test_a_limit_stands_on_the_page_once_and_each_row_has_its_number() -> None:
    engine = matrix.load()["vllm"]
    lines = report.page({"vllm": engine}, {}).splitlines()
    for release in engine.releases:
        (row,) = (line for line in lines if line.startswith(f"| {release.version} |"))
        numbers = row.split("|")[-2].replace(",", " ").split()
        assert [line for number in numbers for line in lines if line.startswith(f"{number}. ")] == [
            f"{number}. {text}" for number, text in zip(numbers, release.limits, strict=True)
        ]


def test_the_page_names_what_failed() -> None:
    table: Table = {"vllm": {"0.31.0": {Level.STATIC: BAD}}}
    page = report.page(matrix.load(), table)
    assert "**failed**" in page
    assert "- connector.py:1: `name` is gone\n" in page
    assert "| vllm | 0.31.0 | static | **failed** | connector.py:1" in report.summary(table)


def test_runs_are_kept_and_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "REPORT", tmp_path / "report.json")
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    runs = tmp_path / "runs"
    results.write(runs / "one.json", {"vllm": {"0.31.0": {Level.STATIC: GOOD}}})
    results.write(runs / "two.json", {"vllm": {"99.0": {Level.STATIC: BAD}}})
    assert command.main(["report", "--check", "--results", str(runs)]) == 1
    assert command.main(["report", "--write", "--results", str(runs)]) == 0
    assert command.main(["report", "--check", "--results", str(runs)]) == 0
    # A version that versions.toml does not have is in a day's summary, and not in the report.
    assert results.read(command.REPORT) == {"vllm": {"0.31.0": {Level.STATIC: GOOD}}}
    capsys.readouterr()
    assert command.main(["summary", "--results", str(runs)]) == 0
    assert "| vllm | 99.0 | static | **failed** |" in capsys.readouterr().out
