# SPDX-License-Identifier: Apache-2.0
"""The seam between the adapters and the native code that copies bytes."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol


class Direction(enum.IntEnum):
    """The direction of a transfer. The values are those of the native interface."""

    LOAD = 0
    """From the arena into the engine's pages."""
    STORE = 1
    """From the engine's pages into the arena."""


class Status(enum.IntEnum):
    """State of a transfer, also as written on the completion board."""

    PENDING = 0
    DONE = 1
    FAILED = 2


WAYS = ("dma", "kernel", "tma", "staged")
"""The ways between a GPU and host memory: copy engines, a kernel, bulk copies of a kernel, and copy
engines to a ring on the GPU with a kernel behind it."""

FALLBACK = "fallback"
"""In place of a way: copies that could not go the way chosen for them."""

MARKS = 32
"""The number of marks that a mover keeps."""

LAYER_PARTS = 8
"""The most parts of a block, which layer-wise loads copy one by one. The forward pass waits for
the first part without computing, so an eighth of the load is not hidden. Each part costs a
transfer, about 10 us on CPUs and GPUs alike."""


class BlockMover(Protocol):
    """Copies blocks between pages and the arena. Nothing here blocks but `wait` and `close`. A
    transfer that the mover accepted completes exactly once, as DONE or FAILED."""

    def submit(
        self,
        direction: Direction,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: int = 0,
        flag_address: int = 0,
        *,
        planes: range | None = None,
        mark: int = 0,
    ) -> int:
        """Start one transfer and return its ticket.

        Args:
            blocks: engine blocks. `array('Q')` is taken without a copy in Python.
            offsets: for each block, where its bytes lie in the arena, in bytes from its address.
            after: work that the copies must follow: a CUDA stream's handle, or 0 where the
                caller's earlier work is done at the call.
            flag_address: 0, or the address of a 32-bit word that gets the final `Status` once
                all bytes are in place. It must stay valid until then.
            planes: numbers of the planes to copy, in the order in which the mover was given them
                and with a step of 1; None: all. Their bytes lie at their usual places, and
                `offsets` are those of a whole block. A store copies those of them that are in this
                rank's share, perhaps none. Parts that together are all planes make a whole copy.
            mark: 0, or what `mark` has returned: the copies follow the work that was marked, and
                `after` is not used.

        Raises ValueError if planes, a block, an offset or the mark are out of range; then nothing
        was copied.
        """
        ...

    def wait(self, ticket: int, timeout: float) -> Status:
        """As `poll`, but waits up to `timeout` seconds for the transfer to finish."""
        ...

    def close(self) -> None:
        """Let running copies end, drop queued ones as FAILED, end the threads. Idempotent."""
        ...


class Mover(BlockMover, Protocol):
    """Copies engine blocks of one rank to and from the arena. One per worker process.

    Nothing here blocks but `wait`, `hold` and `close`.

    Loads start in the order of their submission, each with all threads of the mover, and so do
    stores; loads overtake stores. If a later transfer is DONE, an earlier one may still run.
    """

    def mark(self, stream: int) -> int:
        """Mark the work that a CUDA stream has now, for `submit`. The handle is not 0. Returns a
        number, at least 1 and greater by 1 each time. The last `MARKS` can be used. Raises
        ValueError for what is no stream of the mover's device, and RuntimeError if the mover is
        closed, or the device has failed."""
        ...

    def poll(self, ticket: int) -> Status:
        """State of a transfer, without waiting; asking again gives the same answer."""
        ...

    def copy_seconds(self, ticket: int) -> float | None:
        """Seconds that the copies of a DONE transfer took, from the first byte to the last, by the
        clock of the thread or device that copied. Waiting before the copy or until a poll is not
        included. None if unknown."""
        ...

    def bytes_by_way(self) -> Mapping[str, int]:
        """Bytes of all transfers begun so far by the way that they went, a name of `WAYS`; those
        under `FALLBACK` went another way than the one chosen for them. Empty if there is one way
        only."""
        ...

    def hold(self, ticket: int, stream: int) -> Status:
        """Make a stream follow a transfer: work put into it from now on runs when all bytes are in
        place, or when the transfer has failed.

        A mover for a GPU blocks only until the device has been given the copies: microseconds,
        unless much is queued before them.

        If the handle of the stream is 0, this thread itself waits until the transfer has ended.

        Returns the present state. PENDING: the stream follows, but the transfer may still fail.
        Poll later, and use no result computed from its bytes before it is DONE. If this raises, the
        stream does not follow: ValueError for what is no stream of the mover's device, RuntimeError
        if the device has failed."""
        ...
