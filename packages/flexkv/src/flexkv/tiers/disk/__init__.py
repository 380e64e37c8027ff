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
from flexkv.tiers.disk.directory import claim, remove_others
from flexkv.tiers.disk.drive import QUEUE_BYTES, THREADS, WRITE_BYTES, Drive
from flexkv.tiers.disk.files import Files, OsFiles
from flexkv.tiers.disk.store import DiskStore
from flexkv.tiers.disk.tier import DiskTier
from flexkv.transfer.link import Link

__all__ = ["DiskStore", "DiskTier", "Drive", "OsFiles", "open_disk_tier"]

logger = logging.getLogger(__name__)


def open_disk_tier(
    roots: Sequence[str],
    fingerprint: str,
    slot_bytes: int,
    capacity: int,
    *,
    share: bool = False,
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
        day_bytes: bytes that may be written in 24 hours, of all directories together.
        queue_bytes: bytes that may wait, for all directories together.
        stall_seconds: a directory with a read or write that takes longer is left out until it
            ends.
        files: the system calls; the real ones if None.

    Raises:
        DiskError: a directory cannot be created, owned, read or filled. None is left open.
    """
    parts = len(roots)
    drives: list[Drive] = []
    try:
        for number, root in enumerate(roots):
            folder = claim(root, fingerprint, share)
            try:
                removed = remove_others(root, folder.path, share)
            except DiskError:
                folder.release()
                raise
            for path in removed:
                logger.info(
                    "removed %s, blocks of another model, to stay within ssd_cache_gb", path
                )
            store = DiskStore(
                files or OsFiles(), folder, fingerprint, slot_bytes, capacity // parts
            )
            if not store.direct:
                logger.warning("%s has no direct I/O: blocks go through the page cache", root)
            # Two at least: the checksum of one is computed while the other is written.
            write_bytes = max(WRITE_BYTES, 2 * slot_bytes)
            waiting = min(queue_bytes // parts, QUEUE_BYTES)
            link = Link(f"flexkv-disk{number}", THREADS, write_bytes, waiting, stall_seconds)
            drives.append(Drive(store, link, None if day_bytes is None else day_bytes // parts))
    except DiskError:
        for drive in drives:
            drive.close()
        raise
    return DiskTier(drives)
