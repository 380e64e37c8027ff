# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the fields of a trace's lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

_MOST_SHOWN = 60
"""The most characters of a value that an error prints."""
_MOST = 1 << 53
"""The largest number allowed. JSON readers may round larger ones."""


NO_JSON = "no JSON"
"""Beginning of a `LineError`'s value if the line cannot be parsed."""


class LineError(ValueError):
    """A line violates its format.

    Args:
        field: name of the field.
        shown: its value as text; see `show`.
        allowed: the allowed values.

    Attributes:
        is_cut: whether the line may be the beginning of one whose end is missing.
    """

    def __init__(self, field: str, shown: str, allowed: str) -> None:
        self.is_cut = shown.startswith(NO_JSON)
        super().__init__(f"{field} is {shown}; allowed: {allowed}")


def json_objects(text: str) -> Iterator[dict[str, object]]:
    """Parse JSON objects that follow one another, at least one.

    Raises:
        LineError: the text is something else, or one of the values is no JSON object.
    """
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
    """Read a field that is a whole number of at least `least`.

    Raises:
        LineError: the field is missing or has another value.
    """
    value = line.get(field)
    if type(value) is not int or not least <= value <= _MOST:
        raise LineError(field, show(value), f"a whole number from {least} to {_MOST}")
    return value


def number(line: Mapping[str, object], field: str) -> float:
    """Read a field that is a number of at least 0.

    Raises:
        LineError: the field is missing or has another value.
    """
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
