# SPDX-License-Identifier: Apache-2.0
"""Removes folders of FlexKV, on request or to make room. Files of other programs stay."""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import math
import os
import secrets

from flexkv.system.regular_files import closing_fd, open_regular
from flexkv.tiers.disk.files import is_regular, open_folder, try_lock
from flexkv.tiers.disk.folder import (
    LOCK,
    REMOVED,
    TABLE,
    disk_bytes,
    fingerprint_of,
    folders,
    is_own,
    lock_folder,
    may_be_ours,
    newer_version,
    path_of,
)
from flexkv.types.errors import DiskError, UnavailableError

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class Removal(enum.Enum):
    """The outcome of removing a folder."""

    REMOVED = "removed"
    IN_USE = "in use"
    FOREIGN_FILES = "holds files that are not FlexKV's"
    """FlexKV's files are removed; the folder and the other files stay."""


def check_room(root: str, mine: str, size: int, owners: int, asked: int) -> None:
    """Check that `make_room` can find enough room. Changes nothing. `asked`: bytes that
    `ssd_cache_gb` gives the folder, for the error. Raises UnavailableError if there is too little
    room now, or a system call failed; DiskError if the file system is smaller than `size`, or
    `root` cannot be read."""
    has, left = disk_bytes(mine), free_bytes(root)
    removable = 0
    for path in _others(root, mine, owners):
        # Another engine that starts may remove the folder meanwhile.
        with contextlib.suppress(OSError):
            removable += disk_bytes(path)
    if left + removable < size - has:
        said = os.statvfs(root)
        never = size > said.f_blocks * said.f_frsize
        raise (DiskError if never else UnavailableError)(
            f"ssd_cache_gb asks for {asked / _GIB:g} GiB in {mine}, which has {has / _GIB:.2f} GiB "
            f"already, and its file system has {left / _GIB:.2f} GiB left; allowed: a size that "
            f"fits beside the folders in use"
        )


def make_room(root: str, mine: str, size: int, owners: int) -> None:
    """Make room for the folder `mine` to grow to `size` bytes, those present included.

    If the file system has too little room, other folders of FlexKV below `root` are removed until
    it has enough. The folder that was owned longest ago is removed first. Leftovers of interrupted
    removals are always removed. Folders that `owners` engines with the same blocks use stay, for
    those that are about to start. Raises DiskError if `root` cannot be read.
    """
    need = size - disk_bytes(mine)
    for path in _others(root, mine, owners):
        if REMOVED in os.path.basename(path) or free_bytes(root) < need:
            _remove(path)


def remove_others(root: str, mine: str, owners: int) -> None:
    """Remove all folders that `make_room` may remove. Raises DiskError if `root` cannot be read."""
    for path in _others(root, mine, owners):
        _remove(path)


def _remove(path: str) -> None:
    # A folder that cannot be locked or removed is another user's.
    with contextlib.suppress(OSError):
        count = disk_bytes(path)
        if remove(path) is Removal.REMOVED:
            logger.info("removed %s, %.2f GiB that no engine used", path, count / _GIB)


def free_bytes(root: str) -> float:
    """Bytes that this user may still fill on the file system of `root`. Infinite if the file system
    reports no sizes. Raises OSError if statvfs(3) failed."""
    said = os.statvfs(root)
    return said.f_bavail * said.f_frsize if said.f_blocks else math.inf


def _others(root: str, mine: str, owners: int) -> list[str]:
    """Folders of FlexKV below `root` that no process owns and no newer FlexKV wrote, except those
    of `owners` engines with the blocks of `mine`. The one that was owned longest ago comes
    first."""
    kept = {path_of(root, fingerprint_of(mine), number) for number in range(owners)}
    found: dict[str, float] = {}
    for path in folders(root, leftovers=True):
        if path == mine or path in kept:
            continue
        # A folder that cannot be read is another user's.
        with contextlib.suppress(OSError), closing_fd(open_folder(path)) as folder:
            if _is_free(folder) and not newer_version(folder):
                found[path] = os.stat(LOCK, dir_fd=folder, follow_symlinks=False).st_mtime
    return sorted(found, key=lambda path: found[path])


def _is_free(folder: int) -> bool:
    """Whether no process owns the open directory `folder`."""
    with closing_fd(open_regular(folder, LOCK, os.O_RDWR)) as lock:
        return try_lock(lock)


def remove(path: str) -> Removal:
    """Remove FlexKV's files from a folder, and the folder if it holds no others. Raises OSError if
    a system call failed, or the folder is not FlexKV's, or a newer FlexKV wrote it."""
    # The directory above is resolved once: a link that somebody puts there between two calls leads
    # none of them elsewhere.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with closing_fd(os.open(os.path.dirname(path), flags)) as above:
        return _remove_in(above, path)


def would_remove(path: str) -> Removal:
    """What `remove` would do now. Changes nothing. Raises OSError as `remove` does."""
    if not may_be_ours(path):
        raise _not_ours(path)
    with closing_fd(open_folder(path)) as folder:
        with contextlib.suppress(FileNotFoundError):  # without a lock, no process owns it
            if not _is_free(folder):
                return Removal.IN_USE
        _, alone = _own_files(folder, path)
    return Removal.REMOVED if alone else Removal.FOREIGN_FILES


def _not_ours(path: str) -> OSError:
    return OSError(errno.EEXIST, "holds no table of FlexKV", path)


def _own_files(folder: int, path: str) -> tuple[list[str], bool]:
    """FlexKV's files in the open directory `folder`, and whether there are no others. Raises
    OSError if a system call failed, or a newer FlexKV wrote the folder."""
    if version := newer_version(folder):
        reason = f"is of format {version}: only the newer FlexKV that wrote it may remove it"
        raise OSError(errno.EEXIST, reason, path)
    names = os.listdir(folder)
    ours = [name for name in names if is_own(name) and is_regular(folder, name)]
    return ours, len(ours) == len(names)


def _remove_in(above: int, path: str) -> Removal:
    """`remove` the folder at `path`, which is in the open directory `above`."""
    if not may_be_ours(path, above):
        raise _not_ours(path)
    folder = lock_folder(path, above)
    if folder is None:
        return Removal.IN_USE
    try:
        ours, alone = _own_files(folder.fd, path)
        base = os.path.basename(path)
        if alone and REMOVED not in base:
            # An engine that starts meanwhile can create the folder again at once.
            away = f"{base}{REMOVED}{secrets.token_hex(4)}"
            os.rename(base, away, src_dir_fd=above, dst_dir_fd=above)
            base = away
        # The table goes second to last, before the lock. A folder without a table is not FlexKV's,
        # so an interrupted removal would leave the slabs for ever.
        for name in sorted(ours, key=lambda name: (name == LOCK, name == TABLE)):
            os.unlink(name, dir_fd=folder.fd)
        if alone:
            os.rmdir(base, dir_fd=above)
        try:
            os.fsync(above if alone else folder.fd)
        except OSError as error:
            reason = f"is removed, but a power failure may bring it back ({error.strerror})"
            raise OSError(error.errno, reason, path) from None
    finally:
        folder.release()
    return Removal.REMOVED if alone else Removal.FOREIGN_FILES
