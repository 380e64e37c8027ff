# SPDX-License-Identifier: Apache-2.0
"""Counts the faults of the campaign; the sum is in the summary of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

_INJECTED: Counter[str] = Counter()


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Callable[[int], None]:
    """Call it with the number of faults that were injected and then checked."""

    def count(number: int) -> None:
        assert number > 0, "nothing was injected"
        _INJECTED[request.node.name] += number

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _INJECTED:
        return
    terminalreporter.section("faults injected into disk stores")
    for name, number in _INJECTED.items():
        terminalreporter.write_line(f"{number:6} {name}")
    terminalreporter.write_line(f"{_INJECTED.total():6} in all")
