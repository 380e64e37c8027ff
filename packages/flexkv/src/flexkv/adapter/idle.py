# SPDX-License-Identifier: Apache-2.0
"""How long the engine continues to step when no request needs a step.

Copies end, and are reported, in steps. If an engine rested at once after its last request, it would
neither write that request's last blocks to disk nor report that its queues are empty.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_ON_SECONDS = 1.0
"""What an NVMe drive needs for a full queue. The least that an engine is given to end is 5 s, by
vLLM's `LLM`: with the 2.5 s in which what waits is written, that leaves the workers 1.5 s."""


class IdleSteps:
    """Decides whether the engine steps without requests. Single-threaded.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served_at: float | None = None

    def note(self, serves: bool) -> None:
        """A step begins; `serves` if there are requests."""
        if serves or self._served_at is None:
            self._served_at = self._clock()

    def wanted(self, work: bool) -> bool:
        """Whether another step is needed: `work` reports something to do, and no step has run yet
        or the last request ended less than a second ago."""
        if not work:
            return False
        return self._served_at is None or self._clock() - self._served_at < STEP_ON_SECONDS
