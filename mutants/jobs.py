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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from mutants.entries import Mutant
from mutants.fork_server import Ending, Order, Outcome
from mutants.scratch import BuildError, Scratch, is_built
from mutants.verdicts import Result, Verdict, judge

Tests = tuple[str, ...]
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

    def run(self, tests: Tests, limit: float, mutant: Mutant | None = None) -> Outcome:
        """Runs `tests` with the mutant, or with nothing changed."""
        try:
            with self._scratch.with_fault(mutant):
                return self._ask(tests, limit)
        except (BuildError, ValueError) as error:
            return Outcome(Ending.BROKEN, 0.0, str(error))

    def _ask(self, tests: Tests, limit: float) -> Outcome:
        server = self._server(any(test.startswith(_ENGINE_TESTS) for test in tests))
        assert server.stdin is not None
        assert server.stdout is not None
        order = Order(list(tests), limit, str(self._scratch.temporary), str(self._log))
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

    First each set of tests is run without a mutant: one that does not pass then says nothing.
    """
    # Those that share what a process has to import, or to build, follow one another.
    ordered = sorted(mutants, key=lambda m: (m.tests, m.file))
    results: list[Result] = []
    with _jobs(min(count, len(ordered)), any(is_built(m.file) for m in ordered)) as jobs:
        sets = sorted({mutant.tests for mutant in ordered})
        unchanged: dict[Tests, Outcome] = {}
        _share(jobs, sets, lambda job, t: unchanged.update({t: job.run(t, _UNCHANGED_SECONDS)}))

        def attack(job: Job, mutant: Mutant) -> None:
            result = _attack(job, mutant, unchanged[mutant.tests])
            results.append(result)
            report(result)

        _share(jobs, ordered, attack)
    return results


def _attack(job: Job, mutant: Mutant, unchanged: Outcome) -> Result:
    if unchanged.ending is not Ending.PASSED:
        reason = f"without the mutant: {unchanged.reason}"
        return Result(mutant, Verdict.ERROR, reason, unchanged.seconds)
    limit = _SPARE_SECONDS + _SPARE_TIMES * unchanged.seconds
    return judge(mutant, job.run(mutant.tests, limit, mutant))


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
