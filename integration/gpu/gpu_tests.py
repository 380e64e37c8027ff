# SPDX-License-Identifier: Apache-2.0
"""The tests that need a GPU, as they are and, where it is installed, under compute-sanitizer."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.bench.rows import Goal, Row
from integration.gpu.results import Log

ROOT = Path(__file__).resolve().parents[2]
TESTS = "kernels/tests/gpu"

SECONDS, SANITIZER_SECONDS = 150, 180
"""After which a run is ended. Chosen so that the whole report takes less than ten minutes."""

FAULTLESS = ["-k", "not a_fault_of_the_engine"]
"""Under the sanitizer, which would count the fault that this test makes on purpose."""

NONE = Goal("<=", 0)
TAIL_LINES = 30


class TestRunError(Exception):
    """The tests did not run to their end; the message has the last lines of what they printed."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a JUnit file."""

    tests: int
    failed: int
    skipped: int

    @property
    def passed(self) -> int:
        return self.tests - self.failed - self.skipped


def test_rows(quick: bool, log: Log) -> Iterator[Row]:
    """A row of the tests and, unless `quick`, one of the sanitizer.

    Raises:
        TestRunError: no test passed, or the run without the sanitizer was broken off.
    """
    log.say(TESTS)
    counts, _ = _run_tests([], {}, SECONDS, log)
    detail = f"{counts.passed} passed, {counts.skipped} skipped"
    yield Row("GPU tests that fail", counts.failed, "tests", NONE, detail)
    sanitizer = find_sanitizer()
    if quick or sanitizer is None:
        log.note(
            f"not under compute-sanitizer: {'a quick run' if quick else 'it is not installed'}"
        )
        return
    log.say("the same under compute-sanitizer")
    yield _sanitized(sanitizer, log)


def _sanitized(sanitizer: Path, log: Log) -> Row:
    """The row of the sanitizer; NaN, which reaches no goal, if it did not come to its end."""
    # torch keeps freed memory, and packs tensors into larger pieces, where no access is out of
    # bounds.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [str(sanitizer), "--tool", "memcheck", "--error-exitcode", "0"]
    what = "errors that memcheck finds"
    try:
        counts, output = _run_tests(command, env, SANITIZER_SECONDS, log)
        errors = sanitizer_errors(output)
    except TestRunError as error:
        log.note(f"compute-sanitizer: {error}")
        return Row(what, math.nan, "errors", NONE, str(error).partition("\n")[0])
    detail = f"{counts.passed} passed, {counts.failed} failed, {counts.skipped} skipped"
    return Row(what, errors, "errors", NONE, detail)


def find_sanitizer() -> Path | None:
    """compute-sanitizer, from PATH or beside nvcc."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), f"{home}/bin"])
    found = shutil.which("compute-sanitizer", path=path)
    return None if found is None else Path(found)


def sanitizer_errors(output: str) -> int:
    """Sum over all processes; TestRunError if it never printed its summary."""
    counts = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    if not counts:
        raise TestRunError("compute-sanitizer printed no summary:\n" + _tail(output))
    return sum(map(int, counts))


def read_junit(path: Path) -> Counts:
    """The counts of all suites in a file."""
    suites = list(ET.parse(path).getroot().iter("testsuite"))

    def total(*names: str) -> int:
        return sum(int(suite.get(name, "0")) for suite in suites for name in names)

    return Counts(total("tests"), total("failures", "errors"), total("skipped"))


def _run_tests(
    prefix: Sequence[str], env: dict[str, str], seconds: int, log: Log
) -> tuple[Counts, str]:
    with tempfile.TemporaryDirectory(prefix="flexkv-gpu-tests-") as folder:
        junit = Path(folder, "junit.xml")
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
        command = [*prefix, *pytest, f"--junitxml={junit}", *(FAULTLESS if prefix else [])]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            output = error.output or b""
            text = output.decode(errors="replace") if isinstance(output, bytes) else output
            raise TestRunError(f"did not end within {seconds} s:\n{_tail(text)}") from None
        if not junit.is_file():
            raise TestRunError(f"exit status {done.returncode}:\n{_tail(done.stdout)}")
        counts = read_junit(junit)
    if counts.failed:
        log.note(_tail(done.stdout))
    if counts.passed == 0:
        raise TestRunError(f"no test passed:\n{_tail(done.stdout)}")
    return counts, done.stdout


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL_LINES:])
