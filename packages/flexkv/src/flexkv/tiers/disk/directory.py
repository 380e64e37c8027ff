# SPDX-License-Identifier: Apache-2.0
"""Who owns which folder below a cache directory.

DIR/<fingerprint>/            the cache of the first engine with blocks of this kind
DIR/<fingerprint>-1/          that of a second one at the same time, where this is allowed
    lock  table  slab-00000 ...  counters.json
DIR/<name>.removed-<random>/  one that is being removed, or whose removal was cut off

A folder is FlexKV's if it has a table, known by its first bytes; what is named like a folder of
FlexKV alone may be anybody's. In such a folder only files named as above are touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from dataclasses import dataclass

from flexkv.errors import DiskError
from flexkv.forks import close_in_children
from flexkv.tiers.disk import table
from flexkv.tiers.disk.files import open_folder, open_regular, reason_of, try_lock

TABLE = "table"
LOCK = "lock"
RESET = "reset"
MAX_OWNERS = 64
"""Engines with blocks of one kind on one directory; more than the data-parallel ranks of a node."""

_FOLDER = re.compile(r"(?P<fingerprint>[0-9a-f]{16,64})(-[0-9]+)?(?P<removed>\.removed-[0-9a-f]+)?")
REMOVED = ".removed-"
"""In the name of a folder that is being removed, before random digits."""
_PID = re.compile(rb"[0-9\n\0]*")  # zeros: what a power failure may leave of it
_LOCK_BYTES = 32
_TRIES = 10
_TRY_SECONDS = 0.05
"""Who removes a folder holds its lock until the folder has another name: some system calls long.
An engine that starts meanwhile looks again so many times, so far apart."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Folder:
    """A folder that this process owns until `release`.

    Attributes:
        path: absolute.
        fd: open directory.
        lock: open file that holds the lock.
    """

    path: str
    fd: int
    lock: int = -1

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        for fd in (self.lock, self.fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.lock = -1

    def leave_to_parent(self) -> None:
        """See `forks.Owner`. The lock is of the open file: as long as a child had it open, nobody
        could own the folder."""
        self.release()


def folders(root: str, leftovers: bool = False) -> list[str]:
    """Paths of the folders below `root` that are FlexKV's, or that this user may not look into, by
    name; with `leftovers` also those whose removal was cut off.

    Raises:
        DiskError: `root` cannot be read.
    """
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise DiskError(
            f"cannot read the cache directory {root}: {error.strerror}; "
            f"allowed: a directory that FlexKV has used"
        ) from None
    matches = [match for name in names if (match := _FOLDER.fullmatch(name))]
    paths = [os.path.join(root, m.string) for m in matches if leftovers or not m["removed"]]
    return [path for path in paths if may_be_ours(path)]


def lock_folder(path: str) -> Folder | None:
    """Own an existing folder; None if another process does.

    Raises:
        OSError: as the system says; FileNotFoundError if its owner removed it at the same time.
    """
    folder = Folder(path, open_folder(path))
    try:
        folder.lock = open_regular(folder.fd, LOCK, os.O_RDWR | os.O_CREAT)
        free = try_lock(folder.lock)
        if not _is_at(path, folder.fd) or os.fstat(folder.lock).st_nlink == 0:
            # The lock of a folder that is gone: another process may make the folder anew.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not free:
            folder.release()
            return None
        if not _PID.fullmatch(os.pread(folder.lock, _LOCK_BYTES, 0)):
            raise OSError(errno.EEXIST, "is a file of another program", os.path.join(path, LOCK))
        os.ftruncate(folder.lock, 0)
        os.pwrite(folder.lock, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        folder.release()
        raise
    close_in_children(folder)
    return folder


def path_of(root: str, fingerprint: str, number: int) -> str:
    """The folder of the first engine with blocks of this kind, or of a later one."""
    return os.path.join(root, f"{fingerprint}-{number}" if number else fingerprint)


def claim(root: str, fingerprint: str, share: bool) -> Folder:
    """Own the folder of `fingerprint` below `root`, made if need be.

    Args:
        root: the cache directory, made if need be.
        fingerprint: of the blocks.
        share: take a folder of one's own beside those that are taken.

    Raises:
        DiskError: another process owns it, it cannot be made, or another user has left it open
            to everybody, who could put other blocks there.
    """
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        _refuse_others(root, os.stat(root), stat.S_IWOTH)
        for number in range(MAX_OWNERS if share else 1):
            # With `share` there is another folder to have at once.
            folder = _make(path_of(root, fingerprint, number), 1 if share else _TRIES)
            if folder is None:
                continue
            try:
                _refuse_others(folder.path, os.fstat(folder.fd), stat.S_IWGRP | stat.S_IWOTH)
            except DiskError:
                folder.release()
                raise
            return folder
    except OSError as error:
        raise DiskError(
            f"cannot use the cache directory {root} from ssd_cache_dir: {reason_of(error)}; "
            f"allowed: a directory that this user can create and write"
        ) from None
    raise DiskError(_taken(root, fingerprint, share))


def has_table(folder: int) -> bool:
    """Whether an open directory holds a table of FlexKV, of whatever version and state."""
    return table.has_magic(_first_pages(folder))


def newer_version(folder: int) -> int | None:
    """The format of the table in an open directory, if a newer FlexKV wrote it."""
    return table.newer_version(_first_pages(folder))


def _first_pages(folder: int) -> bytes:
    """The beginning of the table of an open directory; empty if it has none."""
    try:
        fd = open_regular(folder, TABLE, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return b""
        raise
    try:
        return os.pread(fd, table.HEADER_BYTES, 0)
    finally:
        os.close(fd)


def disk_bytes(path: str) -> int:
    """Bytes on disk of a folder's files, also while its owner replaces some."""
    total = 0
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512  # stat(2): units of 512
    return total


def owner(path: str) -> str:
    """Process id of the folder's last owner as text, or "unknown"."""
    content = b""
    with contextlib.suppress(OSError):
        folder = open_folder(path)
        try:
            fd = open_regular(folder, LOCK, os.O_RDONLY)
            content = os.pread(fd, _LOCK_BYTES, 0)
            os.close(fd)
        finally:
            os.close(folder)
    return content.decode("ascii", errors="replace").strip() or "unknown"


def _make(path: str, tries: int) -> Folder | None:
    """Own the folder `path`, made if need be; None if another process owns it."""
    for left in reversed(range(tries)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode=0o700)
        # An engine with other blocks may remove it as it is made.
        with contextlib.suppress(FileNotFoundError):
            folder = lock_folder(path)
            if folder is not None or not left:
                return folder
        time.sleep(_TRY_SECONDS)
    return None


def may_be_ours(path: str) -> bool:
    """Whether a folder is FlexKV's, or cannot be looked into."""
    try:
        folder = open_folder(path)
        try:
            return has_table(folder)
        finally:
            os.close(folder)
    except NotADirectoryError:
        return False
    except OSError as error:
        return error.errno != errno.ENOENT


def _is_at(path: str, folder: int) -> bool:
    """Whether the open directory `folder` is what `path` names."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(folder))
    return False


def fingerprint_of(path: str) -> str:
    """Of the blocks in the folder `path`, by its name."""
    match = _FOLDER.fullmatch(os.path.basename(path))
    return match["fingerprint"] if match else ""


def _refuse_others(path: str, status: os.stat_result, writable: int) -> None:
    """Check that no other user has made a directory and lets others write there, as the bits
    `writable` of its mode say.

    Raises:
        DiskError: one has.
    """
    if status.st_uid not in (0, os.geteuid()) and status.st_mode & writable:
        raise DiskError(
            f"{path} from ssd_cache_dir belongs to user {status.st_uid}, and its mode "
            f"{stat.S_IMODE(status.st_mode):04o} lets others write there, who could change blocks; "
            f"allowed: a directory of this user or of root, or one that only its owner can write"
        )


def _taken(root: str, fingerprint: str, share: bool) -> str:
    path = os.path.join(root, fingerprint)
    if share:
        return (
            f"all {MAX_OWNERS} folders of {path} from ssd_cache_dir are in use; "
            f"allowed: {MAX_OWNERS} engines of one kind on one directory"
        )
    return (
        f"{path} from ssd_cache_dir is in use by process {owner(path)}; allowed: one engine for "
        f"one directory, or ssd_in_use=own, which gives each engine a cache of its own there"
    )
