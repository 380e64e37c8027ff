# SPDX-License-Identifier: Apache-2.0
"""Parsers of the values of settings in files, variables and command lines.

Every parser takes a value from a JSON or YAML file, or a string from elsewhere. It returns the
parsed value. It raises ValueError without a message if the value is not allowed; `load_config`
makes the message from the source and from `allowed` of the setting.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection

from flexkv.deadline import call_within

LOAD_MODES = ("async", "layerwise", "auto")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "OFF")

_OTHER_SEPARATOR = re.compile(r"[,:]\s*/")
"""Separators of paths in other programs. A path that contains one is far more often two paths than
a path of that name."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_BUCKET = re.compile(
    rf"(?:(?:s3|gs|az)://{_NAME}|abfss?://{_NAME}@{_NAME})(?:/(?!\.\.?(?:/|$))[A-Za-z0-9._-]+)*/?"
)

_HOST = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
"""Labels of a machine's name have 1 to 63 characters; no resolver takes others."""
_HOST_PORT = re.compile(rf"{_HOST}:[0-9]{{1,5}}")
_HTTP_URL = re.compile(rf"http://{_HOST}(?::(?P<port>[0-9]{{1,5}}))?(?:/[A-Za-z0-9._-]+)+")
_DEVICES = re.compile(r"(?:[A-Za-z0-9_.-]+(?:,[A-Za-z0-9_.-]+)*)?")

_COMPARE_SECONDS = 1.0
"""Time limit for the directories' answers. Directories that do not answer are not compared with the
others. The limit is short, because each process of an engine reads the settings more than once. Not
tuned."""

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def parse_bool(value: object) -> bool:
    """Parse a boolean: a boolean of the file, 1 or 0, or one of the words for them."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError


def parse_number(least: float, most: float) -> Callable[[object], float]:
    """Make a parser that takes a number from `least` to `most`, but never NaN."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        try:
            number = float(value)
        except OverflowError:  # an int with hundreds of digits
            raise ValueError from None
        if not least <= number <= most:
            raise ValueError
        return number

    return parse


def parse_whole(least: int, most: int) -> Callable[[object], int]:
    """Make a parser that takes a whole number from `least` to `most`."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        number = int(value)
        if not least <= number <= most:
            raise ValueError
        return number

    return parse


def parse_name(names: Collection[str]) -> Callable[[object], str]:
    """Make a parser that takes one of `names`, which are in lower case, written in any case."""

    def parse(value: object) -> str:
        text = str(value).strip().lower()
        if text not in names:
            raise ValueError
        return text

    return parse


def parse_names(names: Collection[str]) -> Callable[[object], tuple[str, ...]]:
    """Make a parser that takes some of `names`, separated by commas or in a list, in the order of
    `names`. `all` and `none` stand for themselves."""

    def parse(value: object) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise ValueError
        wanted = {str(part).strip().lower() for part in parts}
        if wanted in ({"all"}, {"none"}):
            return tuple(names) if wanted == {"all"} else ()
        if not wanted or not wanted <= set(names):
            raise ValueError
        return tuple(name for name in names if name in wanted)

    return parse


def parse_log_level(value: object) -> str:
    """Parse the name of a level of logging, written in any case, to upper case."""
    text = str(value).strip().upper()
    if text not in LOG_LEVELS:
        raise ValueError
    return text


def parse_directory(value: object) -> str:
    """Parse an absolute path. Nothing has to exist there."""
    if not isinstance(value, str) or not os.path.isabs(value) or "\0" in value:
        raise ValueError
    return value


def parse_directories(value: object) -> tuple[str, ...]:
    """Parse absolute paths, separated by `;` or in a list, of which no two are the same directory.

    With several paths, it follows symbolic links, for at most `_COMPARE_SECONDS`.
    """
    parts = value.split(";") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError
    if isinstance(value, str) and _OTHER_SEPARATOR.search(value):
        raise ValueError
    paths = tuple(
        parse_directory(part.strip() if isinstance(part, str) else part) for part in parts
    )
    if len(paths) > 1:
        # realpath(3) hangs with a mount that hangs, which a start goes on without.
        calls = {path: functools.partial(os.path.realpath, path) for path in paths}
        real = call_within(calls, _COMPARE_SECONDS)
        if len(calls) != len(paths) or len(set(real.values())) != len(real):
            raise ValueError
    return paths


def parse_bucket_url(value: object) -> str:
    """Parse the URL of a bucket, with a path or without. Trailing slashes are removed. Credentials
    are refused, because they would end up in logs."""
    if not isinstance(value, str) or not _BUCKET.fullmatch(value):
        raise ValueError
    return value.rstrip("/")


def parse_host_port(value: object) -> str:
    """Parse the address of a server with its port, as HOST:PORT."""
    if not isinstance(value, str) or not _HOST_PORT.fullmatch(value):
        raise ValueError
    _check_port(value.rpartition(":")[2])
    return value


def parse_http_url(value: object) -> str:
    """Parse the URL of a path on a server, with a port or without, and without credentials."""
    found = _HTTP_URL.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError
    if found["port"] is not None:
        _check_port(found["port"])
    return found[0]


def _check_port(digits: str) -> None:
    if not 0 < int(digits) < 1 << 16:
        raise ValueError


def parse_devices(value: object) -> str:
    """Parse names of network devices, separated by commas; empty for Mooncake's own choice."""
    if not isinstance(value, str) or not _DEVICES.fullmatch(value):
        raise ValueError
    return value
