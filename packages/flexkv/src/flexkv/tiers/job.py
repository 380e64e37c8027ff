# SPDX-License-Identifier: Apache-2.0
"""The jobs of a link: each reads or writes a block, or several at once."""

from __future__ import annotations

import enum
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

_TEXT = 300
"""The most characters of an error that a job keeps."""


class Priority(enum.IntEnum):
    """The order of jobs on every link: the lower value goes first."""

    LOAD = 0
    """A read for a request that waits. It is never dropped."""
    PREFETCH = 1
    """A read for a queued request."""
    WRITE = 2
    """A write from host memory into a lower tier."""


class Urgency(NamedTuple):
    """The place of a read in the order of every link: the lower value goes first; `turn` as in
    `Job`."""

    priority: Priority
    turn: int = 0


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


Result: TypeAlias = Outcome | OSError
"""The result of a block as its device reports it; an error stands for FAILED."""


@dataclass(slots=True, eq=False)
class Job:
    """The read or write of one or several blocks. The caller sets the first attributes, `Batches`
    the ticket, and the link all those behind it.

    Attributes:
        size: bytes of all blocks.
        work: reads or writes the blocks, in a thread of the link; may wait for the device.
            Returns a result for each block. If it raises, all blocks are FAILED. It may hold
            buffers, so an ended job does not keep it.
        positions: those of the blocks in their batch, in the order of the results.
        turn: its place among jobs of the same priority: the lower value goes first.
        ticket: that of its batch.
        outcomes: an outcome for each block; empty until the job has ended.
        error: text of the first error; empty if there was none.
        begun: time.monotonic() when a thread took the job, in seconds; 0.0 before.
        seconds: how long the job ran; while it hangs, how long until that was noted.
        hangs: whether the job ran for longer than the link's `stall_seconds`, and the link has
            noted it.
    """

    priority: Priority
    size: int
    work: Callable[[], Sequence[Result]]
    positions: Sequence[int] = (0,)
    turn: int = 0
    ticket: int = 0
    outcomes: Sequence[Outcome] = ()
    error: str = ""
    begun: float = 0.0
    seconds: float = 0.0
    hangs: bool = False

    @property
    def writes(self) -> bool:
        return self.priority is Priority.WRITE

    def end(self, results: Sequence[Result]) -> None:
        """Set the outcome of each block; all are FAILED if not each has a result. Of an error only
        its text is kept: its traceback would keep the buffers of the blocks."""
        blocks = len(self.positions)
        if len(results) != blocks:
            results = [OSError(f"{len(results)} results for {blocks} blocks")] * blocks
        self.outcomes = [Outcome.FAILED if isinstance(each, OSError) else each for each in results]
        self.error = next((text_of(each) for each in results if isinstance(each, OSError)), "")
        self.work = _ended

    def end_as(self, outcome: Outcome) -> None:
        """Give all blocks the same outcome."""
        self.end([outcome] * len(self.positions))


def text_of(error: OSError) -> str:
    """What an error says, without the name of a file, so that equal errors have equal texts."""
    if error.errno is None or error.strerror is None:
        return (str(error) or type(error).__name__)[:_TEXT]
    return f"{error.strerror} ({errno.errorcode.get(error.errno, error.errno)})"


def _ended() -> Sequence[Outcome]:
    """The work of a job that has ended."""
    return ()
