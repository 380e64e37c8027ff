# SPDX-License-Identifier: Apache-2.0
"""The report and the command around it, on made-up results."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.bench.rows import Goal, Row
from integration.gpu import __main__ as command
from integration.gpu import gpu_tests, machine
from integration.gpu.report import markdown, write_report
from integration.gpu.results import Log, Outcome, read
from integration.gpu.section import SECONDS, SECTIONS, collect
from integration.gpu.timing import interleaved, median_row, rates, ratio_of_rates

ROOT = Path(__file__).resolve().parents[3]
MACHINE = {"device": "NVIDIA H200", "driver": "580.1", "command": "python | -m <x>"}
OURS, LARGE = ("FlexKV", [54.0, 55.0, 56.0]), ("one large copy", [50.0, 57.0, 100.0])


def outcomes() -> list[Outcome]:
    rows = [
        ratio_of_rates("load, 16 KiB pages", Goal(">=", 0.95), OURS, LARGE),
        ratio_of_rates("load, 4 KiB pages", Goal(">=", 0.99), OURS, LARGE),
        median_row("both ways", None, [80.0, 90.0, 85.5], "GB/s", "for | comparison"),
    ]
    return [Outcome("One way", rows, ["a note"]), Outcome("Tests", failure="boom\n```\nlast line")]


def test_the_page_names_device_figures_goals_and_failures() -> None:
    text = markdown(MACHINE, outcomes(), partial=False, json_name="x.json")
    assert text.startswith("# Measured on NVIDIA H200\n")
    assert "1 of 2 rows with a goal reach it. Sections that failed: Tests." in text
    assert (
        "| load, 16 KiB pages | 0.965 | >= 0.95 | ok | 55.00 GB/s ÷ 57.00 GB/s, medians of 3 |"
        in text
    )
    assert "| load, 4 KiB pages | 0.965 | >= 0.99 | **missed** |" in text
    assert "| both ways | 85.5 GB/s |  |  | for \\| comparison, median of 3 |" in text
    assert "| command | python \\| -m &lt;x> |" in text
    assert "boom\n'''\nlast line\n```" in text
    assert "- a note" in text
    assert "partial" not in text
    assert "**A partial run**" in markdown(MACHINE, outcomes(), partial=True, json_name="x.json")


def test_the_report_is_written_with_all_samples(tmp_path: Path) -> None:
    path = tmp_path / "measured" / "nvidia-h200.md"
    write_report(path, MACHINE, outcomes(), partial=False)
    assert "(nvidia-h200.json)" in path.read_text()
    document = json.loads(path.with_suffix(".json").read_text())
    assert document["machine"] == MACHINE
    assert document["passed"] is False
    first = document["sections"][0]["rows"][0]
    assert first["samples"] == {"FlexKV": OURS[1], "one large copy": LARGE[1]}
    assert (first["goal"], first["passed"]) == (">= 0.95", True)


def test_what_was_not_measured_has_no_value(tmp_path: Path) -> None:
    row = Row("errors", math.nan, "errors", Goal("<=", 0), "did not end")
    write_report(tmp_path / "a.md", MACHINE, [Outcome("Tests", [row])], partial=False)
    assert "| errors | not measured | &lt;= 0 | **missed** |" in (tmp_path / "a.md").read_text()
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["sections"][0]["rows"][0]["value"] is None


def test_outcomes_survive_their_way_between_processes(tmp_path: Path) -> None:
    for outcome in outcomes():
        outcome.write(tmp_path / "outcome")
        assert read(tmp_path / "outcome") == outcome
    (tmp_path / "outcome").write_text('{"rows": [')
    with pytest.raises(ValueError, match="Expecting"):
        read(tmp_path / "outcome")


def test_copies_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    copies = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    seconds = interleaved(copies, repeats=3)
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    assert rates([0.5, 2.0], 1_000_000_000) == [2.0, 0.5]


def test_devices_have_names_that_files_can_have() -> None:
    assert machine.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert machine.slug("../..") == "device"


def test_the_answer_of_nvidia_smi_is_read() -> None:
    answer = "580.65.06, 143771 MiB, 5, 16, 700.00 W, 1980 MHz\n"
    assert machine.parse_query(answer) == {
        "driver": "580.65.06",
        "memory": "143771 MiB",
        "link generation, most": "5",
        "link width, most": "16",
        "power limit": "700.00 W",
        "SM clock, most": "1980 MHz",
    }
    assert machine.parse_query("") == {}
    assert machine.host()["processor"]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "integration.gpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_device_there_is_one_message_and_no_report(tmp_path: Path) -> None:
    if command.no_device() is None:
        pytest.skip("there is a CUDA device")
    out = tmp_path / "report.md"
    done = run_command("--out", str(out))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("integration.gpu: error: no CUDA device to measure: ")
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "invalid choice: 'nothing'"),
        (["--out", "report.txt"], "--out is 'report.txt'; allowed: a path that ends with .md"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As if there were one; returns where reports go."""
    monkeypatch.setattr(command, "no_device", lambda: None)
    monkeypatch.setattr(command, "describe_machine", lambda _: dict(MACHINE))
    monkeypatch.setattr(command, "REPORTS", ROOT / "measured")
    monkeypatch.setattr(command, "write_report", lambda *a: written.append(a))
    written.clear()
    return tmp_path


written: list[tuple[Path, dict[str, str], list[Outcome], bool]] = []


def test_a_full_run_is_filed_under_the_device(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_section", lambda name, _: Outcome(SECTIONS[name]))
    assert command.main([]) == 0
    assert {path for path, *_ in written} == {ROOT / "measured" / "nvidia-h200.md"}
    assert [partial for *_, partial in written] == [True] * (len(SECTIONS) - 1) + [False]


@pytest.mark.parametrize("arguments", [["--quick"], ["--only", "submit", "submit"]])
def test_a_partial_run_does_not_replace_a_full_one(
    device: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = []

    def section(name: str, is_quick: bool) -> Outcome:
        quick.append(is_quick)
        return Outcome(SECTIONS[name], failure="no")

    monkeypatch.setattr(command, "run_section", section)
    assert command.main(arguments) == 1
    assert {path for path, *_ in written} == {command.PARTIAL}
    assert all(partial for *_, partial in written)
    assert len(quick) == (len(SECTIONS) if arguments == ["--quick"] else 1)
    assert all(quick) == (arguments == ["--quick"])


SECTION = """
import sys
from pathlib import Path
from integration.gpu.results import Outcome
print("one", flush=True)
{}
Outcome("Both ways at once", notes=["quick" if "--quick" in sys.argv else "all"]).write(Path({!r}))
"""


def run_script(tmp_path: Path, body: str, seconds: float = 600) -> tuple[list[str], str]:
    script = tmp_path / "script.py"
    script.write_text(SECTION.format(body, str(tmp_path / "outcome")))
    return command._run([sys.executable, "-c", f"exec(open({str(script)!r}).read())"], seconds)


def test_a_sections_lines_are_shown_and_its_end_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(tmp_path, "") == (["one"], "exit status 0")
    assert read(tmp_path / "outcome").notes == ["all"]
    lines, status = run_script(tmp_path, "raise SystemExit(3)")
    assert (lines, status) == (["one"], "exit status 3")
    assert capsys.readouterr().out == "one\none\n"


def test_a_section_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    body = (
        "import subprocess; subprocess.Popen(['sleep', '600'], stdout=sys.stdout).wait()  # holds"
    )
    for seconds in (2, 20, 200):  # a slow machine needs a while to begin
        lines, status = run_script(tmp_path, body, seconds)
        assert status == f"did not end within {seconds} s"
        if lines:
            break
    assert lines == ["one"]


def test_a_section_that_dies_is_a_failure_with_its_last_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "_run", lambda *_: (["Traceback", "no kernel"], "exit status 1"))
    outcome = command.run_section("matmul", False)
    assert outcome.failure == "exit status 1:\nTraceback\nno kernel"
    assert not outcome.passed


def test_a_section_that_is_ended_keeps_the_rows_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(arguments: list[str], _: float) -> tuple[list[str], str]:
        Outcome("Beside a matrix product", outcomes()[0].rows[:1]).write(Path(arguments[4]))
        return ["so far"], "did not end within 90 s"

    monkeypatch.setattr(command, "_run", run)
    outcome = command.run_section("matmul", False)
    assert outcome.rows == outcomes()[0].rows[:1]
    assert outcome.failure == "did not end within 90 s:\nso far"


def test_rows_before_an_error_are_kept(tmp_path: Path) -> None:
    def rows() -> Iterator[Row]:
        yield outcomes()[0].rows[0]
        raise RuntimeError("the device is lost")

    outcome = collect("One way", rows(), Log(), tmp_path / "outcome")
    assert read(tmp_path / "outcome") == outcome
    assert outcome.rows == outcomes()[0].rows[:1]
    assert outcome.failure is not None
    assert outcome.failure.endswith("RuntimeError: the device is lost\n")


def test_every_section_has_a_limit() -> None:
    assert SECONDS.keys() == SECTIONS.keys()


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
    log = Log()
    (row,) = list(gpu_tests.test_rows(True, log))
    assert row == Row(
        "GPU tests that fail",
        failed,
        "tests",
        Goal("<=", 0),
        f"{passed} passed, {body.count('skip')} skipped",
    )
    assert row.passed == (failed == 0)
    assert log.notes[-1] == "not under compute-sanitizer: a quick run"


def test_a_sanitizer_is_used_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(
        '#!/bin/sh\nshift 4\n"$@"\n'
        'echo "========= ERROR SUMMARY: 4$PYTORCH_NO_CUDA_MEMORY_CACHING errors"\n'
    )
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu_tests, "TESTS", make_tests(tmp_path / "t", "def test_a(): pass"))
    row = list(gpu_tests.test_rows(False, Log()))[1]
    assert (row.value, row.passed) == (41, False)
    assert row.detail == "1 passed, 0 failed, 0 skipped"


def test_a_sanitizer_that_breaks_off_reaches_no_goal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text('#!/bin/sh\nshift 4\nexec "$@"\n')
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu_tests, "TESTS", make_tests(tmp_path / "t", "def test_a(): pass"))
    log = Log()
    rows = list(gpu_tests.test_rows(False, log))
    assert [row.passed for row in rows] == [True, False]
    assert rows[1].detail == "compute-sanitizer printed no summary:"
    assert len(log.notes) == 1


@pytest.mark.parametrize(
    ("body", "seconds", "message"),
    [
        ("def test_a(): pytest.skip('no CUDA device')", 600, "no test passed"),
        ("import nothing_of_that_name", 600, "nothing_of_that_name"),
        ("def test_a(): import time; time.sleep(600)", 2, "did not end within 2 s"),
        ("def test_a(): import os; os._exit(9)", 600, "exit status 9"),
    ],
)
def test_a_run_without_a_result_is_an_error(
    body: str, seconds: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tests, "TESTS", make_tests(tmp_path / "t", body))
    monkeypatch.setattr(gpu_tests, "SECONDS", seconds)
    with pytest.raises(gpu_tests.TestRunError, match=message):
        list(gpu_tests.test_rows(True, Log()))
