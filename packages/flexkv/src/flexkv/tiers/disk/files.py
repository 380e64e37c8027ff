# SPDX-License-Identifier: Apache-2.0
"""The system calls of a disk store, behind a seam where tests put faults."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from typing import Protocol

DIRECT = os.O_DIRECT
_UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP}
"""What open(2) says where a file system has no O_DIRECT, fallocate(2) where it cannot allocate."""


class Files(Protocol):
    """File operations, thread-safe; all raise OSError as the system calls do."""

    def open(self, path: str, flags: int) -> int: ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...

    def allocate(self, fd: int, length: int) -> None: ...

    def truncate(self, fd: int, length: int) -> None: ...

    def close(self, fd: int) -> None: ...


class OsFiles:
    """The real ones."""

    def open(self, path: str, flags: int) -> int:
        """Open or create, for the owner only."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, length: int) -> None:
        """Make the file at least `length` bytes long, and its blocks the file's, where the file
        system can do that: elsewhere a full disk shows as failing writes."""
        try:
            os.posix_fallocate(fd, 0, length)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            if os.fstat(fd).st_size < length:
                os.ftruncate(fd, length)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def close(self, fd: int) -> None:
        os.close(fd)


def open_data(files: Files, path: str) -> tuple[int, bool]:
    """Open a data file for reads and writes that pass the page cache by, if its file system can.

    Returns the descriptor and whether it is direct. Direct or not, each I/O is of whole 4 KiB.
    """
    flags = os.O_RDWR | os.O_CREAT
    try:
        return files.open(path, flags | DIRECT), True
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return files.open(path, flags), False


def read_fully(files: Files, fd: int, buffer: memoryview, offset: int) -> bool:
    """Fill `buffer` from `offset` on. False at the end of the file.

    Raises:
        OSError: as the system says.
    """
    done = 0
    while done < len(buffer):
        count = files.preadv(fd, [buffer[done:]], offset + done)
        if count <= 0:
            return False
        done += count
    return True


def write_fully(files: Files, fd: int, buffer: memoryview, offset: int) -> None:
    """Write all of `buffer` at `offset`.

    Raises:
        OSError: as the system says; EIO if it writes nothing and says nothing.
    """
    done = 0
    while done < len(buffer):
        count = files.pwritev(fd, [buffer[done:]], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, "wrote nothing")
        done += count


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file; False if another process has it. The kernel gives
    it back when the last descriptor is closed, however its process ends."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
