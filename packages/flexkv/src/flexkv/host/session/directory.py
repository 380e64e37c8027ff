# SPDX-License-Identifier: Apache-2.0
"""The runtime directory: the sockets of one user's engines, and a lock.

    <digest of the engine's id>.sock    an engine listens here while it lives
    lock                                held while sockets are created and removed
    <16 hex digits>.store               see `flexkv.host.session.store_states`

A user who can write to the directory could replace a socket and get an engine's blocks. The
directory must therefore belong to this user alone, and everything in it is opened relative to the
checked directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from flexkv.directories import make_directories
from flexkv.errors import ArenaError
from flexkv.host.session.wire import peer_of

_LOCK = "lock"
_LOCK_SECONDS = 30.0
"""Seconds to wait for the lock. Engines hold it for milliseconds, unless one is stopped meanwhile.
Not tuned."""

_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")

_RETRY_SECONDS = 0.02
"""Pause between two attempts to lock. Not tuned."""
_BACKLOG = 64
"""Connections that wait for rank 0: more than ranks of an engine connect at once. Not tuned."""


class RuntimeDirectory:
    """An open runtime directory that only this user can write to.

    Args:
        path: path of the directory.
        create: whether to create it and missing directories above it, with mode 0700.

    Raises:
        ArenaError: the directory cannot be used, or other users could put files there.
        FileNotFoundError: the directory does not exist, and `create` is False.
    """

    def __init__(self, path: str, *, create: bool = False) -> None:
        self._path = path
        try:
            if create:
                make_directories(path)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(path.rstrip("/") or "/", flags)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not create:
                raise
            raise self._refused(str(error)) from None
        try:
            self._verify()
        except OSError as error:
            self.close()
            raise self._refused(str(error)) from None
        except ArenaError:
            self.close()
            raise

    def __enter__(self) -> RuntimeDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def descriptor(self) -> int:
        """The descriptor of the open directory, valid until `close`."""
        return self._fd

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock for the block, as every process does that creates or removes
        files there.

        Raises:
            ArenaError: another process holds the lock for too long, or it is no file.
            OSError: a system call failed.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(_LOCK, flags, 0o600, dir_fd=self._fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise self._refused(f"{_LOCK!r} in it is not a file")
            self._lock(fd)
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
        finally:
            os.close(fd)

    def listen(self, name: str) -> socket.socket:
        """Create the socket of the engine `name` and listen on it. Removes the sockets of killed
        engines.

        Returns:
            The listening socket, which the caller closes.

        Raises:
            ArenaError: a living process listens there already, or the directory cannot be used.
        """
        file = _file_of(name)
        try:
            with self.locked():
                self._sweep()
                owner = self._owner(file)
                if owner is not None:
                    raise ArenaError(owned_message(name, owner))
                return self._bind(file)
        except OSError as error:
            raise self._refused(str(error)) from None

    def connect(self, name: str, timeout: float) -> socket.socket:
        """Connect to the process that listens for the engine `name`.

        Args:
            name: the engine's id.
            timeout: timeout of the connection, in seconds.

        Returns:
            The connection, which the caller closes.

        Raises:
            FileNotFoundError, ConnectionRefusedError, BlockingIOError: no process listens, or its
                queue is full.
            OSError: the connection failed otherwise.
            ArenaError: a process of another user listens.
        """
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout)
            connection.connect(self._address(_file_of(name)))
            peer = peer_of(connection)
            if peer.uid != os.geteuid():
                raise self._refused(f"process {peer.pid} of user {peer.uid} listens there")
        except (OSError, ArenaError):
            connection.close()
            raise
        return connection

    def remove(self, name: str) -> None:
        """Remove the socket of the engine `name`, on which this process listens."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_file_of(name), dir_fd=self._fd)

    def close(self) -> None:
        """Close the directory. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _verify(self) -> None:
        """Refuse a directory that other users can write to or replace. Checks the directory and
        those above it, up to one that root owns or whose entries only their owners can move
        (sticky).

        Raises:
            ArenaError: one of these directories is refused.
            OSError: a system call failed.
        """
        status = os.fstat(self._fd)
        self._verify_one("it", status)
        fd = os.dup(self._fd)
        try:
            while True:
                below, fd = fd, _open_parent(fd)
                os.close(below)
                above = os.fstat(fd)
                is_root = os.path.samestat(above, status)
                if is_root or above.st_uid in _root_ids() or above.st_mode & stat.S_ISVTX:
                    return
                self._verify_one(f"{os.readlink(f'/proc/self/fd/{fd}')} above it", above)
                status = above
        finally:
            os.close(fd)

    def _verify_one(self, name: str, status: os.stat_result) -> None:
        if status.st_uid != os.geteuid():
            raise self._refused(f"{name} belongs to user {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(status.st_mode)
            raise self._refused(f"{name} has mode {mode:o}, others can write to it")

    def _refused(self, why: str) -> ArenaError:
        return ArenaError(
            f"runtime_dir {self._path!r} cannot be used: {why}; allowed: an absolute path of a "
            f"directory that this user can create and write, no symbolic link; no other user may "
            f"write to it or to those above it (chmod go-w)"
        )

    def _address(self, file: str) -> str:
        # This path fits into the 107 bytes of a socket's address, however long the directory's is.
        return f"/proc/self/fd/{self._fd}/{file}"

    def _lock(self, fd: int) -> None:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._refused(
                        f"another process holds {_LOCK!r} in it for {_LOCK_SECONDS:.0f} s"
                    ) from None
            time.sleep(_RETRY_SECONDS)

    def _sweep(self) -> None:
        for file in os.listdir(self._fd):
            if not file.endswith(".sock"):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(file, dir_fd=self._fd, follow_symlinks=False)
                if stat.S_ISSOCK(status.st_mode) and self._owner(file) is None:
                    os.unlink(file, dir_fd=self._fd)

    def _owner(self, file: str) -> int | None:
        """The id of the process that listens at a socket; None if none does, 0 if it is unknown.
        Does not wait, because this process holds the lock and the other one may be stopped."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(self._address(file))
            except (FileNotFoundError, ConnectionRefusedError):
                return None
            except OSError:  # for example, its queue is full
                return 0
            return peer_of(probe).pid

    def _bind(self, file: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        try:
            os.fchmod(listener.fileno(), 0o600)  # the socket's file gets this mode
            listener.bind(self._address(file))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener


def owned_message(name: str, pid: int) -> str:
    """The error of an engine that cannot start because another one has its id.

    Args:
        name: the engine's id.
        pid: process id of the other engine; 0 if it is unknown.
    """
    which = pid or "that does not answer"
    return (
        f"the arena of engine id {name!r} is owned by the living process {which}; allowed: an "
        f"engine_id of its own for every engine (leave it out to get one), and to start an engine "
        f"again once all its processes have ended"
    )


def _file_of(name: str) -> str:
    # Engine ids are free text, of any length.
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest() + ".sock"


def _open_parent(fd: int) -> int:
    return os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)


def _root_ids() -> set[int]:
    """Ids of the users that root's files seem to belong to. In a user namespace without root, such
    as an unprivileged container's, they show as the overflow user's (user_namespaces(7))."""
    if _UID_MAP.read_text().split() == ["0", "0", str(2**32 - 1)]:
        return {0}
    return {0, int(_OVERFLOW_UID.read_text())}
