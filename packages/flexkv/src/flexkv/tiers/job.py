# SPDX-License-Identifier: Apache-2.0
"""The jobs of a link: each reads or writes a block, or several at once."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Priority(enum.IntEnum):
    """The order of jobs on every link: the lower value goes first."""

    LOAD = 0
    """A read for a request that waits. It is never dropped."""
    PREFETCH = 1
    """A read for a queued request."""
    STORE = 2
    """A copy from the engine into host memory."""
    WRITE = 3
    """A write from host memory into a lower tier."""


class Outcome(enum.Enum):
    """The result of the read or write of a block."""

    DONE = "done"
    """All bytes were copied and, for a read, verified."""
    MISSING = "missing"
    """The tier does not have the block."""
    DAMAGED = "damaged"
    """The bytes are not those that were written. The tier has forgotten the block."""
    FAILED = "failed"
    """The read or write failed, for instance by an I/O error."""
    DROPPED = "dropped"
    """The read or write did not begin: the tier or its queue was full, or it was cancelled."""


@dataclass(slots=True, eq=False)
class Job:
    """The read or write of one or several blocks. The link sets `outcomes`, `begun` and `seconds`.

    Attributes:
        priority: see `Priority`.
        size: bytes of all blocks.
        work: reads or writes the blocks, in a thread of the link; may wait for the device.
            Returns an outcome for each block. If it raises, all blocks are FAILED.
        blocks: the number of blocks.
        outcomes: an outcome for each block; empty until the job has ended.
        begun: time.monotonic() when a thread took the job, in seconds; 0.0 before.
        seconds: how long the job ran.
    """

    priority: Priority
    size: int
    work: Callable[[], Sequence[Outcome]]
    blocks: int = 1
    outcomes: Sequence[Outcome] = ()
    begun: float = 0.0
    seconds: float = 0.0

    def end_as(self, outcome: Outcome) -> None:
        """Give all blocks the same outcome."""
        self.outcomes = [outcome] * self.blocks
