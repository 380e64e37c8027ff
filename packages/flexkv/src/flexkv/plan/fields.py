# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the fields of a trace's lines, and turns its times into seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

_MOST_SHOWN = 60
"""The most characters of a value that an error prints."""
_MOST = 1 << 53
"""The largest number allowed. JSON readers may round larger ones."""

NO_JSON = "no JSON"
"""Beginning of a `LineError`'s value if the line cannot be parsed."""

AUTO = "auto"
SECONDS, MILLISECONDS = "s", "ms"
UNITS = {SECONDS: 1.0, MILLISECONDS: 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of each unit of time."""

_HOUR_SECONDS = 3600.0
_SINCE_1970 = ((1e17, "ns"), (1e14, "us"), (1e11, MILLISECONDS), (1e9, SECONDS))
"""Times of the years 2001 to 5138, since 1970, are at least this large in each unit."""


class LineError(ValueError):
    """A line violates its format: a field has a value, as `show` makes its text, that is not
    allowed. `is_cut` says whether the line may be the beginning of one whose end is missing."""

    def __init__(self, field: str, shown: str, allowed: str) -> None:
        self.is_cut = shown.startswith(NO_JSON)
        super().__init__(f"{field} is {shown}; allowed: {allowed}")


def json_objects(text: str) -> Iterator[dict[str, object]]:
    """Parse JSON objects that follow one another, at least one. Raises LineError if the text is
    something else, or one of the values is no JSON object."""
    decoder, place = json.JSONDecoder(), 0
    text = text.strip()
    while place < len(text):
        try:
            content, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise LineError("the line", f"{NO_JSON} ({error})", "a JSON object") from None
        if not isinstance(content, dict):
            raise LineError("the line", show(content), "a JSON object")
        yield content
        while text[place : place + 1].isspace():
            place += 1


def natural(line: Mapping[str, object], field: str, least: int = 0) -> int:
    """Read a field that is a whole number of at least `least`. Raises LineError if the field is
    missing or has another value."""
    value = line.get(field)
    if type(value) is not int or not least <= value <= _MOST:
        raise LineError(field, show(value), f"a whole number from {least} to {_MOST}")
    return value


def number(line: Mapping[str, object], field: str) -> float:
    """Read a field that is a number of at least 0. Raises LineError if the field is missing or has
    another value."""
    value = line.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise LineError(field, show(value), f"a number from 0 to {_MOST}")
    return float(value)


def show(value: object) -> str:
    """A value as errors print it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = repr(value)
    except ValueError:  # an int of thousands of digits
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class Clock:
    """Reads times of one unit: one of `UNITS`, or with `AUTO` the one in which the trace's first
    time lies between 2001 and 5138. Else the times are since the beginning of the trace, and have
    the `usual` unit of the format."""

    def __init__(self, unit: str, usual: str) -> None:
        self._unit = None if unit == AUTO else unit
        self._usual = usual

    def seconds(self, line: Mapping[str, object], field: str) -> float:
        """Read a time: a number, also as text, or a date as 2026-01-31T12:00:00. Raises LineError
        if the field is missing or has another value."""
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
        """Read a duration, in seconds, in the unit of the times so far. Raises LineError if the
        field is missing or has another value."""
        found = _number(line.get(field))
        if found is None:
            raise LineError(field, show(line.get(field)), "a number of at least 0")
        return found * UNITS[self._unit or self._usual]


class Starts:
    """Makes starts, at equal distances, of sessions of which a trace names the times within only.
    The user has named how many start in an hour, or None. `count` have been made so far."""

    def __init__(self, sessions_per_hour: float | None) -> None:
        self._rate = sessions_per_hour
        self.count = 0

    def next(self) -> float:
        """The start of the next session, in seconds. Raises LineError if the user named no rate."""
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
