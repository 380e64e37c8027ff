# SPDX-License-Identifier: Apache-2.0
"""Reads a folder for processes that do not own it, beside the engine that does.

Nothing here writes, and nothing takes the folder's lock, not even shared and for a moment: an
engine that starts in that moment would find it taken and give up. The contents may therefore change
while they are read, and a caller that finds an error has to read them again.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flexkv.errors import DiskError
from flexkv.tiers.disk import directory, slabs, table
from flexkv.tiers.disk.files import (
    Files,
    open_data,
    open_folder,
    open_regular,
    read_fully,
    reason_of,
)
from flexkv.tiers.disk.ledger import load_ledger

_PART_BYTES = 1 << 20
_HEADER_READS = 3
"""Reads of a header: one that is replaced during a read may look damaged."""


class Record(NamedTuple):
    """The table's record of one slot; see `table.encode_record`."""

    slot: int
    key: bytes
    checksum: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The table of a folder as it was when it was read.

    Attributes:
        header: None if the folder has no table, or a table that an engine would replace.
        damaged: whether an engine would replace the table, and it is not just being created.
        parts: the bytes behind the header in parts of `_PART_BYTES`, by number; parts of zeros
            are left out.
    """

    header: table.Header | None
    damaged: bool
    parts: dict[int, bytes]

    def records(self) -> Iterator[Record]:
        """The intact records, by slot."""
        if self.header is None:
            return
        seal = self.header.seal
        for number, part in self.parts.items():
            first = number * (_PART_BYTES // table.RECORD_BYTES)
            yield from map(Record._make, table.decode_records(part, seal, first))


@dataclass(frozen=True, slots=True)
class FolderState:
    """A folder in figures.

    Attributes:
        path: of the folder.
        fingerprint: of its blocks, hexadecimal.
        owner: process id of the engine that owns the folder, None if none does; see `owner_of`.
        block_bytes: bytes of a block; 0 if there is no table.
        slots: blocks that the folder has room for.
        used_slots: blocks in its table.
        disk_bytes: bytes of its files on disk.
        used_bytes: bytes of the blocks in its table.
        hit_blocks: read back and intact, by all owners so far.
        damaged_blocks: found damaged by all owners so far.
        written_bytes: by all owners so far.
        written_bytes_day: in the last 24 hours, counted in whole hours as the write budget is.
        reads: state of the circuit of the owner's reads: closed, open or probing; None without an
            owner.
        writes: the same of its writes.
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
    reads: str | None
    writes: str | None


def folder_state(path: str) -> FolderState:
    """The state of the folder `path`. Its owner saved the counters at most some seconds ago.

    Raises:
        DiskError: the folder cannot be read.
    """
    try:
        folder = open_folder(path)
        try:
            owner = owner_of(folder)
            snapshot = read_table(folder, directory.fingerprint_of(path))
            ledger = load_ledger(folder)
            on_disk = directory.disk_bytes(path)
        finally:
            os.close(folder)
    except OSError as error:
        raise unreadable(path, error) from None
    header = snapshot.header
    used = len({record.key for record in snapshot.records()})
    block_bytes = header.slot_bytes if header else 0
    return FolderState(
        path=path,
        fingerprint=directory.fingerprint_of(path),
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
        reads=None if owner is None else ledger.saved_state("reads").value,
        writes=None if owner is None else ledger.saved_state("writes").value,
    )


def unreadable(path: str, error: OSError) -> DiskError:
    """The error for a folder that the system refuses to read."""
    return DiskError(
        f"cannot read {path}: {reason_of(error)}; allowed: a folder that this user can read"
    )


def read_table(folder: int, fingerprint: str) -> Snapshot:
    """The table of the open directory `folder` with blocks of `fingerprint`.

    Raises:
        OSError: of the system, except that a missing table is not an error.
    """
    pages = b""
    for _ in range(_HEADER_READS):
        try:
            fd = open_regular(folder, directory.TABLE, os.O_RDONLY)
        except FileNotFoundError:
            return Snapshot(None, damaged=False, parts={})
        try:
            pages = os.pread(fd, table.HEADER_BYTES, 0)
            header = table.Header.decode(pages)
            if header is not None and header.fingerprint == fingerprint:
                return Snapshot(header, damaged=False, parts=_read_parts(fd, header.num_slots))
        finally:
            os.close(fd)
    return Snapshot(None, damaged=any(pages), parts={})


def _read_parts(fd: int, num_slots: int) -> dict[int, bytes]:
    """The records of an open table, as far as they have data: a file may claim any size."""
    parts = {}
    end = table.table_bytes(num_slots)
    offset = table.HEADER_BYTES
    while offset < end:
        try:
            offset = max(offset, os.lseek(fd, offset, os.SEEK_DATA))
        except OSError as error:
            if error.errno != errno.ENXIO:  # no more data
                raise
            break
        number = (offset - table.HEADER_BYTES) // _PART_BYTES
        start = table.HEADER_BYTES + number * _PART_BYTES
        part = os.pread(fd, min(_PART_BYTES, end - start), start)
        if part.count(0) < len(part):
            parts[number] = part
        offset = start + _PART_BYTES
    return parts


def owner_of(folder: int) -> int | None:
    """Process id of the engine that owns the open directory `folder`; None if none does.

    Reads the kernel's list of locks, which does not touch the lock. The list contains only
    processes of this process's PID namespace and of those below it: an engine in another container
    is missing.

    Raises:
        OSError: of the system, except that a missing folder is not an error.
    """
    try:
        fd = open_regular(folder, directory.LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        file = f"{_lock_device(fd)}:{os.fstat(fd).st_ino}"
    finally:
        os.close(fd)
    with open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            # 1: FLOCK  ADVISORY  WRITE 19469 fe:00:2148231 0 EOF
            fields = line.split()
            if fields[1] == "FLOCK" and fields[3] == "WRITE" and fields[5] == file:
                return int(fields[4])
    return None


class SlotReader:
    """Reads slots of one folder past the page cache. For one thread.

    Borrows the open directory `folder`. Owns a buffer of one slot and one open file, because a
    large cache has more files than a process may open.
    """

    def __init__(self, files: Files, folder: int, slot_bytes: int) -> None:
        self._files = files
        self._folder = folder
        self._slot_bytes = slot_bytes
        self._slots_per_slab = slabs.slots_per_slab(slot_bytes)
        self._slab, self._fd = -1, -1
        # Anonymous memory begins at a page, as O_DIRECT asks for.
        self._buffer = memoryview(mmap.mmap(-1, slot_bytes))

    def file_of(self, slot: int) -> str:
        """Name of the file that contains `slot`."""
        return slabs.slab_name(slot // self._slots_per_slab)

    def read(self, slot: int) -> memoryview | None:
        """The bytes of `slot`, valid until the next call. None if the file is too short.

        Raises:
            OSError: of the system.
        """
        slab, place = divmod(slot, self._slots_per_slab)
        if slab != self._slab:
            self.close()
            self._fd, _ = open_data(self._files, self._folder, self.file_of(slot), os.O_RDONLY)
            self._slab = slab
        whole = read_fully(self._files, self._fd, self._buffer, place * self._slot_bytes)
        return self._buffer if whole else None

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            self._files.close(self._fd)
        self._slab, self._fd = -1, -1


def _lock_device(fd: int) -> str:
    """The device of an open file as in /proc/locks: the device of its mount.

    On btrfs stat(2) returns another device, one for each subvolume.
    """
    device = os.fstat(fd).st_dev
    major, minor = os.major(device), os.minor(device)
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
        mount = next(line.split()[1] for line in info if line.startswith("mnt_id:"))
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            number, _, name, *_ = line.split()
            if number == mount:
                major, minor = map(int, name.split(":"))
    return f"{major:02x}:{minor:02x}"
