# SPDX-License-Identifier: Apache-2.0
"""Fields of a trace's lines, checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

_MOST_SHOWN = 60
_MOST = 1 << 53
"""Beyond, a JSON reader may not keep a number as it is."""


NO_JSON = "no JSON"


class LineError(ValueError):
    """A line is not what its format says.

    Args:
        field: which of its fields.
        shown: what the line has there, for people; see `show`.
        allowed: what it may have.

    Attributes:
        is_cut: whether it may be the beginning of a line whose end is missing.
    """

    def __init__(self, field: str, shown: str, allowed: str) -> None:
        self.is_cut = shown.startswith(NO_JSON)
        super().__init__(f"{field} is {shown}; allowed: {allowed}")


def json_object(line: str) -> dict[str, object]:
    """The object that a line holds.

    Raises:
        LineError: it holds none.
    """
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError("the line", f"{NO_JSON} ({error})", "a JSON object") from None
    if not isinstance(content, dict):
        raise LineError("the line", show(content), "a JSON object")
    return content


def natural(line: Mapping[str, object], field: str, least: int = 0) -> int:
    """A whole number from `least` on.

    Raises:
        LineError: it is missing, or something else.
    """
    value = line.get(field)
    if type(value) is not int or not least <= value <= _MOST:
        raise LineError(field, show(value), f"a whole number from {least} to {_MOST}")
    return value


def number(line: Mapping[str, object], field: str) -> float:
    """A number from 0 on.

    Raises:
        LineError: it is missing, or something else.
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
