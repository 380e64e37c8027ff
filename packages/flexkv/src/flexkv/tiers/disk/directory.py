# SPDX-License-Identifier: Apache-2.0
"""Who owns which folder below a cache directory.

DIR/<fingerprint>/            the cache of the first engine with blocks of this kind
DIR/<fingerprint>-1/          that of a second one at the same time, where this is allowed
    lock  table  slab-00000 ...  counters.json
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from dataclasses import dataclass

from flexkv.errors import DiskError
from flexkv.tiers.disk.files import try_lock

TABLE = "table"
LOCK = "lock"
MAX_OWNERS = 64
"""Engines with blocks of one kind on one directory; more than the data-parallel ranks of a node."""

_FOLDER = re.compile(r"(?P<fingerprint>[0-9a-f]{16,64})(-(?P<number>[0-9]+))?")


@dataclass(slots=True)
class Folder:
    """A folder that this process owns until `release`.

    Attributes:
        path: absolute.
        lock: open file that holds the lock.
    """

    path: str
    lock: int

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def folders(root: str) -> list[str]:
    """Paths of the folders with a cache below `root`, by name.

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
    paths = [os.path.join(root, name) for name in names if _FOLDER.fullmatch(name)]
    return [path for path in paths if os.path.exists(os.path.join(path, LOCK))]


def lock_folder(path: str) -> Folder | None:
    """Own an existing folder; None if another process does.

    Raises:
        OSError: as the system says; FileNotFoundError if its owner removed it at the same time.
    """
    fd = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    folder = Folder(path, fd)
    try:
        if not try_lock(fd):
            folder.release()
            return None
        if os.fstat(fd).st_nlink == 0:
            # The lock of a file that is gone: another process may make the folder anew.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        folder.release()
        raise
    return folder


def claim(root: str, fingerprint: str, share: bool) -> Folder:
    """Own the folder of `fingerprint` below `root`, made if need be.

    Args:
        root: the cache directory, made if need be.
        fingerprint: of the blocks.
        share: take a folder of one's own beside those that are taken.

    Raises:
        DiskError: another process owns it, or it cannot be made.
    """
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        for number in range(MAX_OWNERS if share else 1):
            name = f"{fingerprint}-{number}" if number else fingerprint
            path = os.path.join(root, name)
            folder = _make(path)
            if folder is not None:
                return folder
    except OSError as error:
        raise DiskError(
            f"cannot use the cache directory {root} from ssd_cache_dir: {error}; "
            f"allowed: a directory that this user can create and write"
        ) from None
    raise DiskError(_taken(root, fingerprint, share))


def remove_others(root: str, mine: str, share: bool) -> list[str]:
    """Remove the folders below `root` that no process owns, so that `root` stays within its
    bound. Returns their paths.

    Args:
        root: the cache directory.
        mine: path of the folder that is kept.
        share: keep also those of the same fingerprint, for engines that are about to start.
    """
    removed = []
    fingerprint = _fingerprint(mine)
    for path in folders(root):
        if path == mine or (share and _fingerprint(path) == fingerprint):
            continue
        # What cannot be locked or removed is someone else's; their bound is theirs.
        with contextlib.suppress(OSError):
            if remove(path):
                removed.append(path)
    return removed


def remove(path: str) -> bool:
    """Remove a folder and all its bytes. False if a process owns it.

    Raises:
        OSError: as the system says.
    """
    folder = lock_folder(path)
    if folder is None:
        return False
    try:
        # The lock goes last: without it an engine that starts would fill what is being removed.
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name != LOCK and not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
        shutil.rmtree(path)
    finally:
        folder.release()
    return True


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
    try:
        with open(os.path.join(path, LOCK), encoding="ascii", errors="replace") as file:
            return file.read(32).strip() or "unknown"
    except OSError:
        return "unknown"


def _make(path: str) -> Folder | None:
    os.makedirs(path, mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        return lock_folder(path)
    # An engine with other blocks was removing it as it was made: by now it has.
    os.makedirs(path, mode=0o700, exist_ok=True)
    return lock_folder(path)


def _fingerprint(path: str) -> str:
    match = _FOLDER.fullmatch(os.path.basename(path))
    return match["fingerprint"] if match else ""


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
