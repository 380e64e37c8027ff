# SPDX-License-Identifier: Apache-2.0
"""Turns the times of a trace into seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime

from flexkv.plan.fields import LineError, show

AUTO = "auto"
SECONDS, MILLISECONDS = "s", "ms"
UNITS = {SECONDS: 1.0, MILLISECONDS: 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of each unit of time."""

_HOUR_SECONDS = 3600.0
_SINCE_1970 = ((1e17, "ns"), (1e14, "us"), (1e11, MILLISECONDS), (1e9, SECONDS))
"""Times of the years 2001 to 5138, since 1970, are at least this large in each unit."""


class Clock:
    """Reads times of one unit.

    Args:
        unit: one of `UNITS`, or `AUTO`: the unit in which the trace's first time lies between 2001
            and 5138, else `usual`.
        usual: the unit of the format, for times since the beginning of the trace.
    """

    def __init__(self, unit: str, usual: str) -> None:
        self._unit = None if unit == AUTO else unit
        self._usual = usual

    def seconds(self, line: Mapping[str, object], field: str) -> float:
        """Read a time: a number, also as text, or a date as 2026-01-31T12:00:00.

        Raises:
            LineError: the field is missing or has another value.
        """
        value = line.get(field)
        if isinstance(value, str):
            when = _date(value)
            if when is not None:
                return when
        found = _number(value)
        if found is None:
            raise LineError(field, show(value), "a number of at least 0, or a date")
        if self._unit is None:
            since = (unit for least, unit in _SINCE_1970 if found >= least)
            self._unit = next(since, self._usual)
        return found * UNITS[self._unit]

    def duration(self, line: Mapping[str, object], field: str) -> float:
        """Read a duration, in seconds, in the unit of the times so far.

        Raises:
            LineError: the field is missing or has another value.
        """
        found = _number(line.get(field))
        if found is None:
            raise LineError(field, show(line.get(field)), "a number of at least 0")
        return found * UNITS[self._unit or self._usual]


class Starts:
    """Makes starts, at equal distances, of sessions of which a trace names the times within only.

    Args:
        sessions_per_hour: the number of sessions that start in an hour; None if the user named
            none.

    Attributes:
        count: the number of starts made so far.
    """

    def __init__(self, sessions_per_hour: float | None) -> None:
        self._rate = sessions_per_hour
        self.count = 0

    def next(self) -> float:
        """The start of the next session, in seconds.

        Raises:
            LineError: the user named no rate.
        """
        if self._rate is None:
            raise LineError(
                "the start of the session", "missing", "a trace with it, or --sessions-per-hour"
            )
        start = self.count * _HOUR_SECONDS / self._rate
        self.count += 1
        return start


def _date(text: str) -> float | None:
    if "-" not in text:
        return None  # fromisoformat takes a number of eight digits for a day
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if found >= 0 and math.isfinite(found) else None
