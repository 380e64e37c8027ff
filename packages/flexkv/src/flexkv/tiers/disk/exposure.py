# SPDX-License-Identifier: Apache-2.0
"""Takes the rights to a folder from other users, whoever gave them: an administrator's `chmod`, or
Kubernetes, which makes a volume writable for a group (fsGroup)."""

from __future__ import annotations

import contextlib
import logging
import os
import stat

from flexkv.system.directories import OTHERS, WRITABLE
from flexkv.system.regular_files import open_regular
from flexkv.tiers.disk.cache_directory import Folder, is_own
from flexkv.tiers.disk.files import is_regular
from flexkv.tiers.disk.lock_owner import LOCK
from flexkv.types.errors import DiskError

logger = logging.getLogger(__name__)


def close_to_others(folder: Folder) -> None:
    """Set a locked folder to mode 0700 and its files to 0600.

    If others could write there, they may have changed any block, and may still have files open. All
    files but the lock are then removed, so that the cache begins empty.

    Raises:
        DiskError: others can still write to the folder.
        OSError: a system call failed.
    """
    fd = folder.fd
    names = [name for name in os.listdir(fd) if is_own(name) and is_regular(fd, name)]
    before = os.fstat(fd).st_mode
    for name in names:
        before |= os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
    if not before & OTHERS:
        return
    writable = before & WRITABLE
    _set_mode(fd, stat.S_IRWXU)
    now = os.fstat(fd).st_mode
    if now & WRITABLE:
        raise DiskError(
            f"{folder.path} from ssd_cache_dir keeps mode {stat.S_IMODE(now):04o}, which lets "
            f"others write there and change blocks: this user may not change the mode, or the file "
            f"system has none; allowed: a folder that only its owner can write (chmod go-w, or the "
            f"mount options umask=077 or dir_mode=0700,file_mode=0600)"
        )
    for name in names:
        if writable and name != LOCK:
            os.unlink(name, dir_fd=fd)
        else:
            file = open_regular(fd, name, os.O_RDONLY)
            try:
                _set_mode(file, stat.S_IRUSR | stat.S_IWUSR)
            finally:
                os.close(file)
    logger.warning(
        "other users could %s %s or its files (mode %04o); FlexKV %ssets the modes 0700 and 0600; "
        "keep them (no chmod; in Kubernetes, fsGroupChangePolicy: OnRootMismatch)",
        "write to" if writable else "read",
        folder.path,
        stat.S_IMODE(before) & (stat.S_IRWXU | OTHERS),
        "discards its blocks, which they may have changed, and " if writable else "",
    )


def _set_mode(fd: int, mode: int) -> None:
    # It fails for a folder of root's, for instance, or on a file system without modes.
    with contextlib.suppress(OSError):
        os.fchmod(fd, mode)
