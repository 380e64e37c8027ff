# SPDX-License-Identifier: Apache-2.0
"""Names the tests under way in an interrupted run, and runs tests marked `alone` by themselves."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator
from typing import Any

import pytest

from integration.interrupts import interrupt_at_sigterm

pytest_plugins = ["integration.lanes.choose", "integration.lanes.measure"]

_LOCK = pytest.StashKey[str]()

_under_way: dict[str, None] = {}


def pytest_configure(config: pytest.Config) -> None:
    """At SIGTERM, end the engines that tests have started, as after Ctrl-C."""
    if not hasattr(config, "workerinput"):
        interrupt_at_sigterm()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the lock of this run."""
    node.workerinput["lock"] = _lock_of(node.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """While a test marked `alone` runs, no other worker of pytest-xdist runs a test.

    Every test holds the lock of the run: shared, or exclusive for `alone`.
    """
    workers = getattr(item.config, "workerinput", None)
    if workers is None:
        return (yield)
    with open(workers["lock"], "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing does not suffice if a process was forked


def _lock_of(config: pytest.Config) -> str:
    if _LOCK not in config.stash:
        fd, config.stash[_LOCK] = tempfile.mkstemp(prefix="flexkv-tests-")
        os.close(fd)
        config.add_cleanup(lambda: os.unlink(config.stash[_LOCK]))
    return config.stash[_LOCK]


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
