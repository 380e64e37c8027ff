# SPDX-License-Identifier: Apache-2.0
"""A mutant is applied to a copy alone, and the tests' processes say truly how they ended."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from mutants import jobs
from mutants.entries import ROOT, Mutant
from mutants.fork_server import Ending, Outcome
from mutants.jobs import Job
from mutants.scratch import Scratch
from mutants.verdicts import Verdict

FILE = "packages/flexkv/src/flexkv/types/changes.py"
MUTANT = Mutant("core", "no_keys", FILE, "    if not changed:\n", "    if changed:\n", ())

TESTS = """
import os, signal, subprocess, time
import pytest
from flexkv.types.changes import Medium, changes_of

def test_keys():
    assert changes_of(Medium.HOST, {b"a": True})[0].added == [b"a"]

def test_fails():
    assert False

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_hangs():
    time.sleep(1000)

def test_leaves_a_process(tmp_path):
    sleeper = subprocess.Popen(["sleep", "1000"])
    (tmp_path / "sleeper").write_text(str(sleeper.pid))

def test_is_skipped():
    pytest.skip("nothing to test here")
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    pytest.importorskip("flexkv_kernels", reason="a copy takes the installed kernels")
    made = Scratch(tmp_path_factory.mktemp("scratch") / "0", builds=False)
    (made.tree / "test_copy.py").write_text(TESTS, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def job(scratch: Scratch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(scratch, tmp_path_factory.mktemp("job"), stack)


def _run(job: Job, test: str, mutant: Mutant | None = None, limit: float = 600.0) -> Outcome:
    return job.run((f"test_copy.py::{test}",), limit, mutant)


def test_the_copy_has_the_fault_while_its_tests_run_and_the_checkout_never(
    scratch: Scratch,
) -> None:
    original = (ROOT / FILE).read_text(encoding="utf-8")
    with scratch.with_fault(MUTANT):
        assert (scratch.tree / FILE).read_text(encoding="utf-8") == MUTANT.apply(original)
        assert (ROOT / FILE).read_text(encoding="utf-8") == original
    assert (scratch.tree / FILE).read_text(encoding="utf-8") == original


def test_each_run_imports_what_the_files_hold_then(job: Job) -> None:
    for _ in range(2):
        assert _run(job, "test_keys").ending is Ending.PASSED
        failed = _run(job, "test_keys", MUTANT)
        assert failed.ending is Ending.FAILED
        assert failed.reason == "test_copy.py::test_keys"


def test_without_a_mutant_all_tests_run(job: Job) -> None:
    outcome = job.run(("test_copy.py::test_keys", "test_copy.py::test_fails"), 600.0)
    assert list(outcome.passed) == ["test_copy.py::test_keys"]
    assert outcome.failed == ["test_copy.py::test_fails"]


def test_a_process_that_dies_has_failed(job: Job) -> None:
    died = _run(job, "test_dies")
    assert died.ending is Ending.FAILED
    assert f"-{int(signal.SIGKILL)}" in died.reason


def test_a_process_that_hangs_is_ended(job: Job) -> None:
    assert _run(job, "test_hangs", limit=1.0).ending is Ending.TIMED_OUT


def test_what_tests_leave_running_ends_with_them(job: Job, scratch: Scratch) -> None:
    assert _run(job, "test_leaves_a_process").ending is Ending.PASSED
    pid = int(next(scratch.temporary.rglob("sleeper")).read_text(encoding="utf-8"))
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([process], [], [], 60.0)[0]
    os.close(process)


def test_tests_that_do_not_run_give_no_verdict(job: Job) -> None:
    skipped = _run(job, "test_is_skipped")
    assert skipped.ending is Ending.BROKEN
    assert "skipped here" in skipped.reason
    missing = _run(job, "test_that_is_missing")
    assert missing.ending is Ending.BROKEN


def test_a_mutant_that_does_not_fit_gives_no_verdict(job: Job) -> None:
    lost = Mutant("core", "lost", FILE, "what is not there", "", ())
    assert _run(job, "test_keys", lost).ending is Ending.BROKEN


@pytest.mark.parametrize(("line", "verdict"), [(0, Verdict.ERROR), (1, Verdict.SURVIVED)])
def test_skipped_tests_are_an_error_of_a_list_and_notice_no_generated_mutant(
    job: Job, line: int, verdict: Verdict
) -> None:
    test = "test_copy.py::test_is_skipped"
    unchanged = {"test_copy.py": job.run((test,), 600.0)}
    mutant = dataclasses.replace(MUTANT, tests=(test,), line=line)
    assert jobs._try(job, mutant, unchanged).verdict is verdict
