# SPDX-License-Identifier: Apache-2.0
"""Blocks on local disks: verified on every read, bounded, warm after a restart.

From the outside in: `DiskTier` spreads blocks over drives; a `Drive` is one cache directory at
run time; its `DiskStore` is the files of one folder, which `directory` names and locks, described
by `table`, filled through `slabs`, indexed by `index` and counted by `ledger`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from flexkv.errors import DiskError
from flexkv.tiers.disk.directory import Folder, claim
from flexkv.tiers.disk.drive import QUEUE_BYTES, THREADS, WRITE_BYTES, Drive
from flexkv.tiers.disk.files import Files, OsFiles, reason_of
from flexkv.tiers.disk.removal import check_room, make_room, remove_others
from flexkv.tiers.disk.store import DiskStore, bytes_of, check_table
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
) -> DiskTier:
    """Open or create the caches of one kind of blocks in the directories `roots`.

    Args:
        roots: cache directories, best each on a disk of its own.
        fingerprint: hexadecimal, of the blocks.
        slot_bytes: bytes of a block, a multiple of 4 KiB.
        capacity: bytes on disk at most, of all directories together; each gets an equal part.
        share: give this process folders of its own where another engine owns those that are there.
        keep_others: keep other models' folders that no engine uses as long as there is room.
        day_bytes: bytes that may be written in 24 hours, of all directories together.
        queue_bytes: bytes that may wait, for all directories together.
        stall_seconds: a directory with a read or write that takes longer is left out until it
            ends.
        files: the system calls; the real ones if None.

    Raises:
        DiskError: a directory cannot be created, owned, read or filled. None is left open.
    """
    parts = len(roots)
    part = capacity // parts
    size = bytes_of(part, slot_bytes)
    folders: list[Folder] = []
    drives: list[Drive] = []
    opened = False
    try:
        for root in roots:
            folders.append(claim(root, fingerprint, share))
        # Nothing is removed or allocated unless all of it can be.
        for root, folder in zip(roots, folders, strict=True):
            check_table(folder)
            check_room(root, folder.path, size, share)
        for number, (root, folder) in enumerate(zip(roots, folders, strict=True)):
            make_room(root, folder.path, size, share)
            store = DiskStore(files or OsFiles(), folder, fingerprint, slot_bytes, part)
            if not store.direct:
                logger.warning(
                    "%s does not support direct I/O; blocks go through the page cache", root
                )
            # Two at least: the checksum of one is computed while the other is written.
            write_bytes = max(WRITE_BYTES, 2 * slot_bytes)
            waiting = min(queue_bytes // parts, QUEUE_BYTES)
            link = Link(f"flexkv-disk{number}", THREADS, write_bytes, waiting, stall_seconds)
            drives.append(Drive(store, link, None if day_bytes is None else day_bytes // parts))
        if not keep_others:
            for root, folder in zip(roots, folders, strict=True):
                remove_others(root, folder.path, share)
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
            for folder in folders:
                folder.release()
    return DiskTier(drives)
