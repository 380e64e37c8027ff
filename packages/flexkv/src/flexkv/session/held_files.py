# SPDX-License-Identifier: Apache-2.0
"""Small files of the runtime directory by which living processes tell others about themselves.

A process holds the lock of its file. A killed process leaves a file without a lock: readers skip
it, and the next process that creates such a file removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator

_DRAFT = ".new"
_BYTES = 4096
"""Bytes of a file. One call writes it and one call reads it, so that no reader finds half of it."""


def create_held(folder: int, name: str) -> int:
    """Create a file and lock it. Removes the files of killed processes with the same suffix.

    Args:
        folder: descriptor of the runtime directory, whose lock the caller holds.
        name: name of the file, which no other process uses, with its suffix.

    Returns:
        The descriptor, which the caller closes after it has removed the file.

    Raises:
        OSError: a system call failed.
    """
    suffix = os.path.splitext(name)[1]
    for other in [*_names(folder, suffix), *_names(folder, suffix + _DRAFT)]:
        with _opened(folder, other) as fd:
            if fd is not None and _lock(fd, fcntl.LOCK_SH):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(other, dir_fd=folder)
    # The file gets its name once it is locked. Before, it would look like that of a killed engine.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name + _DRAFT, flags, 0o600, dir_fd=folder)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(name + _DRAFT, name, src_dir_fd=folder, dst_dir_fd=folder)
    return fd


def write_held(fd: int, content: bytes) -> None:
    """Write the content of a file: JSON of at most 4 KiB, which blanks fill up.

    Raises:
        OSError: a system call failed.
    """
    if os.pwrite(fd, content.ljust(_BYTES), 0) < _BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_held(folder: int, suffix: str) -> Iterator[bytes]:
    """Read the files of living processes.

    Args:
        folder: descriptor of the runtime directory.
        suffix: end of the files' names, with its dot.
    """
    for name in _names(folder, suffix):
        with _opened(folder, name) as fd:
            if fd is not None and not _lock(fd, fcntl.LOCK_SH):
                yield os.pread(fd, _BYTES, 0)


def _names(folder: int, suffix: str) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(suffix)]


@contextlib.contextmanager
def _opened(folder: int, name: str) -> Iterator[int | None]:
    """Open a file of a directory for the block. None if it is gone or no regular file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except OSError:
        yield None
        return
    try:
        yield fd if stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        os.close(fd)


def _lock(fd: int, how: int) -> bool:
    """Take the lock of a file. False if another process holds it."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
