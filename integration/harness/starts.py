# SPDX-License-Identifier: Apache-2.0
"""Counts the engines that tests start, in whichever process."""

from __future__ import annotations

import os

VARIABLE = "ENGINE_STARTS_FILE"
"""Names a file that gets a line for each start; unset, nothing is counted."""


def note(engine: str, *, with_flexkv: bool) -> None:
    """Count a start of an engine of this name."""
    if path := os.environ.get(VARIABLE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{engine}\n" if with_flexkv else f"{engine} without FlexKV\n")
