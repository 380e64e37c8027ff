# SPDX-License-Identifier: Apache-2.0
"""The runtime directory: the sockets of one user's engines, and a lock.

    <digest of the engine's id>.sock    an engine listens here while it lives
    lock                                held while sockets are created and removed
    engines                             held by the schedulers that use the service here
    <16 hex digits>.store, .health      see `flexkv.session.state_reports`

A user who can write to the directory could replace a socket and get an engine's blocks. The
directory must therefore belong to this user alone, and everything in it is opened relative to the
checked directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import stat
import time
from collections.abc import Iterator

from flexkv.session.wire import peer_of
from flexkv.system.directories import check_creatable, open_directory
from flexkv.system.regular_files import open_regular
from flexkv.types.errors import ArenaError

_LOCK = "lock"
_LOCK_SECONDS = 30.0
"""Seconds to wait for the lock. Engines hold it for milliseconds, unless one is stopped."""

_RETRY_SECONDS = 0.02
"""Pause between two attempts to lock."""
_BACKLOG = 64
"""Connections that wait for rank 0: more than ranks of an engine connect at once."""


class RuntimeDirectory:
    """An open runtime directory that only this user can write to. With `create`, it and missing
    directories above it are created with mode 0700. Raises ArenaError if the directory cannot be
    used, or other users could put files there, and FileNotFoundError without `create`."""

    def __init__(self, path: str, *, create: bool = False) -> None:
        self._path = path
        try:
            self._fd = open_directory(path, mode_above=0o700 if create else None, private=True)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not create:
                raise
            if error.errno == errno.EPERM:
                raise _refused(path, f"{error.filename} {error.strerror}") from None
            raise _refused(path, str(error)) from None

    def __enter__(self) -> RuntimeDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def descriptor(self) -> int:
        """The descriptor of the open directory, valid until `close`."""
        return self._fd

    @contextlib.contextmanager
    def locked(self, file: str = _LOCK, seconds: float | None = None) -> Iterator[None]:
        """Hold the lock on a file for the block. Every process that creates or removes files in the
        directory holds the default one. Raises ArenaError if another process holds it for too long,
        and OSError if it is no file of this user's with one name."""
        fd = open_regular(self._fd, file, os.O_RDWR | os.O_CREAT)
        try:
            self._lock(fd, file, _LOCK_SECONDS if seconds is None else seconds)
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
        finally:
            os.close(fd)

    def hold(self, file: str) -> int:
        """Show by a lock on a file that this process lives; see `is_held`. Returns the file's
        descriptor, which the caller closes to end this. Raises OSError if the file is none of this
        user's with one name, and BlockingIOError while `is_held` looks."""
        fd = open_regular(self._fd, file, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd

    def is_held(self, file: str) -> bool:
        """Whether a living process called `hold` for this file. Raises OSError; see `hold`."""
        fd = open_regular(self._fd, file, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def listen(self, name: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Create the socket of the engine `name`, of a kind of socket(2), and listen on it. Removes
        the sockets of killed engines. The caller closes the listening socket. Raises ArenaError if
        a living process listens there already, or the directory cannot be used."""
        file = _file_of(name)
        try:
            with self.locked():
                self._sweep()
                owner = self._owner(file, kind)
                if owner is not None:
                    raise ArenaError(owned_message(name, owner))
                return self._bind(file, kind)
        except OSError as error:
            raise self._refused(str(error)) from None

    def connect(self, name: str, timeout: float, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Connect to the process that listens for the engine `name` with a socket of this kind. The
        connection, which the caller closes, has a timeout in seconds.

        Raises:
            FileNotFoundError, ConnectionRefusedError, BlockingIOError: no process listens, or its
                queue is full.
            OSError: the connection failed otherwise.
            ArenaError: a process of another user listens.
        """
        connection = socket.socket(socket.AF_UNIX, kind)
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

    @staticmethod
    def has_socket(path: str, name: str) -> bool:
        """Whether the directory at `path` has a socket of `name`; its owner may have been killed.
        Raises OSError if the directory cannot be read."""
        try:
            return stat.S_ISSOCK(os.stat(os.path.join(path, _file_of(name))).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def shows(self, name: str) -> bool:
        """Whether others find the socket `name` of this directory, which may have been removed or
        replaced since."""
        file = _file_of(name)
        try:
            own = os.stat(file, dir_fd=self._fd)
            return os.path.samestat(own, os.stat(os.path.join(self._path, file)))
        except OSError:
            return False

    def remove(self, name: str) -> None:
        """Remove the socket of the engine `name`, on which this process listens."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_file_of(name), dir_fd=self._fd)

    def close(self) -> None:
        """Close the directory. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _refused(self, why: str) -> ArenaError:
        return _refused(self._path, why)

    def _address(self, file: str) -> str:
        # This path fits into the 107 bytes of a socket's address, however long the directory's is.
        return f"/proc/self/fd/{self._fd}/{file}"

    def _lock(self, fd: int, file: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ArenaError(
                        f"another process holds {file!r} in runtime_dir {self._path!r} for "
                        f"{seconds:.0f} s; allowed: to start again once it has ended"
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

    def _owner(self, file: str, kind: int = socket.SOCK_STREAM) -> int | None:
        """The id of the process that listens at a socket; None if none does, 0 if it is unknown.
        Does not wait, because this process holds the lock and the other one may be stopped."""
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)
            try:
                probe.connect(self._address(file))
            except (FileNotFoundError, ConnectionRefusedError):
                return None
            except OSError:  # for example, its queue is full
                return 0
            return peer_of(probe).pid

    def _bind(self, file: str, kind: int) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, kind)
        try:
            os.fchmod(listener.fileno(), 0o600)  # the socket's file gets this mode
            listener.bind(self._address(file))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener


def check_runtime_directory(path: str) -> bool:
    """Check that this user can use or create a runtime directory. Changes nothing. Returns whether
    it exists; raises ArenaError if it cannot be used or created."""
    try:
        with RuntimeDirectory(path):
            return True
    except FileNotFoundError:
        try:
            check_creatable(path)
        except OSError as error:
            raise _refused(path, f"{error.filename}: {error.strerror}") from None
        return False


def _refused(path: str, why: str) -> ArenaError:
    return ArenaError(
        f"runtime_dir {path!r} cannot be used: {why}; allowed: an absolute path of a directory "
        f"that this user can create and write, no symbolic link; no other user may own or write to "
        f"it or to those above it (chmod go-w), unless root's or sticky"
    )


def owned_message(name: str, pid: int) -> str:
    """The error of an engine that cannot start because another one has its id, which has the
    process id `pid`, or 0 if that is unknown."""
    which = pid or "that does not answer"
    return (
        f"the arena of engine id {name!r} is owned by the living process {which}; allowed: an "
        f"engine_id of its own for every engine (leave it out to get one), and to start an engine "
        f"again once all its processes have ended"
    )


def _file_of(name: str) -> str:
    # Engine ids are free text, of any length.
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest() + ".sock"
