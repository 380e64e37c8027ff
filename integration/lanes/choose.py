# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: with `--lane landing`, the tests run that the change concerns, and the run's
last lines name all others."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest

from integration.lanes.landing import Lane, Rules, left_out

_SENT = "flexkv-lane"
LANE = pytest.StashKey[Lane]()
"""The lane of a run."""

UNFIT = pytest.StashKey[list[str]]()
"""Patterns of nightly tests that fit none of the tests that were collected from their files."""

_LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lane",
        choices=("all", "landing"),
        default="all",
        help="the tests that run: all, or those that the change concerns",
    )


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.stash[LANE] = Lane.from_plain(worker[_SENT])
    elif config.getoption("--lane") == "landing":
        config.stash[LANE] = Lane.of_landing()
    else:
        config.stash[LANE] = Lane("--lane all")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput[_SENT] = node.config.stash[LANE].to_plain()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lane = config.stash[LANE]
    config.stash[UNFIT] = Rules.read().unfit([*map(_id_of, items)])
    dropped = [item for item in items if lane.leaves_out(_id_of(item))]
    if dropped:
        items[:] = [item for item in items if not lane.leaves_out(_id_of(item))]
        config.hook.pytest_deselected(items=dropped)
    said = [*left_out([*map(_id_of, dropped)], map(_id_of, items))]
    config.stash[_LEFT_OUT] = said
    if hasattr(config, "workeroutput"):
        config.workeroutput[_SENT] = said


def _id_of(item: pytest.Item) -> str:
    """A test's id. pytest-xdist appends the test's group to it."""
    return re.sub(r"@[^\]]*$", "", item.nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    said = getattr(node, "workeroutput", {}).get(_SENT)
    if said is not None:
        node.config.stash[_LEFT_OUT] = said


@pytest.hookimpl(wrapper=True, tryfirst=True)  # behind all other sections
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None]:
    yield
    if config.getoption("--lane") != "landing":
        return
    if whole := config.stash[LANE].whole:
        terminalreporter.section("all tests ran")
        terminalreporter.write_line(whole)
    elif lines := config.stash.get(_LEFT_OUT, []):
        terminalreporter.section("left out of this landing; `nox -s tests` runs all")
        terminalreporter.write_line("\n".join(lines))
