# SPDX-License-Identifier: Apache-2.0
"""Time, for tests of what gives up after a time: a busy machine stands still for seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from disk_blocks import DEADLINE

from flexkv import session
from flexkv.tiers.disk import drive
from flexkv.transfer import fetch, link


@pytest.fixture(scope="session", autouse=True)
def _patience() -> Iterator[None]:
    """What is slow is not lost, unless a test says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drive, "CLOSE_SECONDS", DEADLINE)
        patch.setattr(session, "_GREETING_SECONDS", DEADLINE)
        yield


class Clock:
    """The clock of what waits for disks; tests put it forward instead of waiting."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def skip(self, seconds: float) -> None:
        """Let time pass. What runs at this moment began long ago."""
        self._ahead += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (fetch, link):
        monkeypatch.setattr(module, "time", made)
    return made
