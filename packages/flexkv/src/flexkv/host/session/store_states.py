# SPDX-License-Identifier: Apache-2.0
"""What running engines report of their shared stores, in files of the runtime directory.

    <16 hex digits>.store    one store of one engine, as JSON; the engine holds its lock

A file that nobody locks was left by a killed engine: readers skip it, and the next engine that
starts removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Mapping

from flexkv.errors import ArenaError
from flexkv.forks import close_in_children
from flexkv.host.session.directory import RuntimeDirectory

logger = logging.getLogger(__name__)

SECONDS = 1.0
"""Between two looks at the states: how old what others read may be."""

_SUFFIX = ".store"
_BYTES = 4096
"""Of a file, written and read in one call each, so that no reader finds a half of it."""


class StoreStates:
    """Keeps a file up to date from a thread of its own, as the engine may be idle.

    If there can be no file, this logs a warning and does nothing: the store works without.

    Args:
        root: path of the runtime directory.
        about: what does not change; all is to fit into 4 KiB as JSON.
    """

    def __init__(self, root: str, about: Mapping[str, str]) -> None:
        self._root = root
        self._about = {"pid": os.getpid(), **about}
        self._name = secrets.token_hex(8) + _SUFFIX
        self._fd = -1
        self._written = b""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, read: Callable[[], Mapping[str, str]]) -> None:
        """Report what `read` returns, which may be called from any thread, until `close`."""
        try:
            with RuntimeDirectory(self._root, create=True) as directory:
                self._fd = _create(directory.descriptor, self._name)
            self._write(read())
        except (OSError, ArenaError) as error:
            logger.warning("flexkv stat will not show this engine's shared stores: %s", error)
            return
        close_in_children(self)
        self._thread = threading.Thread(
            target=self._run, args=(read,), name="flexkv-store-states", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Remove the file. Idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fd >= 0:
            with (
                contextlib.suppress(OSError, ArenaError),
                RuntimeDirectory(self._root) as directory,
            ):
                os.unlink(self._name, dir_fd=directory.descriptor)
            self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """See `flexkv.forks.Owner`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _run(self, read: Callable[[], Mapping[str, str]]) -> None:
        while not self._ended.wait(SECONDS):
            with contextlib.suppress(OSError):  # a full disk, say: the next look tries again
                self._write(read())

    def _write(self, states: Mapping[str, str]) -> None:
        content = json.dumps({**self._about, **states}).encode().ljust(_BYTES)
        if content != self._written:
            if os.pwrite(self._fd, content, 0) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._name)
            self._written = content


def read_states(root: str) -> list[dict[str, object]]:
    """What each running engine of this user reports, in no order.

    Raises:
        ArenaError: the directory cannot be used.
    """
    try:
        with RuntimeDirectory(root) as directory:
            return list(_read_all(directory.descriptor))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ArenaError(
            f"runtime_dir {root!r} cannot be read: {error}; allowed: a directory of this user"
        ) from None


def _read_all(folder: int) -> Iterator[dict[str, object]]:
    for name in _names(folder):
        with _opened(folder, name) as fd:
            if fd is None or _lock(fd, fcntl.LOCK_SH):
                continue
            with contextlib.suppress(ValueError):  # another version's
                content = json.loads(os.pread(fd, _BYTES, 0))
                if isinstance(content, dict):
                    yield content


def _create(folder: int, name: str) -> int:
    """A locked file, and no other that nobody locks."""
    for other in _names(folder):
        with _opened(folder, other) as fd:
            if fd is not None and _lock(fd, fcntl.LOCK_SH):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(other, dir_fd=folder)
    # It gets its name once it is locked: until then it would look like a killed engine's.
    draft = name + ".new"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600, dir_fd=folder)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    return fd


def _names(folder: int) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(_SUFFIX)]


@contextlib.contextmanager
def _opened(folder: int, name: str) -> Iterator[int | None]:
    """A file of a directory, None if it is gone or no regular file."""
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
    """Whether nobody else holds the lock."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
