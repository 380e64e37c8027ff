# SPDX-License-Identifier: Apache-2.0
"""Which tests were under way when a run was interrupted: one of them may hang."""

from __future__ import annotations

import pytest

_under_way: dict[str, None] = {}


def pytest_runtest_logstart(nodeid: str) -> None:
    """Also called for the tests of pytest-xdist's workers."""
    _under_way[nodeid] = None


def pytest_runtest_logfinish(nodeid: str) -> None:
    _under_way.pop(nodeid, None)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: pytest.ExitCode
) -> None:
    if exitstatus == pytest.ExitCode.INTERRUPTED and _under_way:
        terminalreporter.section("under way when interrupted")
        terminalreporter.write_line("\n".join(_under_way))
