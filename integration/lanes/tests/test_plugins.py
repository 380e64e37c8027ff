# SPDX-License-Identifier: Apache-2.0
"""The plugins of pytest that choose and measure tests, in runs of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from integration.harness import starts
from integration.lanes import measure
from integration.lanes.measure import cpu_seconds
from integration.lanes.record import FileTimes, Record

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from integration.lanes import change, choose, landing, measure, record
from integration.lanes.landing import Lane, Nightly

pytest_plugins = ["integration.lanes.choose", "integration.lanes.measure"]
NIGHTLY = Nightly("test_part.py::*", ("*_smoke",), ())
WHOLE = {whole!r}
LANE = Lane(WHOLE) if WHOLE else Lane("", frozenset({{"test_left.py"}}), (NIGHTLY,))
Lane.of_landing = classmethod(lambda cls: LANE)
measure.head_if_clean = lambda: "the commit"
"""
BUSY = """
import subprocess, sys

LOOP = "import time; end = time.process_time() + 1\\nwhile time.process_time() < end: pass"

def test_child():
    subprocess.run([sys.executable, "-c", LOOP], check=True)
"""
PART = """
import pytest

# Two engines, of which pytest-xdist appends the names to the ids of the tests.
@pytest.mark.xdist_group("test_part.py:engine 1")
def test_smoke(): pass

@pytest.mark.xdist_group("test_part.py:engine 2")
def test_part(): pass
"""
STARTS = """
from integration.harness import starts

def test_one(): starts.note("vLLM", with_flexkv=True)
def test_two():
    starts.note("vLLM", with_flexkv=True)
    starts.note("SGLang", with_flexkv=False)
"""
WORKERS = pytest.mark.parametrize("workers", ["0", "2"])


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of tests whose landing leaves out a file and a part of another one."""
    monkeypatch.delenv(starts.VARIABLE, raising=False)
    pytester.makeini(f"[pytest]\npythonpath = {Path(__file__).parents[3]}\ntestpaths = .")
    pytester.makeconftest(CONFTEST.format(whole=""))
    pytester.makepyfile(
        test_busy="def test_child(): pass",
        test_starts=STARTS,
        test_left="def test_left(): pass\ndef test_left_too(): pass",
        test_part=PART,
    )
    return pytester


def outcome(run: pytest.Pytester, *options: str) -> pytest.RunResult:
    return run.runpytest_subprocess("--times", "times.json", "--dist", "loadgroup", *options)


@WORKERS
def test_a_run_writes_what_its_tests_took(run: pytest.Pytester, workers: str) -> None:
    run.makepyfile(test_busy=BUSY)
    outcome(run, "-n", workers).assert_outcomes(passed=7)
    found = Record.read(run.path / "times.json")
    assert found.workers == max(1, int(workers))
    assert {name: each.tests for name, each in found.files.items()} == {
        "test_busy.py": 1,
        "test_starts.py": 2,
        "test_left.py": 2,
        "test_part.py": 2,
    }
    assert found.files["test_busy.py"].cpu >= 1.0
    assert found.files["test_part.py"].cpu < 1.0
    assert found.wall >= found.files["test_busy.py"].seconds >= 1.0
    assert found.files["test_starts.py"].starts == {"vLLM": 2, "SGLang without FlexKV": 1}
    assert found.files["test_busy.py"].starts == {}


@WORKERS
def test_a_landing_leaves_out_tests_and_names_them_last(run: pytest.Pytester, workers: str) -> None:
    result = outcome(run, "-n", workers, "--lane", "landing", "-ra")
    result.assert_outcomes(passed=4, deselected=0 if int(workers) else 3)
    assert result.outlines[-3:-1] == ["test_left.py (2 tests)", "test_part.py::test_part"]
    assert "passed" in result.outlines[-1]
    assert Record.read(run.path / "times.json").whole == ""


@WORKERS
def test_a_run_of_all_tests_names_its_commit(run: pytest.Pytester, workers: str) -> None:
    outcome(run, "-n", workers)
    assert Record.read(run.path / "times.json").whole == "the commit"
    run.makeconftest(CONFTEST.format(whole="the build has changed"))
    result = outcome(run, "-n", workers, "--lane", "landing")
    result.assert_outcomes(passed=7)
    assert result.outlines[-2] == "the build has changed"
    assert Record.read(run.path / "times.json").whole == "the commit"


@pytest.mark.parametrize(
    "options", [["-k", "child"], ["test_busy.py"], ["-m", "not x"], ["--deselect", "test_part.py"]]
)
def test_a_run_of_some_tests_names_no_commit(run: pytest.Pytester, options: list[str]) -> None:
    outcome(run, *options)
    assert Record.read(run.path / "times.json").whole == ""


@WORKERS
@pytest.mark.parametrize("mended", [True, False])
def test_a_run_has_passed_once_its_failures_pass(
    run: pytest.Pytester, workers: str, mended: bool
) -> None:
    run.makepyfile(test_wrong="from pathlib import Path\ndef test(): assert Path('good').exists()")
    outcome(run, "-n", workers)
    first = Record.read(run.path / "times.json")
    assert (first.whole, first.failed) == ("", "the commit")
    if mended:
        (run.path / "good").touch()
    outcome(run, "--last-failed", "-n", "0")
    second = Record.read(run.path / "times.json")
    assert (second.whole, second.files) == ("the commit" if mended else "", first.files)


@pytest.mark.parametrize("later", ["another commit", "a part of the failures"])
def test_a_run_has_not_passed_for_what_passes_later(run: pytest.Pytester, later: str) -> None:
    wrong = "from pathlib import Path\ndef test(): assert Path('good').exists()"
    run.makepyfile(test_wrong=wrong, test_too=wrong)
    outcome(run)
    (run.path / "good").touch()
    if later == "another commit":
        run.makeconftest(CONFTEST.format(whole="").replace("the commit", later))
        outcome(run, "--last-failed")
    else:
        outcome(run, "--last-failed", "test_too.py").assert_outcomes(passed=1)
    found = Record.read(run.path / "times.json")
    assert (found.whole, found.failed) == ("", "the commit")


def test_the_wait_for_a_test_that_runs_alone_is_no_time_of_the_test() -> None:
    """The plugin's hook runs within those that wait."""
    worker = measure._Worker.pytest_runtest_protocol
    options = worker.pytest_impl  # type: ignore[attr-defined]
    assert options["trylast"]
    assert options["wrapper"]


def test_processor_time_is_that_of_children_under_way_too() -> None:
    before = cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            while cpu_seconds() < before + 0.5:
                time.sleep(0.05)
        finally:
            busy.kill()
    assert cpu_seconds() >= before + 0.5, "the parent has the time of a child that has ended"


def test_times_add_up() -> None:
    one = FileTimes(1.0, 0.5, 1, 0.1, {"vLLM": 1})
    assert one + FileTimes(2.0, 0.5, 2, 0.0, {"vLLM": 1, "SGLang": 1}) == FileTimes(
        3.0, 1.0, 3, 0.1, {"vLLM": 2, "SGLang": 1}
    )
