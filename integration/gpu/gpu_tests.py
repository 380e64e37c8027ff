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

SECONDS = 210
"""After which a run is ended: less than its section may take."""

SANITIZER_SECONDS = 200
"""The same for a part of those under the sanitizer, so that several fit into ten minutes."""

EXEMPT = ("a_fault_of_the_engine", "beside_the_steps")
"""Not under the sanitizer, which would count the fault that the first test makes on purpose, and
may run the kernels of the second one after the other."""


@dataclass(frozen=True, slots=True)
class SanitizerPart:
    """Tests that run under a tool of compute-sanitizer in one go.

    Attributes:
        tool: "memcheck", "racecheck" or "synccheck".
        name: what a reader of the report sees.
        every: words that must all be in the name of a test.
        any_of: words of which one must be in it; none: no matter.
        without: words that must not be in it.
    """

    tool: str
    name: str
    every: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        return f"{self.tool}, {self.name}"

    @property
    def selection(self) -> str:
        """As pytest takes it behind -k."""
        terms = [*self.every, *(f"not {word}" for word in (*EXEMPT, *self.without))]
        if self.any_of:
            terms.append(f"({' or '.join(self.any_of)})")
        return " and ".join(terms)


_WHOLE, _PLANES = "byte_exact", ("each_layer", "layers_at_once", "thread_blocks")
_MODELS = "layouts_of_models"
_SHORT_RUNS = ("NHD", "odd")
PARTS = (
    SanitizerPart("memcheck", "short runs", (_WHOLE,), _SHORT_RUNS),
    SanitizerPart("memcheck", "long runs", (_WHOLE,), without=_SHORT_RUNS),
    SanitizerPart("racecheck", "the bulk kernel", (_WHOLE, "TMA", "HND")),
    SanitizerPart("synccheck", "the bulk kernel", (_WHOLE, "TMA", "HND")),
    SanitizerPart("racecheck", "gather and scatter", (_WHOLE, "STAGED", "HND")),
    SanitizerPart("synccheck", "gather and scatter", (_WHOLE, "STAGED", "HND")),
    SanitizerPart("memcheck", "single layers", any_of=_PLANES),
    SanitizerPart("memcheck", "layouts of models", (_MODELS,)),
    SanitizerPart("memcheck", "order with the engine", without=(_WHOLE, _MODELS, *_PLANES)),
)
"""The parts of memcheck have every test once. The other tools look at what the threads of a block
share, for which few blocks are enough."""

NONE = Goal("<=", 0)
TAIL_LINES = 30


class TestRunError(Exception):
    """The tests did not run to their end; the message has the last lines of what they printed."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a run of tests."""

    tests: int
    failed: int
    skipped: int

    @property
    def passed(self) -> int:
        return self.tests - self.failed - self.skipped


@dataclass(frozen=True, slots=True)
class TestRun(Counts):
    """What pytest has done and printed.

    Attributes:
        cut: why it did not come to its end; None if it did.
        output: all that it printed.
    """

    __test__ = False

    cut: str | None
    output: str


def test_rows(log: Log) -> Iterator[Row]:
    """A row of the tests.

    Raises:
        TestRunError: no test passed, or the run broke off.
    """
    run = _run_tests([], {}, SECONDS, log)
    if run.passed == 0:
        raise TestRunError(f"no test passed:\n{_tail(run.output)}")
    detail = f"{run.passed} passed, {run.skipped} skipped"
    yield _row("GPU tests that fail", "tests", run, run.failed, detail)


def sanitizer_rows(log: Log) -> Iterator[Row]:
    """A row for each part of the same tests under compute-sanitizer; none, and the reason, if there
    is no sanitizer."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        log.note("compute-sanitizer is not installed: not measured")
        return
    for part in log.units(PARTS, lambda part: part.unit):
        yield from _sanitized(sanitizer, part, log)


def _sanitized(sanitizer: Path, part: SanitizerPart, log: Log) -> Iterator[Row]:
    # torch keeps freed memory, and packs tensors into larger pieces, where no access is out of
    # bounds.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [str(sanitizer), "--tool", part.tool, "--error-exitcode", "0"]
    what = f"errors that {part.tool} finds, {part.name}"
    try:
        run = _run_tests(command, env, SANITIZER_SECONDS, log, part.selection)
        if run.cut is None and run.skipped == run.tests > 0:
            log.note(f"{part.unit}: this device runs none of these {run.tests} tests")
            return
        errors = math.nan if run.cut else sanitizer_errors(run.output)
        detail = f"{run.passed} passed, {run.failed} failed, {run.skipped} skipped"
        yield _row(what, "errors", run, errors, detail)
    except TestRunError as error:
        log.note(f"compute-sanitizer, {part.unit}: {error}")
        yield Row(what, math.nan, "errors", NONE, str(error).partition("\n")[0])


def _row(what: str, unit: str, run: TestRun, value: float, detail: str) -> Row:
    """NaN, which reaches no goal, if a run was cut off; the detail says how far it came."""
    if run.cut is None:
        return Row(what, value, unit, NONE, detail)
    return Row(what, math.nan, unit, NONE, f"{detail}, then {run.cut}")


def find_sanitizer() -> Path | None:
    """compute-sanitizer, from PATH or beside nvcc."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), f"{home}/bin"])
    found = shutil.which("compute-sanitizer", path=path)
    return None if found is None else Path(found)


def sanitizer_errors(output: str) -> int:
    """Sum over all processes, of errors or of racecheck's hazards; TestRunError if it never printed
    its summary."""
    counts = re.findall(r"(?:ERROR SUMMARY: (?=\d+ error)|RACECHECK SUMMARY: )(\d+)", output)
    if not counts:
        raise TestRunError("compute-sanitizer printed no summary:\n" + _tail(output))
    return sum(map(int, counts))


def read_junit(path: Path) -> Counts:
    """The counts of all suites in a file."""
    suites = list(ET.parse(path).getroot().iter("testsuite"))

    def total(*names: str) -> int:
        return sum(int(suite.get(name, "0")) for suite in suites for name in names)

    return Counts(total("tests"), total("failures", "errors"), total("skipped"))


def read_lines(output: str) -> Counts:
    """The counts of what pytest printed, of tests that have ended, one a line."""
    ends = re.findall(r"^\S+::.* (PASSED|FAILED|ERROR|SKIPPED)", output, re.MULTILINE)
    failed = ends.count("FAILED") + ends.count("ERROR")
    return Counts(len(ends), failed, ends.count("SKIPPED"))


def _run_tests(
    prefix: Sequence[str], env: dict[str, str], seconds: int, log: Log, selection: str = ""
) -> TestRun:
    """Raises TestRunError if pytest ends without a result, or has no such test."""
    log.say(f"{TESTS} {selection}")
    with tempfile.TemporaryDirectory(prefix="flexkv-gpu-tests-") as folder:
        junit, printed = Path(folder, "junit.xml"), Path(folder, "output")
        pytest = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", TESTS]
        command = [*prefix, *pytest, f"--junitxml={junit}", "-k", selection]
        cut = status = None
        with printed.open("wb") as out:  # not a pipe, which a process that hangs would keep open
            try:
                status = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=os.environ | env,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                cut = f"did not end within {seconds} s"
        output = printed.read_text(encoding="utf-8", errors="replace")
        if cut is None and not junit.is_file():
            raise TestRunError(f"exit status {status}:\n{_tail(output)}")
        counts = read_lines(output) if cut is not None else read_junit(junit)
        if cut is None and counts.tests == 0:
            raise TestRunError(f"no such test:\n{_tail(output)}")
    if cut is not None or counts.failed:
        log.note(_tail(output))
    return TestRun(counts.tests, counts.failed, counts.skipped, cut, output)


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL_LINES:])
