# SPDX-License-Identifier: Apache-2.0
"""The seam between the adapters and the native code that copies bytes."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol


class Direction(enum.IntEnum):
    """Which way a transfer goes. The values are those of the native interface."""

    LOAD = 0
    """From the arena into the engine's pages."""
    STORE = 1
    """From the engine's pages into the arena."""


class Status(enum.IntEnum):
    """State of a transfer, also as written on the completion board."""

    PENDING = 0
    DONE = 1
    FAILED = 2


class Mover(Protocol):
    """Copies engine blocks of one rank to and from the arena. One per worker process.

    Nothing here blocks but `wait` and `close`. A transfer that the mover accepted completes
    exactly once, as DONE or FAILED.
    """

    def submit(
        self,
        direction: Direction,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: int = 0,
        flag_address: int = 0,
    ) -> int:
        """Start one transfer and return its ticket.

        Args:
            direction: which way.
            blocks: engine blocks. `array('Q')` is taken without a copy in Python.
            offsets: for each block, where its bytes lie in the arena, in bytes from its address.
            after: work that the copies must follow: a CUDA stream's handle, or 0 where the
                caller's earlier work is done at the call.
            flag_address: 0, or the address of a 32-bit word that gets the final `Status` once
                all bytes are in place. It must stay valid until then.

        Raises:
            ValueError: a block or an offset is out of range; nothing was copied.
        """
        ...

    def poll(self, ticket: int) -> Status:
        """State of a transfer, without waiting; asking again gives the same answer."""
        ...

    def wait(self, ticket: int, timeout: float) -> Status:
        """As `poll`, but waits up to `timeout` seconds for the transfer to finish."""
        ...

    def close(self) -> None:
        """Let running copies end, drop queued ones as FAILED, end the threads. Idempotent."""
        ...
