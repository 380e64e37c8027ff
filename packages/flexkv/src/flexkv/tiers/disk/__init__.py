# SPDX-License-Identifier: Apache-2.0
"""Blocks on local disks. They have a bound, every read verifies them, and they outlive the process.

`DiskTier` distributes blocks over drives. A `Drive` is one cache directory at run time, which an
`Opening` opens in the background. Its `DiskStore` has the files of one folder, and compares each
block that it reads with its checksum: `folder` names and locks the folder, `table` describes the
blocks, `slabs` hold them, `slot_index` finds them, and `ledger` counts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from flexkv.eviction import OTHERWISE, POLICIES, OnePolicy
from flexkv.index.ages import BlockAges
from flexkv.tiers.base import States
from flexkv.tiers.disk.disk_store import DiskStore, slots_within
from flexkv.tiers.disk.drive import QUEUE_BYTES, Drive
from flexkv.tiers.disk.files import OsFiles
from flexkv.tiers.disk.folder import MAX_OWNERS
from flexkv.tiers.disk.opening import DriveSpec, Opening, check_apart, places_of
from flexkv.tiers.disk.tier import DiskTier

__all__ = [
    "MAX_OWNERS",
    "DiskStore",
    "DiskTier",
    "Drive",
    "MakePolicy",
    "OsFiles",
    "open_disk_tier",
]

MakePolicy: TypeAlias = Callable[[int], OnePolicy]
"""Makes the eviction policy for a number of slots."""

OPEN_SECONDS = 5.0
"""Longest wait of a start for its directories: half of it until each is checked, the rest until
each is open. A directory that needs longer is used once it is open. Not tuned."""


def open_disk_tier(
    roots: Sequence[str],
    fingerprint: str,
    slot_bytes: int,
    capacity: int,
    *,
    owners: int = 1,
    keep_others: bool = True,
    day_bytes: int | None = None,
    queue_bytes: int = QUEUE_BYTES,
    stall_seconds: float = 1.0,
    files: OsFiles | None = None,
    policy: MakePolicy = POLICIES[OTHERWISE],
    identity: Sequence[str] = (),
    states: Callable[[str], States | None] = lambda root: None,
    ages: BlockAges | None = None,
) -> DiskTier:
    """Open or create the caches of one kind of blocks in the directories `roots`.

    A directory that cannot be used now is opened in the background: it hangs, a system call fails,
    there is no room, or another engine has it. The tier uses it once it is open, and does without
    it and its part of the capacity meanwhile. Returns the tier. The caller closes it. Raises
    DiskError if a directory is refused until somebody changes a setting or a file, or two are one
    or in each other. None is left open.

    Args:
        roots: cache directories, each preferably on a disk of its own.
        fingerprint: the fingerprint of the blocks, hexadecimal.
        slot_bytes: bytes of a block, a multiple of 4 KiB.
        capacity: the most bytes on disk, of all directories together; each gets an equal part.
        owners: how many engines may have a cache of these blocks in the directories, at most
            `MAX_OWNERS`. This process makes folders of its own if other engines own the present
            ones.
        keep_others: whether folders of other models that no engine uses stay while there is room.
        day_bytes: bytes that may be written in 24 hours, of all directories together; None for no
            limit.
        queue_bytes: bytes that may wait, of all directories together.
        stall_seconds: a read or write that takes longer hangs. A directory is skipped while half of
            its threads hang and no job ends.
        files: the system calls; the real ones if None.
        policy: makes the eviction policy for a number of slots: those of all directories, which
            share one policy.
        identity: the parts of the fingerprint, each `NAME: VALUE`, which are kept as text. If a
            directory has only blocks of this model under another fingerprint, the log names the
            parts that differ.
        states: makes what reports to other processes that a directory is not open; None for
            nothing.
        ages: of the cache's blocks; None if their age does not matter.
    """
    parts = len(roots)
    if parts > 1:
        check_apart(places_of(roots))
    openings: list[Opening] = []
    accepted = False
    began = time.monotonic()
    try:
        for number, root in enumerate(roots):
            spec = DriveSpec(
                root,
                f"flexkv-disk{number}",
                fingerprint,
                slot_bytes,
                capacity // parts,
                owners,
                keep_others,
                None if day_bytes is None else day_bytes // parts,
                min(queue_bytes // parts, QUEUE_BYTES),
                stall_seconds,
                files or OsFiles(),
                identity,
                ages,
            )
            openings.append(Opening(spec, states(root)))
        # Nothing is removed or allocated if a directory is refused.
        for each in openings:
            each.await_check(max(0.0, began + OPEN_SECONDS / 2 - time.monotonic()))
        for each in openings:
            if each.refusal is not None:
                raise each.refusal
        for each in openings:
            each.allow()
        for each in openings:
            each.await_try(max(0.0, began + OPEN_SECONDS - time.monotonic()))
        for each in openings:
            each.accept(time.monotonic() - began)
        tier = DiskTier(openings, policy, slots_within(capacity // parts, slot_bytes))
        accepted = True
        return tier
    finally:
        if not accepted:
            for each in openings:
                each.begin_close()
            for each in openings:
                each.close()
