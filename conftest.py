# SPDX-License-Identifier: Apache-2.0
"""Names the tests under way in an interrupted run, and runs tests marked `alone` by themselves."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator

import pytest

_under_way: dict[str, None] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """While a test marked `alone` runs, no other worker and no other run of this user runs a test.

    Every test holds a lock on one file: shared, or exclusive for `alone`.
    """
    path = os.path.join(tempfile.gettempdir(), f"flexkv-tests-{os.getuid()}")
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing does not suffice if a process was forked
        os.close(lock)


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
