# SPDX-License-Identifier: Apache-2.0
"""Opens directories that no other user has planted or can replace.

A path is walked from the root, one component at a time, each opened relative to the one above it.
Nobody can therefore exchange a component between its check and its use. Each component must belong
to root or to this user, or must be where nobody else can create one. Symbolic links are components,
too, and their targets are walked in the same way.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from pathlib import Path

_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")

_MOST_LINKS = 40
"""The most symbolic links in a path, as in the kernel (path_resolution(7))."""

WRITABLE = stat.S_IWGRP | stat.S_IWOTH
"""The bits of a mode that give other users the right to write."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""The bits of a mode that give other users any right."""

_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

_LASTING = {
    *(errno.EACCES, errno.EEXIST, errno.EFBIG, errno.EINVAL, errno.EISDIR, errno.ELOOP),
    *(errno.EMLINK, errno.ENAMETOOLONG, errno.ENOSYS, errno.ENOTDIR, errno.ENXIO),
    *(errno.EOPNOTSUPP, errno.EPERM),
}
"""Errors that say something about a path, a setting or a right: somebody has to change it. All
others may pass, such as EIO, ENOENT of a mount that comes late, ENOSPC and EROFS."""


def lasts(error: OSError) -> bool:
    """Whether an error stays until somebody changes a path, a setting or a right."""
    return error.errno in _LASTING


def open_directory(path: str, *, mode_above: int | None = None, private: bool = False) -> int:
    """Open a directory after a check of each component of its path.

    A component may belong to a third user only if root or this user has put it there: in a place to
    which nobody else can write, or as a mount. That user then counts as chosen, and may own
    components below.

    Args:
        mode_above: if given, missing directories are created: the last one with mode 0700, those
            above with this mode, from which the umask may take bits. It gives no other user the
            right to write.
        private: whether no third user may own a component, no other user may write to a directory
            above that is neither root's nor sticky, and the last component must be this user's own
            directory to which no other user can write, no symbolic link.

    Returns the descriptor, which the caller closes. Raises PermissionError with EPERM and the path
    of the component if one is refused, and OSError if a directory is missing, is none or cannot be
    opened or created.
    """
    walk = _Walk(path, mode_above, private)
    try:
        walk.run()
        if private:
            walk.check_own()
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=walk.fd)
    finally:
        os.close(walk.fd)


def nearest_directory(path: str) -> str:
    """The path itself if something is there, or else the nearest one above that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path) or "/"
    return path


def check_creatable(path: str) -> None:
    """Check that this user can create a missing directory, and those above it that are missing.
    Changes nothing. Raises OSError with the path of the component that cannot be created, or under
    which nothing can."""
    there = nearest_directory(path)
    if not os.path.isdir(there):
        raise _not_a_directory(there)
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), there)
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"user {os.geteuid()} cannot write there", there)
    most = os.pathconf(there, "PC_NAME_MAX")
    for name in os.path.relpath(path, there).split("/"):
        if len(os.fsencode(name)) > most:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)


def root_ids() -> set[int]:
    """Ids of the users that root's files seem to belong to. In a user namespace without root, such
    as an unprivileged container's, they show as the overflow user's (user_namespaces(7))."""
    if _UID_MAP.read_text().split() == ["0", "0", str(2**32 - 1)]:
        return {0}
    return {0, int(_OVERFLOW_UID.read_text())}


def refused(path: str, why: str) -> PermissionError:
    """Make the error of a file or directory that other users can change."""
    return PermissionError(errno.EPERM, why, path)


class _Walk:
    """A walk along a path. See `open_directory`. The caller closes `fd`, the descriptor of the
    directory that was reached, in the end."""

    def __init__(self, path: str, mode_above: int | None, private: bool) -> None:
        self._mode_above = mode_above
        self._private = private
        self._own = os.geteuid()
        self._roots = root_ids()
        self._chosen: set[int] = set()
        self._links = 0
        whole = os.path.join("" if os.path.isabs(path) else os.getcwd(), path)
        self._parts = deque(part for part in whole.split("/") if part not in {"", "."})
        self._link_end = len(self._parts)
        """So many components were left at the last symbolic link. Those of its target are not
        created."""
        self.fd = os.open("/", _FLAGS | os.O_DIRECTORY)

    def run(self) -> None:
        """Walk down to the last component."""
        while self._parts:
            self._step(self._parts.popleft())

    def check_own(self) -> None:
        """Refuse the directory that was reached unless it is this user's alone."""
        status = os.fstat(self.fd)
        if status.st_uid != self._own:
            raise refused(_path_of(self.fd), f"belongs to user {status.st_uid}")
        if status.st_mode & WRITABLE:
            raise refused(_path_of(self.fd), _open_to_others(status))

    def _step(self, name: str) -> None:
        above = os.fstat(self.fd)
        if self._private and above.st_uid not in self._roots and _is_open(above):
            raise refused(_path_of(self.fd), _open_to_others(above))
        below = self._open(name)
        try:
            status = os.fstat(below)
            if name != "..":  # what lies above was checked on the way down
                self._check(name, below, status, above)
            if stat.S_ISLNK(status.st_mode):
                self._follow(os.readlink("", dir_fd=below))
                return
            if not stat.S_ISDIR(status.st_mode):
                raise _not_a_directory(self._path(name))
            below, self.fd = self.fd, below
        finally:
            os.close(below)

    def _open(self, name: str) -> int:
        try:
            try:
                return self._open_component(name)
            except FileNotFoundError:
                if self._mode_above is None or len(self._parts) >= self._link_end:
                    raise
            # Another process may create it at the same moment.
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, self._mode_above if self._parts else stat.S_IRWXU, dir_fd=self.fd)
            return self._open_component(name)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path(name)) from None

    def _open_component(self, name: str) -> int:
        try:
            # With O_DIRECTORY, an automounter mounts what it has there.
            return os.open(name, _FLAGS | os.O_DIRECTORY, dir_fd=self.fd)
        except NotADirectoryError:  # a symbolic link, or no directory
            return os.open(name, _FLAGS, dir_fd=self.fd)

    def _check(self, name: str, below: int, status: os.stat_result, above: os.stat_result) -> None:
        user = status.st_uid
        if user == self._own or user in self._roots or user in self._chosen:
            return
        if self._private:
            raise refused(self._path(name), f"belongs to user {user}")
        # Only root mounts file systems for others.
        if above.st_mode & WRITABLE and _mount_of(below) == _mount_of(self.fd):
            raise refused(
                self._path(name),
                f"belongs to user {user}, who may have made it there without being asked, because "
                f"{_path_of(self.fd)} has mode {stat.S_IMODE(above.st_mode):04o}",
            )
        if not stat.S_ISLNK(status.st_mode):
            self._chosen.add(user)

    def _follow(self, target: str) -> None:
        self._links += 1
        if self._private and not self._parts:
            raise _not_a_directory(target)
        if self._links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), target)
        self._link_end = len(self._parts)
        self._parts.extendleft(
            reversed([part for part in target.split("/") if part not in {"", "."}])
        )
        if target.startswith("/"):
            root = os.open("/", _FLAGS | os.O_DIRECTORY)
            os.close(self.fd)
            self.fd = root

    def _path(self, name: str) -> str:
        return os.path.join(_path_of(self.fd), name)


def _is_open(status: os.stat_result) -> bool:
    """Whether other users can replace what is in a directory."""
    return bool(status.st_mode & WRITABLE) and not status.st_mode & stat.S_ISVTX


def _open_to_others(status: os.stat_result) -> str:
    return f"has mode {stat.S_IMODE(status.st_mode):o}, others can write to it"


def _not_a_directory(path: str) -> NotADirectoryError:
    return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _mount_of(fd: int) -> bytes:
    """The number of the mount that an open file lies on. A bind mount has the device of its
    source, but a number of its own."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_bytes().splitlines()
    return next(line for line in lines if line.startswith(b"mnt_id:"))
