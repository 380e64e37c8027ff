# SPDX-License-Identifier: Apache-2.0
"""Locks on bytes of a memory file, by which processes see which others use it.

The kernel ends a lock when its process ends, also in other containers, where process ids mean
nothing. A lock says nothing of the byte's value.

A forked child has a lock of its parent's until `Arena.leave_to_parent` closes it there.
"""

from __future__ import annotations

import fcntl
import os
import struct

from flexkv.types.errors import ArenaError

_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock` of fcntl(2): kind, whence, start, length, pid."""


class MemoryLock:
    """A lock on one byte of the memory file, or behind its end, held until `close` or the end of
    the process. `alone`: no other may hold a lock on the byte; else all may that do not want it
    alone. Raises BlockingIOError if another holds the lock, and ArenaError if the file cannot be
    opened again."""

    def __init__(self, fd: int, byte: int, *, alone: bool = False) -> None:
        # A lock belongs to an open file. The descriptor's may be that of other processes, too.
        try:
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"the arena's memory file cannot be opened again: {error}") from None
        kind = fcntl.F_WRLCK if alone else fcntl.F_RDLCK
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except BaseException:
            os.close(self._fd)
            raise

    def is_locked(self, byte: int) -> bool:
        """Whether another than this object holds a lock on a byte of the file."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
