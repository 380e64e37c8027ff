# SPDX-License-Identifier: Apache-2.0
"""Numbers and names as people read them."""

from __future__ import annotations

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int) -> str:
    """`count` bytes as text with a binary unit, such as `2.00 MiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {_UNITS[unit]}" if unit else f"{count} bytes"


def exact(value: float) -> str:
    """A number with all its digits, such as `2592001`, and without a needless fraction."""
    return repr(float(value)).removesuffix(".0")


def blocks(count: int) -> str:
    """`count` blocks as text, such as `1 block` or `1,600 blocks`."""
    return "1 block" if count == 1 else f"{count:,} blocks"


def printable(text: str) -> str:
    """Text of others, such as a file of a model. A character that a terminal may obey becomes
    `?`."""
    return "".join(each if each.isprintable() else "?" for each in text)
