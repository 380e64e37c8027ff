# SPDX-License-Identifier: Apache-2.0
"""Opens files that no other user has planted, each relative to the descriptor of its directory.

A symbolic link could lead to other users' data, and opening a FIFO would wait for a writer for
ever. A hard link is another file's bytes under a name of FlexKV's, and another user's file can
change after it was checked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from flexkv.system.directories import refused, root_ids


def open_regular(folder: int, name: str, flags: int) -> int:
    """Open a regular file in the directory of a descriptor, by flags of open(2) without O_TRUNC.
    With O_CREAT, a missing file is created with mode 0600. Returns the descriptor, which the caller
    closes.

    Raises OSError: ELOOP for a symbolic link, ENXIO for what else is no regular file, EPERM if the
    file belongs neither to this user nor to root nor to the owner of the directory, and EMLINK if
    it is for writing and has a second name."""
    # Without O_NONBLOCK, opening a FIFO would wait. The flag has no effect on regular files.
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link", name) from None
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise OSError(errno.ENXIO, "is not a regular file", name) from None
        raise
    try:
        _check(fd, folder, name, writes=flags & os.O_ACCMODE != os.O_RDONLY)
    except OSError:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def _check(fd: int, folder: int, name: str, *, writes: bool) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ENXIO, "is not a regular file", name)
    user = status.st_uid
    if user not in {os.geteuid(), os.fstat(folder).st_uid} and user not in root_ids():
        raise refused(name, f"belongs to user {user}; remove it")
    if writes and status.st_nlink > 1:
        raise OSError(
            errno.EMLINK,
            f"has {status.st_nlink} names (hard links), and FlexKV would change the file behind "
            f"all of them; remove this one",
            name,
        )
