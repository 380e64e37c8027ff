# SPDX-License-Identifier: Apache-2.0
"""Bounds the memory that a trace may take."""

from __future__ import annotations

import resource
from pathlib import Path

from flexkv.system.available import available_memory
from flexkv.types.errors import TraceError
from flexkv.types.texts import size

_STATM = Path("/proc/self/statm")


class Room:
    """Half of the memory that is available when the room is made. The rest is for other processes,
    and for what is computed from the trace."""

    def __init__(self) -> None:
        self._most = available_memory() // 2
        self._before = _resident()

    def check(self) -> None:
        """Compare the memory that was taken since with the room.

        Raises:
            TraceError: it is more.
        """
        if _resident() - self._before > self._most:
            raise TraceError(
                f"TRACE on the command line takes more than {size(self._most)} of memory, half of "
                "what is available; allowed: a part of the trace, such as its first lines"
            )


def _resident() -> int:
    return int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
