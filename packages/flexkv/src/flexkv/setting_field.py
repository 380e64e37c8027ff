# SPDX-License-Identifier: Apache-2.0
"""How a field of the settings is declared, and bounds that several fields share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

LEAST_GIB = 1e-6
"""About one memory page; tests use caches of some KiB."""
MOST_GIB = float(1 << 20)
"""1 PiB, more than one machine has: a larger number is a mistake, perhaps in bytes."""
SIZE = f"a number from {LEAST_GIB} to {MOST_GIB:.0f}"
"""What is allowed of a size in GiB."""
DAY_SECONDS = 86400.0
"""A longer time limit is a mistake, perhaps in milliseconds."""


def setting(
    default: Any,
    *,
    env: str,
    unit: str,
    help: str,
    parse: Callable[[object], Any],
    allowed: str,
) -> Any:
    """A field of the settings.

    Args:
        default: its value if no source has one.
        env: the environment variable that sets it.
        unit: of its value, for the settings page.
        help: what it does, for the settings page.
        parse: takes the value of any source; returns the parsed one, or raises ValueError.
        allowed: what `parse` accepts, for error messages and the settings page.
    """
    metadata = {"env": env, "unit": unit, "help": help, "parse": parse, "allowed": allowed}
    return field(default=default, metadata=metadata)
