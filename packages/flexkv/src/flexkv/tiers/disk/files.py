# SPDX-License-Identifier: Apache-2.0
"""The system calls of a disk store. Tests inject faults in a subclass of `OsFiles`.

Every file is opened relative to the descriptor of its folder; see `flexkv.system.regular_files`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence

from flexkv.system.directories import lasts
from flexkv.system.regular_files import open_regular
from flexkv.types.errors import DiskError, UnavailableError

DIRECT = os.O_DIRECT
_UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP}
"""The errors of open(2) if a file system lacks O_DIRECT, and of fallocate(2) if it cannot
allocate."""


class OsFiles:
    """File operations. Thread-safe. All raise the OSError of their system call."""

    def open(self, folder: int, name: str, flags: int) -> int:
        """See `open_regular`."""
        return open_regular(folder, name, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, length: int) -> None:
        """Reserve the first `length` bytes of the file on disk, and make it at least that long.

        If the file system cannot reserve space, the file only becomes longer, and writes fail when
        the disk is full.
        """
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
        """Wait until the written bytes of a file, or the names in a directory, survive a power
        failure."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)


def open_folder(path: str, above: int | None = None) -> int:
    """Open a directory, whose descriptor the caller closes. The last component of `path` may not be
    a symbolic link. `above`: descriptor of the directory that it is in; None to resolve the whole
    path. Raises OSError if open(2) failed, NotADirectoryError also for a symbolic link."""
    name = path if above is None else os.path.basename(path)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=above)


def open_data(files: OsFiles, folder: int, name: str, flags: int) -> tuple[int, bool]:
    """Open a data file for direct I/O, which bypasses the page cache, if the file system can.
    Returns the descriptor, which the caller closes, and whether its I/O is direct. If it is,
    offsets, lengths and addresses must be multiples of 4 KiB. Raises OSError as `open_regular`
    does."""
    try:
        return files.open(folder, name, flags | DIRECT), True
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return files.open(folder, name, flags), False


def exists(folder: int, name: str) -> bool:
    """Whether the directory `folder` has an entry `name` of any kind."""
    return _mode(folder, name) != 0


def is_regular(folder: int, name: str) -> bool:
    """Whether `name` in the directory `folder` is a regular file. False for a symbolic link."""
    return stat.S_ISREG(_mode(folder, name))


def _mode(folder: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def reason_of(error: OSError) -> str:
    """The system's reason of an error, after the name of the file if that is known."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


def without_trace(error: OSError) -> OSError:
    """An error that is returned. Its traceback would keep the buffers of the blocks."""
    return error.with_traceback(None)


def disk_error(text: str, error: OSError) -> DiskError:
    """Make the error of a directory that cannot be used: an `UnavailableError` if it may pass."""
    return DiskError(text) if lasts(error) else UnavailableError(text)


def read_fully(files: OsFiles, fd: int, buffer: memoryview, offset: int) -> bool:
    """Fill `buffer` from the bytes of a file from `offset` on. False if the file ends before.
    Raises OSError if preadv(2) failed."""
    done = 0
    while done < len(buffer):
        count = files.preadv(fd, [buffer[done:]], offset + done)
        if count <= 0:
            return False
        done += count
    return True


def write_fully(files: OsFiles, fd: int, buffer: memoryview, offset: int) -> None:
    """Write all of `buffer` to a file at `offset`. Raises OSError if pwritev(2) failed, EIO if it
    wrote nothing and reported no error."""
    done = 0
    while done < len(buffer):
        count = files.pwritev(fd, [buffer[done:]], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, "wrote nothing")
        done += count


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file. False if another process holds it. The kernel
    releases the lock when the last descriptor of the open file is closed, however the process ends.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
