# SPDX-License-Identifier: Apache-2.0
"""Small files of the runtime directory by which living processes tell others about themselves.

A process holds the lock of its file. A killed process leaves a file without a lock: readers skip
it, and the next process that creates such a file removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping

from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.system.forks import close_in_children
from flexkv.system.regular_files import open_regular
from flexkv.types.errors import ArenaError

_DRAFT = ".new"
_BYTES = 4096
"""Bytes of a file. One call writes it and one call reads it, so that no reader finds half of it."""


class HeldFile:
    """A file of this process in the runtime directory `root`, until `close`. Its name ends with
    `suffix`."""

    def __init__(self, root: str, suffix: str) -> None:
        self._root = root
        self._suffix = suffix
        self._name = secrets.token_hex(8) + suffix
        self._fd = -1
        self._written = b""
        close_in_children(self)

    @property
    def exists(self) -> bool:
        """Whether the file has been created and nobody has removed it since."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink > 0

    def create(self, directory: RuntimeDirectory) -> None:
        """Create the file in the directory, whose lock the caller holds. Removes the files of
        killed processes. Raises OSError."""
        self.leave_to_parent()
        folder = directory.descriptor
        for other in [*_names(folder, self._suffix), *_names(folder, self._suffix + _DRAFT)]:
            with _opened(folder, other) as fd:
                if fd is not None and _lock(fd):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(other, dir_fd=folder)
        # The file gets its name once it is locked. Before, it would look like that of a killed
        # engine.
        draft = self._name + _DRAFT
        fd = open_regular(folder, draft, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.rename(draft, self._name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.close(fd)
            raise
        self._fd, self._written = fd, b""

    def write(self, content: Mapping[str, object]) -> None:
        """Write the content, which has at most 4 KiB of JSON, if it has changed. Raises OSError."""
        text = json.dumps(content).encode().ljust(_BYTES)
        if text == self._written:
            return
        if os.pwrite(self._fd, text, 0) < _BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._written = text

    def close(self) -> None:
        """Remove the file. Idempotent."""
        if self._fd >= 0:
            with (
                contextlib.suppress(OSError, ArenaError),
                RuntimeDirectory(self._root) as directory,
            ):
                os.unlink(self._name, dir_fd=directory.descriptor)
            self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """See `flexkv.system.forks.Owner`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_held(directory: RuntimeDirectory, suffix: str) -> Iterator[dict[str, object]]:
    """The contents of the files of living processes whose names end with `suffix`."""
    folder = directory.descriptor
    for name in _names(folder, suffix):
        with _opened(folder, name) as fd:
            text = b"" if fd is None or _lock(fd) else os.pread(fd, _BYTES, 0)
        try:
            content = json.loads(text)
        except ValueError:
            continue  # nothing is written yet, or another version of FlexKV wrote it
        if isinstance(content, dict):
            yield content


def _names(folder: int, suffix: str) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(suffix)]


@contextlib.contextmanager
def _opened(folder: int, name: str) -> Iterator[int | None]:
    """Open a file of a directory for the block. None if it is gone or no regular file."""
    try:
        fd = open_regular(folder, name, os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Take the lock of a file. False if another process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
