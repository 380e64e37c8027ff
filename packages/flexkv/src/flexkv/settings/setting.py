# SPDX-License-Identifier: Apache-2.0
"""Declares fields of the settings, and the bounds that several fields share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

LEAST_GIB = 1e-6
"""The least size, about 1 KiB. Tests use caches of some KiB."""
MOST_GIB = float(1 << 20)
"""The largest size, 1 PiB, more than one machine has. A larger number may be meant in bytes."""
SIZE = f"a number from {LEAST_GIB} to {MOST_GIB:.0f}"
"""The allowed values of a size in GiB."""
DAY_SECONDS = 86400.0
"""The longest time limit. A larger number may be meant in milliseconds."""


def setting(
    default: Any,
    *,
    env: str,
    unit: str,
    help: str,
    parse: Callable[[object], Any],
    allowed: str,
) -> Any:
    """Declare a field of the settings.

    Args:
        default: the value if no source has one.
        env: name of the environment variable.
        unit: unit of the value, for the settings page.
        help: the effect of the setting, for the settings page.
        parse: parses the value of any source, or raises ValueError. It may block for about a
            second, if it looks at files.
        allowed: the values that `parse` accepts, for error messages and the settings page.

    Returns:
        A dataclass field. Its type here is Any, so that the annotation of the attribute decides.
    """
    metadata = {"env": env, "unit": unit, "help": help, "parse": parse, "allowed": allowed}
    return field(default=default, metadata=metadata)
