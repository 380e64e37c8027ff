# SPDX-License-Identifier: Apache-2.0
"""Running engines report the states of their shared stores in files of the runtime directory.

    <16 hex digits>.store    one store of one engine, as JSON; the engine holds its lock

A killed engine leaves a file without a lock. Readers skip it, and the next engine that starts
removes it.
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
"""Seconds between two updates of the file, the most that a reader sees it late. Not tuned."""

_SUFFIX = ".store"
_DRAFT = f"{_SUFFIX}.new"
_BYTES = 4096
"""Bytes of a file. One call writes it and one call reads it, so that no reader finds half of it."""


class StoreStates:
    """Keeps the file of one shared store up to date, from a thread of its own because the engine
    may be idle.

    If the file cannot be created, this logs a warning, and retries with each update. The store
    works without it.

    Args:
        root: path of the runtime directory.
        about: the fields that do not change. Together with the states they fit into 4 KiB of JSON.
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
        """Report the states until `close`.

        Args:
            read: returns the states; called from another thread.
        """
        try:
            self._update(read)
        except (OSError, ArenaError) as error:
            logger.warning(
                "flexkv stat does not show this engine's shared stores: %s; FlexKV retries", error
            )
        close_in_children(self)
        self._thread = threading.Thread(
            target=self._run, args=(read,), name="flexkv-store-states", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the file. Idempotent."""
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
            # Whatever it is, such as a full disk: the next update tries again. If the thread ended,
            # the last states would be shown for ever.
            with contextlib.suppress(Exception):
                self._update(read)

    def _update(self, read: Callable[[], Mapping[str, str]]) -> None:
        if self._fd < 0:
            with RuntimeDirectory(self._root, create=True) as directory, directory.locked():
                self._fd = _create(directory.descriptor, self._name)
        self._write(read())

    def _write(self, states: Mapping[str, str]) -> None:
        content = json.dumps({**self._about, **states}).encode().ljust(_BYTES)
        if content != self._written:
            if os.pwrite(self._fd, content, 0) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._name)
            self._written = content


def read_states(root: str) -> list[dict[str, object]]:
    """Read the reports of this user's running engines, in no particular order.

    Args:
        root: path of the runtime directory. A missing one gives no reports.

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
            with contextlib.suppress(ValueError):  # another version of FlexKV wrote the file
                content = json.loads(os.pread(fd, _BYTES, 0))
                if isinstance(content, dict):
                    yield content


def _create(folder: int, name: str) -> int:
    """Create a file and lock it. Removes the files of killed engines, which have no lock. The
    caller holds the directory's lock."""
    for other in [*_names(folder), *_names(folder, _DRAFT)]:
        with _opened(folder, other) as fd:
            if fd is not None and _lock(fd, fcntl.LOCK_SH):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(other, dir_fd=folder)
    # The file gets its name once it is locked. Before, it would look like that of a killed engine.
    draft = name.removesuffix(_SUFFIX) + _DRAFT
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600, dir_fd=folder)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    return fd


def _names(folder: int, suffix: str = _SUFFIX) -> list[str]:
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
