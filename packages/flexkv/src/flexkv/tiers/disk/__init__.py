# SPDX-License-Identifier: Apache-2.0
"""Blocks on local disks. They have a bound, every read verifies them, and they outlive the process.

`DiskTier` distributes blocks over drives. A `Drive` is one cache directory at run time. Its
`DiskStore` has the files of one folder: `directory` names and locks the folder, `claims` does so
in all directories that answer, `table` describes
the blocks, `slabs` hold them, `index` finds them, and `ledger` counts them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from flexkv.errors import DiskError
from flexkv.tiers.disk.claims import claim_all, none_answers, work_in
from flexkv.tiers.disk.directory import Folder
from flexkv.tiers.disk.drive import QUEUE_BYTES, THREADS, WRITE_BYTES, Drive
from flexkv.tiers.disk.files import Files, OsFiles, reason_of
from flexkv.tiers.disk.identity import report_differences, save_identity
from flexkv.tiers.disk.removal import check_room, make_room, remove_others
from flexkv.tiers.disk.store import DiskStore, bytes_of
from flexkv.tiers.disk.tier import DiskTier
from flexkv.tiers.link import Link

__all__ = ["DiskStore", "DiskTier", "Drive", "OsFiles", "open_disk_tier"]

logger = logging.getLogger(__name__)


def open_disk_tier(
    roots: Sequence[str],
    fingerprint: str,
    slot_bytes: int,
    capacity: int,
    *,
    share: bool = False,
    keep_others: bool = True,
    day_bytes: int | None = None,
    queue_bytes: int = QUEUE_BYTES,
    stall_seconds: float = 1.0,
    files: Files | None = None,
    identity: Sequence[str] = (),
) -> DiskTier:
    """Open or create the caches of one kind of blocks in the directories `roots`.

    Args:
        roots: cache directories, each preferably on a disk of its own. A directory that does not
            answer is left out, with its part of the capacity; see `claim_all` and `work_in`.
        fingerprint: the fingerprint of the blocks, hexadecimal.
        slot_bytes: bytes of a block, a multiple of 4 KiB.
        capacity: the most bytes on disk, of all directories together; each gets an equal part.
        share: whether this process makes folders of its own if another engine owns the present
            ones.
        keep_others: whether folders of other models that no engine uses stay while there is room.
        day_bytes: bytes that may be written in 24 hours, of all directories together; None for no
            limit.
        queue_bytes: bytes that may wait, of all directories together.
        stall_seconds: a read or write that takes longer hangs. A directory is skipped while half of
            its threads hang and no job ends.
        files: the system calls; the real ones if None.
        identity: the parts of the fingerprint, each `NAME: VALUE`, which are kept as text. If a
            directory has only blocks of this model under another fingerprint, the log names the
            parts that differ.

    Returns:
        The tier. The caller closes it.

    Raises:
        DiskError: a directory cannot be created, owned, read or filled, or none answers. None is
            left open.
    """
    parts = len(roots)
    part = capacity // parts
    size = bytes_of(part, slot_bytes)
    folders: dict[str, Folder] = {}
    drives: list[Drive] = []
    opened = False
    try:
        folders = claim_all(roots, fingerprint, share)
        # Nothing is removed or allocated unless all of it can be.
        for root in list(folders):
            work_in(folders, root, partial(_check, root, size, share))
        for number, root in enumerate(list(folders)):
            store = work_in(
                folders,
                root,
                partial(
                    _open, root, size, share, files or OsFiles(), fingerprint, slot_bytes, part
                ),
            )
            if store is None:
                continue
            begins_empty = not len(store.index)
            work_in(folders, root, partial(_name, root, identity, fingerprint, begins_empty))
            if not store.direct:
                logger.warning(
                    "%s does not support direct I/O; blocks go through the page cache", root
                )
            # At least two blocks: the checksum of one is computed while the other is written.
            write_bytes = max(WRITE_BYTES, 2 * slot_bytes)
            waiting = min(queue_bytes // parts, QUEUE_BYTES)
            link = Link(f"flexkv-disk{number}", THREADS, write_bytes, waiting, stall_seconds)
            drives.append(Drive(store, link, None if day_bytes is None else day_bytes // parts))
        if not drives:
            raise none_answers(roots)
        for root in [] if keep_others else list(folders):
            work_in(folders, root, partial(_remove_others, root, share))
        opened = True
    except OSError as error:
        raise DiskError(
            f"cannot use {';'.join(roots)} from ssd_cache_dir: {reason_of(error)}; allowed: "
            f"directories that this user can create, read and write"
        ) from None
    finally:
        if not opened:
            for drive in drives:
                drive.close()
            for folder in folders.values():
                folder.release()
    return DiskTier(drives)


def _check(root: str, size: int, share: bool, folder: Folder) -> None:
    check_room(root, folder.path, size, share)


def _open(  # noqa: PLR0917 - a part of `open_disk_tier`
    root: str,
    size: int,
    share: bool,
    files: Files,
    fingerprint: str,
    slot_bytes: int,
    capacity: int,
    folder: Folder,
) -> DiskStore:
    make_room(root, folder.path, size, share)
    return DiskStore(files, folder, fingerprint, slot_bytes, capacity)


def _name(
    root: str, identity: Sequence[str], fingerprint: str, begins_empty: bool, folder: Folder
) -> None:
    if begins_empty:
        report_differences(root, identity, fingerprint)
    save_identity(folder.fd, identity)


def _remove_others(root: str, share: bool, folder: Folder) -> None:
    remove_others(root, folder.path, share)
