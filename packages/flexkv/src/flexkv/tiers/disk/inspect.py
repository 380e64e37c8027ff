# SPDX-License-Identifier: Apache-2.0
"""The figures of a folder, for processes that do not own it, while an engine may own and change it.

The contents may change during a read. A caller that finds an error must read again before it
reports the error.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.system.regular_files import closing_fd
from flexkv.tiers.disk.files import OsFiles, exists, open_folder, reason_of
from flexkv.tiers.disk.folder import disk_bytes, fingerprint_of, newer_version, owner_of
from flexkv.tiers.disk.ledger import load_ledger
from flexkv.tiers.disk.slabs import slab_name, slots_per_slab
from flexkv.tiers.disk.table_reader import FoundTable, read_table
from flexkv.types.errors import DiskError


@dataclass(frozen=True, slots=True)
class FolderState:
    """The figures of a folder.

    Attributes:
        owner: process id of the engine that owns the folder; None if no engine does. See
            `owner_of`.
        block_bytes: bytes of a block; 0 if the folder has no table.
        used_slots, used_bytes: the blocks in its table.
        disk_bytes: bytes that its files take on disk.
        hit_blocks, damaged_blocks, written_bytes: what all owners together have read and found
            intact, have found damaged, and have written.
        written_bytes_day: bytes written in the last 24 hours. The oldest hour counts whole, as in
            the write budget.
        day_is_known: whether that counts all writes of the time. False for a day after the counters
            were damaged; the write budget then allows none.
        reads: state of the circuit of the owner's reads: closed, open or probing; None without an
            owner.
        writes: state of the circuit of the owner's writes, likewise.
        problem: why blocks or counters are lost or cannot be read, without its full stop; empty if
            they can.
    """

    path: str
    fingerprint: str
    owner: int | None
    block_bytes: int
    slots: int
    used_slots: int
    disk_bytes: int
    used_bytes: int
    hit_blocks: int
    damaged_blocks: int
    written_bytes: int
    written_bytes_day: int
    day_is_known: bool
    reads: str | None
    writes: str | None
    problem: str


def folder_state(path: str) -> FolderState:
    """Read the figures of the folder `path`. Counters may be some seconds old, because an owner
    saves them from time to time. Raises DiskError if the folder cannot be read."""
    try:
        with closing_fd(open_folder(path)) as folder:
            owner = owner_of(folder)
            table = read_table(OsFiles(), folder, fingerprint_of(path))
            ledger = load_ledger(folder)
            on_disk = disk_bytes(path)
            problems = table_problem(folder, table) or _lost_slabs(folder, table), ledger.problem
    except OSError as error:
        raise unreadable(path, error) from None
    header = table.header
    used = len({record.key for record in table.records()})
    block_bytes = header.slot_bytes if header else 0
    return FolderState(
        path=path,
        fingerprint=fingerprint_of(path),
        owner=owner,
        block_bytes=block_bytes,
        slots=header.num_slots if header else 0,
        used_slots=used,
        disk_bytes=on_disk,
        used_bytes=used * block_bytes,
        hit_blocks=ledger.hit_blocks,
        damaged_blocks=ledger.damaged_blocks,
        written_bytes=ledger.written_blocks * block_bytes,
        written_bytes_day=ledger.day_bytes,
        day_is_known=ledger.day_is_known,
        reads=None if owner is None else ledger.saved_state("reads").value,
        writes=None if owner is None else ledger.saved_state("writes").value,
        problem="; ".join(filter(None, problems)),
    )


def table_problem(folder: int, table: FoundTable) -> str:
    """Why the table that was read from the open directory `folder` cannot be used, without a full
    stop; empty if the table is intact or missing. Raises OSError if the table cannot be read."""
    version = newer_version(folder) if table.header is None else None
    if version is not None:
        return f"the table is of format {version}, written by a newer FlexKV: use that FlexKV"
    if table.damaged:
        return (
            "the header of the table is damaged, missing or of another cache: all blocks are lost"
        )
    if table.cut_slots:
        return f"the table was cut: the blocks of {table.cut_slots} slots are lost"
    return ""


def _lost_slabs(folder: int, table: FoundTable) -> str:
    """The missing files that should hold blocks of the table; empty if none is missing."""
    if table.header is None:
        return ""
    slots = slots_per_slab(table.header.slot_bytes)
    names = [slab_name(slab) for slab in sorted({each.slot // slots for each in table.records()})]
    lost = [name for name in names if not exists(folder, name)]
    if not lost:
        return ""
    return (
        f"{lost[0]} is missing"
        if len(lost) == 1
        else f"{lost[0]} and {len(lost) - 1} more files are missing"
    )


def unreadable(path: str, error: OSError) -> DiskError:
    """Make the error of a folder that cannot be read."""
    return DiskError(
        f"cannot read {path}: {reason_of(error)}; allowed: a folder that this user can read"
    )
