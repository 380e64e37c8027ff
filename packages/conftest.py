# SPDX-License-Identifier: Apache-2.0
"""Time, for tests on a machine that others use: it stands still for seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from socketserver import BaseServer

import pytest
from hypothesis import HealthCheck, settings

from flexkv import cache, client
from flexkv.eviction import POLICIES, AnyPolicy
from flexkv.session import session_server
from flexkv.tiers import device, link, questions
from flexkv.transfer import demote, fetcher, reads, running_fetch, sources, stack
from packages import patience

# Code that has no time to keep: how long an example took says nothing. All else as the profile
# that is in force.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

PATIENCE_SECONDS = patience.PATIENCE_SECONDS


@pytest.fixture(scope="session", autouse=True)
def _patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "CLOSE_SECONDS", PATIENCE_SECONDS)
        patch.setattr(link, "PROBE_SECONDS", PATIENCE_SECONDS)
        patch.setattr(session_server, "GREETING_SECONDS", PATIENCE_SECONDS)
        # An engine's HTTP server sees `close` when it next looks: by default every 0.5 s, which is
        # longer than most tests with an engine take.
        patch.setattr(BaseServer.serve_forever, "__defaults__", (0.01,))
        yield


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """The log has the level of before the test, whatever settings the test has started with."""
    logger = logging.getLogger("flexkv")
    level = logger.level
    yield
    if logger.level != level:  # setting it visits all loggers: thousands once vLLM is imported
        logger.setLevel(level)


@pytest.fixture
def at_end() -> Iterator[ExitStack]:
    """Ends what a test has made, the last first."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def made_policies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the eviction policies that are made, in order."""
    names: list[str] = []

    def noting(name: str, make: Callable[[int], AnyPolicy]) -> Callable[[int], AnyPolicy]:
        def noted(slots: int) -> AnyPolicy:
            names.append(name)
            return make(slots)

        return noted

    for name, make in list(POLICIES.items()):
        monkeypatch.setitem(POLICIES, name, noting(name, make))
    return names


class Clock:
    """The clock of what waits for disks; tests put it forward instead of waiting."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def skip(self, seconds: float) -> None:
        """Let time pass. What runs at this moment began long ago."""
        self._ahead += seconds


class StillClock(Clock):
    """Moves only when it is put forward: a slow machine ends no pause. Not for code that waits."""

    def monotonic(self) -> float:
        return 1000.0 + self._ahead


def _give(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    modules = (cache, client, demote, fetcher, link, stack, questions, reads, running_fetch)
    for module in (*modules, sources):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return _give(Clock(), monkeypatch)


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """For tests without threads."""
    return _give(StillClock(), monkeypatch)
