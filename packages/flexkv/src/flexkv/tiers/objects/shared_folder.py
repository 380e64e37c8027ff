# SPDX-License-Identifier: Apache-2.0
"""A folder of a file system that engines share, in place of a bucket.

Blocks are files with the names and envelopes of objects. A file appears under its name when it is
complete: it is renamed, or linked where it must not replace another. So a reader finds a whole file
or none, and a record that two engines create at once is that of one. A crash of a server may still
tear a file, which the envelope shows.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import time
from typing import NamedTuple

from obstore.store import LocalStore

from flexkv.system.directories import OTHERS, open_directory
from flexkv.system.regular_files import closing_fd
from flexkv.types.deadline import HungError, call_beside
from flexkv.types.errors import StoreSettingError

SCHEME = "file://"
_ALLOWED = (
    "the path of a folder that exists, belongs to this user and gives others no right (mkdir -m "
    "700), in a path that no other user can change"
)


class Freed(NamedTuple):
    """What `remove_older` has removed: the number of files, and their bytes."""

    files: int
    size: int


def open_shared_folder(url: str) -> LocalStore:
    """The store in the folder of a URL. Raises StoreSettingError if the folder is missing or hangs,
    or others may read or change it."""
    path = url.removeprefix(SCHEME)
    try:
        call_beside(path, functools.partial(_check, path))
    except HungError as error:
        raise StoreSettingError(f"objects_url {url!r} cannot be used: {error}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreSettingError(
            f"objects_url {url!r} cannot be used: {error.filename or path}: {reason}; allowed: "
            f"{_ALLOWED}"
        ) from None
    return LocalStore(path)


def remove_older(url: str, seconds: float, dry_run: bool = False) -> Freed:
    """Remove the blocks that were written more than `seconds` ago, and what writers that were
    killed have left. Engines may run meanwhile: for them a removed block is a miss. With `dry_run`,
    only count these files. Raises StoreSettingError as `open_shared_folder` does; OSError if a file
    cannot be removed."""
    open_shared_folder(url)
    root = os.path.join(url.removeprefix(SCHEME), "blocks")
    before, files, size = time.time() - seconds, 0, 0
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode) and status.st_mtime < before:
                    if not dry_run:
                        os.unlink(path)
                    files, size = files + 1, size + status.st_size
        if folder != root and not dry_run:
            with contextlib.suppress(OSError):  # it holds newer files
                os.rmdir(folder)
    return Freed(files, size)


def _check(path: str) -> None:
    """Raises OSError if others may read or change the folder."""
    with closing_fd(open_directory(path, private=True)) as folder:
        mode = os.fstat(folder).st_mode
    if mode & OTHERS:
        text = f"others have rights there (mode {stat.S_IMODE(mode):04o})"
        raise PermissionError(None, text, path)
