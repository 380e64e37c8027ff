# SPDX-License-Identifier: Apache-2.0
"""Values of settings, as they are written in files, variables and on command lines.

Every parser takes what a JSON or YAML file, or a string from elsewhere, holds; it returns the value
or raises ValueError.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection

LOAD_MODES = ("async", "layerwise", "auto")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "OFF")

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError


def parse_positive_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number) or number <= 0:
        raise ValueError
    return number


def parse_positive_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    number = int(value)
    if number <= 0:
        raise ValueError
    return number


def parse_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    number = int(value)
    if number < 0:
        raise ValueError
    return number


def parse_name(names: Collection[str]) -> Callable[[object], str]:
    """A parser that takes one of `names`, whatever its case."""

    def parse(value: object) -> str:
        text = str(value).strip().lower()
        if text not in names:
            raise ValueError
        return text

    return parse


def parse_log_level(value: object) -> str:
    text = str(value).strip().upper()
    if text not in LOG_LEVELS:
        raise ValueError
    return text


def parse_directory(value: object) -> str:
    if not isinstance(value, str) or not os.path.isabs(value):
        raise ValueError
    return value


def parse_directories(value: object) -> tuple[str, ...]:
    parts = value.split(";") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError
    paths = tuple(
        parse_directory(part.strip() if isinstance(part, str) else part) for part in parts
    )
    if len(set(map(os.path.realpath, paths))) != len(paths):
        raise ValueError
    return paths
