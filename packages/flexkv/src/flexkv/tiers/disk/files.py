# SPDX-License-Identifier: Apache-2.0
"""The system calls of a disk store, behind a seam where tests put faults.

Every file is opened relative to the descriptor of its folder, never through a symbolic link, and
only if it is a regular file: a link leads to data of others, a FIFO waits for a writer for ever.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from typing import Protocol

DIRECT = os.O_DIRECT
_UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP}
"""What open(2) says where a file system has no O_DIRECT, fallocate(2) where it cannot allocate."""


class Files(Protocol):
    """File operations, thread-safe; all raise OSError as the system calls do."""

    def open(self, folder: int, name: str, flags: int) -> int: ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...

    def allocate(self, fd: int, length: int) -> None: ...

    def truncate(self, fd: int, length: int) -> None: ...

    def sync(self, fd: int) -> None: ...

    def close(self, fd: int) -> None: ...


class OsFiles:
    """The real ones."""

    def open(self, folder: int, name: str, flags: int) -> int:
        """See `open_regular`."""
        return open_regular(folder, name, flags)

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

    def sync(self, fd: int) -> None:
        """Wait until what was written, or which names a directory has, survives a power failure."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)


def open_folder(path: str) -> int:
    """Open a directory; its last name may not be a symbolic link.

    Raises:
        OSError: as the system says; NotADirectoryError also for a symbolic link.
    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def open_regular(folder: int, name: str, flags: int) -> int:
    """Open a regular file of the directory `folder`, or create it for the owner only.

    Raises:
        OSError: as the system says; ENXIO or ELOOP, with `name`, for anything but a regular file.
    """
    # Without O_NONBLOCK a FIFO would wait; for regular files it means nothing.
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link", name) from None
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise OSError(errno.ENXIO, "is not a regular file", name) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, "is not a regular file", name)
    return fd


def open_data(files: Files, folder: int, name: str, flags: int) -> tuple[int, bool]:
    """Open a data file for I/O that passes the page cache by, if its file system can.

    Returns the descriptor and whether it is direct. Direct or not, each I/O is of whole 4 KiB.
    """
    try:
        return files.open(folder, name, flags | DIRECT), True
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return files.open(folder, name, flags), False


def exists(folder: int, name: str) -> bool:
    """Whether the directory `folder` has an entry `name`, whatever it is.

    Raises:
        OSError: as the system says.
    """
    return _mode(folder, name) != 0


def is_regular(folder: int, name: str) -> bool:
    """Whether `name` in the directory `folder` is a regular file, and no link to one.

    Raises:
        OSError: as the system says.
    """
    return stat.S_ISREG(_mode(folder, name))


def _mode(folder: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def reason_of(error: OSError) -> str:
    """What went wrong, and with which file if that is known."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


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
