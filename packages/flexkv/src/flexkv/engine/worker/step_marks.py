# SPDX-License-Identifier: Apache-2.0
"""Marks the ends of the engine's steps in its stream, so that a load need not wait for later
steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.worker.rank_copies import RankCopies
from flexkv.types.mover import MARKS


class StepMarks:
    """The marks behind the last steps of one rank. Single-threaded.

    Args:
        copies: copies of the rank; borrowed.
        work_so_far: see `WorkerSide`.
        boundary: catches errors of single marks.
    """

    def __init__(
        self, copies: RankCopies, work_so_far: Callable[[], int], boundary: ErrorBoundary
    ) -> None:
        self._copies = copies
        self._work_so_far = work_so_far
        self._boundary = boundary
        self._marks: deque[tuple[int, int]] = deque(maxlen=MARKS)

    def step_ended(self, step: int) -> None:
        """Mark the end of a step, once the engine has queued all of its work on the device. On
        CPUs, the engine has computed the step by then, and no mark is needed."""
        with self._boundary.guard("marking a step", "loads wait for all work of the engine"):
            stream = self._work_so_far()
            if stream:
                self._marks.append((step, self._copies.mover.mark(stream)))

    def behind(self, step: int) -> int:
        """The first mark behind a step, for `Mover.submit`; 0 if there is none."""
        return next((mark for marked, mark in self._marks if marked >= step), 0)
