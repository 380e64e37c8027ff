# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: with `--times FILE`, a run writes what its tests took, and prints the most
costly files and what differs from the committed record."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.harness import starts
from integration.lanes.change import head_if_clean
from integration.lanes.choose import LANE
from integration.lanes.record import FileTimes, Record, report

_TICKS = os.sysconf("SC_CLK_TCK")
_SENT = "flexkv-times"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", metavar="FILE", type=Path, help="write what the tests took")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--times")
    if path is None:
        return
    if config.getoption("lf", False):
        config.pluginmanager.register(_SecondRun(config, path))
        return
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Run(config, path))
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Worker(config))


class _Worker:
    """Measures the tests of one process. What a file's tests share counts for the file whose test
    first needed it, and what an engine does between its tests for the file that runs then."""

    def __init__(self, config: pytest.Config) -> None:
        self.files: dict[str, FileTimes] = {}
        self.collecting = 0.0
        self.ended = self._begun = time.monotonic()
        self._config = config
        self._cpu = 0.0
        self._starts = 0
        descriptor, self._noted = tempfile.mkstemp(prefix="flexkv-starts-")
        os.close(descriptor)
        config.add_cleanup(lambda: os.unlink(self._noted))
        os.environ[starts.VARIABLE] = self._noted

    def pytest_collection_finish(self) -> None:
        self.ended = time.monotonic()
        self.collecting = self.ended - self._begun
        self._cpu = cpu_seconds()

    @pytest.hookimpl(wrapper=True, trylast=True)  # within the lock of `alone`
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        begun = time.monotonic()
        waited = begun - self.ended
        try:
            return (yield)
        finally:
            self.ended = time.monotonic()
            file = item.nodeid.partition("::")[0]
            took = FileTimes(self.ended - begun, 0.0, 1, waited)
            if nextitem is None or nextitem.path != item.path:
                took += self._since_last_file()
            self.files[file] = self.files.get(file, FileTimes(0.0, 0.0, 0)) + took

    def pytest_sessionfinish(self) -> None:
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[_SENT] = self.said()

    def said(self) -> dict[str, Any]:
        """For the run that this process is a worker of."""
        files = {
            name: [each.seconds, each.cpu, each.tests, each.waited, dict(each.starts)]
            for name, each in self.files.items()
        }
        return {"files": files, "collecting": self.collecting, "ended": self.ended}

    def _since_last_file(self) -> FileTimes:
        before, self._cpu = self._cpu, cpu_seconds()
        cpu = max(0.0, self._cpu - before)  # a process that left the tree took its seconds along
        noted = Path(self._noted).read_text("utf-8").splitlines()
        seen, self._starts = self._starts, len(noted)
        return FileTimes(0.0, cpu, 0, 0.0, dict(Counter(noted[seen:])))


class _Run:
    """Gathers what all workers measured."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path
        self._begun = time.monotonic()
        self._commit = head_if_clean()
        self._said: list[dict[str, Any]] = []
        self._run = Record()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if (said := getattr(node, "workeroutput", {}).get(_SENT)) is not None:
            self._said.append(said)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        for plugin in self._config.pluginmanager.get_plugins():
            if isinstance(plugin, _Worker):
                self._said.append(plugin.said())
        files: dict[str, FileTimes] = {}
        for said in self._said:
            for name, each in said["files"].items():
                files[name] = files.get(name, FileTimes(0.0, 0.0, 0)) + FileTimes(*each)
        ends = [said["ended"] for said in self._said]
        commit = self._commit if self._ran_all() else ""
        self._run = Record(
            commit if exitstatus == pytest.ExitCode.OK else "",
            commit if exitstatus == pytest.ExitCode.TESTS_FAILED else "",
            max(1, len(self._said)),
            time.monotonic() - self._begun,
            max((said["collecting"] for said in self._said), default=0.0),
            sum(max(ends) - end for end in ends),
            files,
        )
        self._run.write(self._path)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._run.files:
            terminalreporter.section("times")
            for line in report(self._run, Record.committed()):
                terminalreporter.write_line(line)

    def _ran_all(self) -> bool:
        """Whether no option, path or lane left out a test."""
        whole = bool(self._config.stash[LANE].whole)
        return whole and not self._config.option.lf and not _chooses(self._config)


class _SecondRun:
    """The tests that failed run once more, alone: their times say nothing. If all of them pass on
    the commit of the first run, that run has passed."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._path = path
        self._commit = "" if _chooses(config) else head_if_clean()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.OK or not self._path.is_file():
            return
        first = Record.read(self._path)
        if first.failed and first.failed == self._commit:
            dataclasses.replace(first, whole=first.failed, failed="").write(self._path)


def _chooses(config: pytest.Config) -> bool:
    """Whether an option or a path chooses some of the tests."""
    option = config.option
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return named or any((option.markexpr, option.keyword, option.deselect, option.ignore))


def cpu_seconds() -> float:
    """Processor time of this process and of all below it. The time of a process that has ended is
    its parent's, once that has waited for it."""
    children: dict[int, list[int]] = {}
    spent: dict[int, int] = {}
    for pid, fields in _processes():
        children.setdefault(int(fields[1]), []).append(pid)
        spent[pid] = sum(map(int, fields[11:15]))  # of proc(5): utime, stime, cutime, cstime
    waiting, total = [os.getpid()], 0
    while waiting:
        pid = waiting.pop()
        total += spent.get(pid, 0)
        waiting += children.get(pid, ())
    return total / _TICKS


def _processes() -> Iterator[tuple[int, list[str]]]:
    """All processes, and the fields of their `/proc/PID/stat` behind the name."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                said = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has ended
            yield int(entry.name), said.rpartition(")")[2].split()
