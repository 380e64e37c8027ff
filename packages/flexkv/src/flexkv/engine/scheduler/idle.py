# SPDX-License-Identifier: Apache-2.0
"""How long the engine continues to step when no request needs a step.

Copies end, and are reported, in steps. If an engine rested at once after its last request, it would
neither write that request's last blocks to disk nor report that its queues are empty.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_ON_SECONDS = 1.0
"""Seconds of further steps after the last request: an NVMe drive writes a full queue in this time.
vLLM's `LLM` gives an engine 5 s to end, the shortest time. Waiting blocks are written for 2.5 s of
them, so that the workers have 1.5 s."""


class IdleSteps:
    """Decides whether the engine steps without requests. Single-threaded.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served_at: float | None = None

    def note(self, serves: bool) -> None:
        """Note that the engine has served a request, or that a step begins without any."""
        if serves or self._served_at is None:
            self._served_at = self._clock()

    def wanted(self, work: bool) -> bool:
        """Whether another step is needed: there is `work`, and no step has run yet or the last step
        with a request began less than `STEP_ON_SECONDS` ago."""
        if not work:
            return False
        return self._served_at is None or self._clock() - self._served_at < STEP_ON_SECONDS
