# SPDX-License-Identifier: Apache-2.0
"""What pytest does with stored answers; see ``golden``.

A test that fails beside stored answers runs once more beside the real plain engine. If a real
answer differs from the stored one, the processor is another one than that which gave the stored
answers: the second result counts, and this process uses no stored answer any more. Otherwise the
first failure stands, since an unstable test must not pass by running twice.

The mode CHECK fails a test whose plain engine gives another answer than the stored one, or one that
is not stored. The mode WRITE stores all answers when pytest ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from integration.harness.golden import VARIABLE, Ledger, Mode, StandIn, same

MARKER = "golden: asks a plain engine for answers that are stored (see integration/harness/golden)"

_PROPERTY = "golden answers"
_TIMER = pytest.StashKey[Any]()
_COMPARED = (Mode.CHECK, Mode.WRITE)


class GoldenPlugin:
    """Hooks for the tests that may use stored answers: those marked ``engine``.

    It marks the tests ``golden`` whose module imports a `StandIn`.

    Args:
        ledger: of this process.
        folder: of all tests that use stored answers.
    """

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self._ledger = ledger
        self._folder = folder
        self._said: list[str] = []
        self._partial = False
        self._written: dict[str, dict[str, Any]] = {}

    # Which tests ----------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark them before pytest selects by marks."""
        for item in items:
            if isinstance(item, pytest.Function) and _imports_stand_in(item.module):
                item.add_marker("golden")

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self._partial |= any(item.get_closest_marker("golden") for item in items)

    # One test -------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run a test as pytest does, and again if its failure may be the processor's."""
        ledger = self._ledger
        if ledger.mode is Mode.OFF or not item.get_closest_marker("engine"):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        known = ledger.missing | ledger.differing
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if ledger.mode in _COMPARED:
            _fail_if(reports, _findings(ledger, known))
        elif ledger.used and any(report.failed for report in reports):
            reports = self._again(item, reports)
        elif missing := ledger.missing - known:
            _say(reports, f"not stored, asked of a plain engine: {_listed(missing)}")
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _again(self, item: pytest.Item, first: list[pytest.TestReport]) -> list[pytest.TestReport]:
        """Run a failed test beside a plain engine; the reports that count."""
        ledger = self._ledger
        ledger.live = True
        # Fixtures hold stored answers.
        end = pytest.CallInfo.from_call(
            lambda: item.session._setupstate.teardown_exact(None),
            when="teardown",
            reraise=(pytest.exit.Exception, KeyboardInterrupt),
        )
        ledger.used = False
        torn = [] if end.excinfo is None else [_report_of(item, end)]
        _restart_timer(item)
        second = runtestprotocol(item, log=False, nextitem=None)
        result = "failed" if any(report.failed for report in second) else "passed"
        if ledger.differing:
            reports = [*second, *torn]
            said = (
                f"ran again and {result} beside a plain engine, which answers otherwise on this "
                f"processor; no stored answer is used any more. {_listed(ledger.differing)}"
            )
        else:
            ledger.live = False
            reports = [*first, *torn]
            said = f"failed; ran again and {result} beside a plain engine; no stored answer differs"
        _say(reports, said)
        return reports

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        """Keep the settings of pytest-timeout: a second run has as long as the first one."""
        item.stash[_TIMER] = settings

    # The run --------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what workers of pytest-xdist say, too."""
        said = [str(value) for name, value in report.user_properties if name == _PROPERTY]
        self._said += [f"{report.nodeid} {each}" for each in said]
        self._partial |= "golden" in report.keywords and report.outcome != "passed"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._said:
            terminalreporter.section("golden answers")
            terminalreporter.write_line("\n".join(self._said))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Store the answers; a worker of pytest-xdist sends them to the process that stores."""
        if self._ledger.mode is not Mode.WRITE:
            return
        partial = self._partial or not self._all_given(session.config)
        self._take(self._ledger.asked)
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_PROPERTY] = json.dumps([partial, self._written])
        else:
            complete = not partial and exitstatus == pytest.ExitCode.OK
            self._ledger.write(self._written, complete=complete)
            if self._said:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker has ended."""
        output = getattr(node, "workeroutput", {})
        if self._ledger.mode is not Mode.WRITE:
            return
        partial, asked = json.loads(output.get(_PROPERTY, "[true, {}]"))
        self._partial |= partial
        self._take(asked)

    def _take(self, asked: dict[str, dict[str, Any]]) -> None:
        for book, answers in asked.items():
            written = self._written.setdefault(book, {})
            for key, answer in answers.items():
                if not same(written.setdefault(key, answer), answer):
                    self._said.append(f"two workers got different answers: {book} {key}")

    def _all_given(self, config: pytest.Config) -> bool:
        """Whether the command line names the whole folder."""
        start = config.invocation_params.dir
        paths = [(start / argument).resolve() for argument in config.args]
        return any(self._folder.is_relative_to(path) for path in paths)


def _imports_stand_in(module: object) -> bool:
    return any(
        isinstance(value, type) and issubclass(value, StandIn) for value in vars(module).values()
    )


def _findings(ledger: Ledger, known: set[str]) -> str:
    differing, missing = ledger.differing - known, ledger.missing - known
    said = [f"another answer than before: {_listed(differing)}"] if differing else []
    if missing:
        said.append(f"not stored: {_listed(missing)}")
    if said:
        said.append(f"If this is right, {VARIABLE}={Mode.WRITE.value} stores the answers.")
    return ". ".join(said)


def _fail_if(reports: list[pytest.TestReport], findings: str) -> None:
    if not findings:
        return
    _say(reports, findings)
    if not any(report.failed for report in reports):
        report = next((each for each in reports if each.when == "call"), reports[0])
        report.outcome, report.longrepr = "failed", findings


def _say(reports: list[pytest.TestReport], text: str) -> None:
    reports[-1].user_properties.append((_PROPERTY, text))


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys))


def _report_of(item: pytest.Item, call: pytest.CallInfo[Any]) -> pytest.TestReport:
    report: pytest.TestReport = item.ihook.pytest_runtest_makereport(item=item, call=call)
    return report


def _restart_timer(item: pytest.Item) -> None:
    if (settings := item.stash.get(_TIMER, None)) is not None:
        item.config.hook.pytest_timeout_cancel_timer(item=item)
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)
