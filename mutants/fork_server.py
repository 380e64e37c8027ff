# SPDX-License-Identifier: Apache-2.0
"""Runs pytest in forks of a process that has imported what takes long: pytest, torch, vLLM.

`python -m mutants.fork_server` reads one order a line (`Order` as JSON) and answers each with one
line (`Outcome` as JSON). It imports nothing of FlexKV, so that each fork imports what is in the
files then. `--vllm` imports vLLM and torch too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import pytest

_ALWAYS = ("pytest", "_pytest.assertion.rewrite", "hypothesis", "_hypothesis_pytestplugin", "numpy")
_VLLM = (
    "torch",
    "vllm",
    "vllm.engine.arg_utils",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
)
_OURS = ("flexkv", "flexkv_vllm", "flexkv_sglang", "flexkv_kernels")
_TAIL_CHARACTERS = 3000


class Ending(enum.Enum):
    """How a run of tests ended."""

    PASSED = "passed"
    FAILED = "failed"
    """A test failed, or the process was ended by a signal."""
    TIMED_OUT = "timed out"
    BROKEN = "broken"
    """No verdict: tests that cannot be collected, or none that ran."""


@dataclass(frozen=True, slots=True)
class Order:
    """Run `tests`, up to the first that fails unless `all_tests`, for `limit` seconds at most.

    temporary: the tests' own folder, emptied first. log: file for all that they print.
    """

    tests: list[str]
    all_tests: bool
    limit: float
    temporary: str
    log: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    reason: the first test that failed, or what else ended the run. passed: the tests that passed,
    and seconds of each. failed: those that failed.
    """

    ending: Ending
    seconds: float
    reason: str = ""
    passed: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "ending": self.ending.value})

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        values = json.loads(text)
        return cls(**{**values, "ending": Ending(values["ending"])})


class Witness:
    """A plugin of pytest: which tests passed, in how many seconds, and which failed."""

    def __init__(self) -> None:
        self.passed: dict[str, float] = {}
        self.failed: list[str] = []
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if report.failed:
            self.failed.append(test)
            self.passed.pop(test, None)
        elif report.passed and report.when == "call":
            self.passed[test] = self._seconds[test]


def main() -> None:
    """Answers orders until its standard input ends."""
    # What modules print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for module in (*_ALWAYS, *(_VLLM if "--vllm" in sys.argv else ())):
        importlib.import_module(module)
    if early := [name for name in _OURS if name in sys.modules]:
        raise RuntimeError(f"{', '.join(early)} must not be imported before the tests")
    for line in sys.stdin:
        print(run(Order(**json.loads(line))).to_json(), file=answers, flush=True)


def run(order: Order) -> Outcome:
    """Runs the tests in a fork. All processes of its group end with it."""
    verdict = Path(order.log).with_suffix(".verdict")
    verdict.unlink(missing_ok=True)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _test(order, verdict)
    try:
        in_time = _wait(child, order.limit)
    finally:
        # The child's number is not given away before `waitpid`.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seconds = time.monotonic() - began
    if not in_time:
        return Outcome(Ending.TIMED_OUT, seconds, f"not finished after {order.limit:.0f} s")
    if not verdict.is_file():
        return Outcome(Ending.FAILED, seconds, f"the process ended with status {status}")
    code, passed, failed = json.loads(verdict.read_text(encoding="utf-8"))
    if code == 0 and passed:
        return Outcome(Ending.PASSED, seconds, passed=passed)
    if code == 1 and failed:
        return Outcome(Ending.FAILED, seconds, failed[0], passed, failed)
    reason = "all its tests are skipped here" if code == 0 else f"pytest ended with status {code}"
    return Outcome(Ending.BROKEN, seconds, f"{reason}\n{_tail(order.log)}")


def _test(order: Order, verdict: Path) -> NoReturn:
    """In the fork: runs pytest, writes what came of it, and ends the process."""
    os.setpgrp()
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import hypothesis
    import pytest

    # The same examples each time, and no search for the smallest that fails.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", derandomize=True, phases=phases)
    hypothesis.settings.load_profile("mutants")
    witness = Witness()
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={order.temporary}"]
    options += [] if order.all_tests else ["-x"]
    code = pytest.main([*options, *order.tests], plugins=[witness])
    partial = verdict.with_suffix(".part")
    partial.write_text(json.dumps([int(code), witness.passed, witness.failed]), encoding="utf-8")
    partial.rename(verdict)
    os._exit(0)


def _wait(child: int, limit: float) -> bool:
    """Whether the process ended within `limit` seconds. It is not reaped."""
    descriptor = os.pidfd_open(child)
    try:
        return bool(select.select([descriptor], [], [], limit)[0])
    finally:
        os.close(descriptor)


def _tail(log: str) -> str:
    return Path(log).read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:].strip()


if __name__ == "__main__":
    main()
