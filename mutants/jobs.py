# SPDX-License-Identifier: Apache-2.0
"""Runs tests with and without mutants, several at a time, each job in a copy of its own."""

from __future__ import annotations

import dataclasses
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from mutants.entries import Mutant
from mutants.fork_server import Ending, Order, Outcome
from mutants.scratch import BuildError, Scratch, is_built
from mutants.verdicts import Result, Verdict, judge

_Item = TypeVar("_Item")

_ENGINE_TESTS = ("packages/flexkv-vllm/", "integration/", "compat-ci/")
"""Tests whose process needs vLLM, or does not care."""

_UNCHANGED_SECONDS = 600.0
"""Limit of tests without a mutant: only a hang reaches it."""

_SPARE_SECONDS = 60.0
_SPARE_TIMES = 5.0
"""Limit of tests with a mutant: their time without one, so many times, and the spare seconds. Tests
wait up to 60 seconds for what other processes of a busy machine do."""


class Job:
    """A copy of the tree and the processes that run tests in it. Used by one thread."""

    def __init__(self, scratch: Scratch, folder: Path, stack: ExitStack) -> None:
        self._scratch = scratch
        self._log = folder / "log"
        self._stack = stack
        self._servers: dict[bool, subprocess.Popen[str]] = {}

    def run(self, tests: Sequence[str], limit: float, mutant: Mutant | None = None) -> Outcome:
        """Runs `tests` with the mutant up to the first that fails, or all with nothing changed."""
        try:
            with self._scratch.with_fault(mutant):
                return self._ask(tests, mutant is None, limit)
        except (BuildError, ValueError) as error:
            return Outcome(Ending.BROKEN, 0.0, str(error))

    def _ask(self, tests: Sequence[str], all_tests: bool, limit: float) -> Outcome:
        server = self._server(any(test.startswith(_ENGINE_TESTS) for test in tests))
        assert server.stdin is not None
        assert server.stdout is not None
        folder = str(self._scratch.temporary)
        order = Order(list(tests), all_tests, limit, folder, str(self._log))
        print(json.dumps(dataclasses.asdict(order)), file=server.stdin, flush=True)
        if answer := server.stdout.readline():
            return Outcome.from_json(answer)
        raise RuntimeError(f"the process that runs tests ended with {server.wait()}; see above")

    def _server(self, vllm: bool) -> subprocess.Popen[str]:
        if vllm not in self._servers:
            command = [sys.executable, "-m", "mutants.fork_server", *(["--vllm"] if vllm else [])]
            server = subprocess.Popen(
                command,
                cwd=self._scratch.tree,
                env=self._scratch.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            # Leaving its context closes the input, which ends it.
            self._servers[vllm] = self._stack.enter_context(server)
        return self._servers[vllm]


def run(mutants: Sequence[Mutant], count: int, report: Callable[[Result], None]) -> list[Result]:
    """The results of all mutants, by `count` jobs; `report` is called with each as it comes.

    First all tests are run without a mutant, those of a file together: a test that does not pass
    then says nothing.
    """
    # Those of a file follow one another: what is built of it is built again for these alone.
    ordered = sorted(mutants, key=lambda mutant: (mutant.file, mutant.tests, mutant.line))
    files: dict[str, set[str]] = {}
    for test in {test for mutant in ordered for test in mutant.tests}:
        files.setdefault(_file(test), set()).add(test)
    unchanged: dict[str, Outcome] = {}
    results: list[Result] = []

    def try_file(job: Job, file: str) -> None:
        unchanged[file] = job.run(sorted(files[file]), _UNCHANGED_SECONDS)

    def try_mutant(job: Job, mutant: Mutant) -> None:
        result = _try(job, mutant, unchanged)
        results.append(result)
        report(result)

    with _jobs(min(count, len(ordered)), any(is_built(m.file) for m in ordered)) as jobs:
        _share(jobs, sorted(files), try_file)
        _share(jobs, ordered, try_mutant)
    return results


def _try(job: Job, mutant: Mutant, unchanged: Mapping[str, Outcome]) -> Result:
    """Run a mutant's tests with it, if they passed without it."""
    seconds, passing = 0.0, []
    for test in mutant.tests:
        outcome = unchanged[_file(test)]
        passed = [name for name in outcome.passed if _is_of(name, test)]
        failed = [name for name in outcome.failed if _is_of(name, test)]
        if passed and not failed:
            passing.append(test)
            seconds += sum(outcome.passed[name] for name in passed)
        elif failed or not mutant.line:
            reason = f"{failed[0]} fails" if failed else outcome.reason or f"{test} is skipped here"
            return Result(mutant, Verdict.ERROR, f"without the mutant: {reason}")
    if not passing:
        return Result(mutant, Verdict.SURVIVED, "no test runs here")
    limit = _SPARE_SECONDS + _SPARE_TIMES * seconds
    return judge(mutant, job.run(passing, limit, mutant))


def _file(test: str) -> str:
    return test.partition("::")[0]


def _is_of(name: str, test: str) -> bool:
    """Whether `test`, an argument of pytest, means the test of that name."""
    return name == test or name.startswith((f"{test}::", f"{test}[", f"{test}/"))


@contextmanager
def _jobs(count: int, builds: bool) -> Iterator[list[Job]]:
    with ExitStack() as stack:
        # A short name: tests make sockets in it, whose paths have at most 107 characters.
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mut-")))
        jobs = []
        for number in range(count):
            folder = root / str(number)
            jobs.append(Job(Scratch(folder, builds=builds), folder, stack))
        yield jobs


def _share(jobs: Sequence[Job], items: Sequence[_Item], work: Callable[[Job, _Item], None]) -> None:
    """Does `work` for all items, each job in a thread. Raises the first error of any."""
    waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    errors: list[Exception] = []

    def loop(job: Job) -> None:
        try:
            while not errors:
                work(job, waiting.get_nowait())
        except queue.Empty:
            pass
        except Exception as error:  # noqa: BLE001  (raised again in the main thread)
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
