# SPDX-License-Identifier: Apache-2.0
"""The clocks by which blocks become old, for tests that put them forward."""

from __future__ import annotations

import pytest

from flexkv.index import ages

START = 1_800_000_000.0


class AgesClock:
    """The time of day and the uptime; `day` is seconds since 1970."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.day, self.uptime = START, 5000.0
        monkeypatch.setattr(ages, "time_of_day", lambda: self.day)
        monkeypatch.setattr(ages, "uptime", lambda: self.uptime)

    def pass_by(self, seconds: float) -> None:
        """Let time pass."""
        self.day += seconds
        self.uptime += seconds
