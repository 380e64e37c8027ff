# SPDX-License-Identifier: Apache-2.0
"""What waits on a link: the read or write of a block, or of several at once."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Priority(enum.IntEnum):
    """What goes first on every link; the lower value wins."""

    LOAD = 0
    """A request waits for it. Never dropped."""
    PREFETCH = 1
    """A request that is queued will want it."""
    STORE = 2
    """From the engine into host memory."""
    WRITE = 3
    """From host memory into a lower tier."""


class Outcome(enum.Enum):
    """How a block's way over a link ended."""

    DONE = "done"
    """All bytes are in place and, for a read, verified."""
    MISSING = "missing"
    """The tier does not have the block."""
    DAMAGED = "damaged"
    """The bytes are not those that were written. The tier has forgotten the block."""
    FAILED = "failed"
    """It could not be done, for instance because of an I/O error."""
    DROPPED = "dropped"
    """It was not begun: no room, a full queue, or cancelled."""


@dataclass(slots=True, eq=False)
class Job:
    """The way of one or several blocks over a link.

    Attributes:
        priority: see `Priority`.
        size: bytes.
        work: does it, in a thread of the link; may wait for its device. Returns an outcome for
            each block. If it raises, all are FAILED.
        blocks: how many.
        outcomes: one for each block; none until the job ended. Set by the link.
        begun: time.monotonic() when a thread took it; 0.0 before.
        seconds: how long it ran. Set by the link.
    """

    priority: Priority
    size: int
    work: Callable[[], Sequence[Outcome]]
    blocks: int = 1
    outcomes: Sequence[Outcome] = ()
    begun: float = 0.0
    seconds: float = 0.0

    def end_as(self, outcome: Outcome) -> None:
        """All its blocks ended alike."""
        self.outcomes = [outcome] * self.blocks
