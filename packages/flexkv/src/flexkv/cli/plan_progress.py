# SPDX-License-Identifier: Apache-2.0
"""Shows how far a long command is, on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

QUIET_SECONDS = 10.0
"""Seconds without a line if standard error is no terminal."""


class ProgressShown:
    """A bar on a terminal; otherwise a line from time to time, first after `QUIET_SECONDS`."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=None)
        self._last = time.monotonic()

    def __enter__(self) -> ProgressShown:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, name: str, done: float | None) -> None:
        """Show the step that the command is at, and its finished share; None if unknown."""
        if self._bar is not None:
            total = None if done is None else 1.0
            self._bar.update(self._task, description=name, total=total, completed=done or 0.0)
            return
        now = time.monotonic()
        if now - self._last >= QUIET_SECONDS:
            self._last = now
            share = "" if done is None else f": {100 * done:.0f} %"
            print(f"flexkv plan: {name}{share}", file=sys.stderr, flush=True)
