# SPDX-License-Identifier: Apache-2.0
"""Errors before the lines that FlexKV executes for a rank of SGLang."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import flexkv
import flexkv_sglang
from flexkv.engine.boundary import Guard
from packages.line_errors import LineErrors

SOURCES = [Path(package.__path__[0]) for package in (flexkv, flexkv_sglang)]

SPARED = ("boundary.py",)
"""Files whose lines are spared: the guard's own."""

ENTRIES = ("hooks.py", "side.py", "linker.py", "ranks.py")
"""Files with the calls of SGLang and the exchanges of ranks. Statements between their guards are
spared, and must call nothing of other files: lines of those fail everywhere."""

SPARED_NOW = 0.6
"""Share of a line's executions that pass before it fails, so that much is under way then."""


def line_errors(rng: random.Random, replace: Callable[[object, str, object], None]) -> LineErrors:
    """Errors before all lines but those spared.

    Args:
        rng: chooses the executions that pass.
        replace: replaces an attribute of an object, for as long as the errors are used.
    """
    depth = [0]
    leave = Guard.__exit__

    def enter(_: Guard) -> None:
        depth[0] += 1

    def exit_(guard: Guard, *error: object) -> bool:
        depth[0] -= 1
        return leave(guard, *error)  # type: ignore[arg-type]

    replace(Guard, "__enter__", enter)
    replace(Guard, "__exit__", exit_)
    return LineErrors(
        SOURCES,
        lambda file, _: file.endswith(SPARED),
        lambda file: depth[0] > 0 or not file.endswith(ENTRIES),
        lambda: rng.random() < SPARED_NOW,
    )
