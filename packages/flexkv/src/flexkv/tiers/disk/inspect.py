# SPDX-License-Identifier: Apache-2.0
"""Reads a folder for processes that do not own it, while an engine may own and change it.

Nothing here writes or takes the folder's lock, not even shared: an engine that starts at that
moment would find the lock taken and give up. The contents may therefore change during a read. A
caller that finds an error must read again before it reports the error.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flexkv.errors import DiskError
from flexkv.mounts import read_mounts
from flexkv.regular_files import open_regular
from flexkv.tiers.disk import directory, slabs, table
from flexkv.tiers.disk.files import (
    Files,
    open_data,
    open_folder,
    read_fully,
    reason_of,
)
from flexkv.tiers.disk.ledger import load_ledger

_PART_BYTES = 1 << 20
_HEADER_READS = 3
"""Attempts to read a header. If the engine replaces the header during a read, it may look damaged.
Not tuned."""


class Record(NamedTuple):
    """The table's record of one slot; see `table.encode_record`."""

    slot: int
    key: bytes
    checksum: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the table of a folder.

    Attributes:
        header: header of the table; None if the folder has no table, or one that an engine would
            replace.
        damaged: whether an engine would replace the table. False for a table that is being created.
        parts: the bytes behind the header by number of the part, each `_PART_BYTES` long, the last
            one shorter. Parts of zeros are left out.
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
    """The figures of a folder.

    Attributes:
        path: path of the folder.
        fingerprint: fingerprint of its blocks, hexadecimal.
        owner: process id of the engine that owns the folder; None if no engine does. See
            `owner_of`.
        block_bytes: bytes of a block; 0 if the folder has no table.
        slots: the number of blocks that the folder has room for.
        used_slots: the number of blocks in its table.
        disk_bytes: bytes that its files take on disk.
        used_bytes: bytes of the blocks in its table.
        hit_blocks: blocks that all owners together have read and found intact.
        damaged_blocks: blocks that all owners together have found damaged.
        written_bytes: bytes that all owners together have written.
        written_bytes_day: bytes written in the last 24 hours. The oldest hour counts whole, as in
            the write budget.
        reads: state of the circuit of the owner's reads: closed, open or probing; None without an
            owner.
        writes: state of the circuit of the owner's writes, likewise.
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
    """Read the figures of the folder `path`. Counters may be some seconds old, because an owner
    saves them from time to time.

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
    """Make the error of a folder that cannot be read."""
    return DiskError(
        f"cannot read {path}: {reason_of(error)}; allowed: a folder that this user can read"
    )


def read_table(folder: int, fingerprint: str) -> Snapshot:
    """Read the table of the open directory `folder`.

    Args:
        folder: descriptor of the open directory; borrowed.
        fingerprint: fingerprint of the blocks, hexadecimal. A table with another one counts as
            damaged.

    Returns:
        A copy of the table. A missing table gives an empty one.

    Raises:
        OSError: the table cannot be read.
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
    """Read the parts of an open table that have data. Holes are skipped, because a header may claim
    any number of slots."""
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
    """Find the process id of the engine that owns the open directory `folder`.

    Reads the kernel's list of locks and does not touch the lock. The list contains only processes
    of this PID namespace and of those below it. An engine in another container is missing.

    Returns:
        The process id; None if no visible process owns the folder, or it has no lock file.

    Raises:
        OSError: the lock file or the list cannot be read.
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
    """Reads slots of one folder by direct I/O where the file system can. For one thread.

    Owns a buffer of one slot. Keeps only one file open, because a large cache has more files than a
    process may open.

    Args:
        files: the system calls.
        folder: descriptor of the open directory; borrowed.
        slot_bytes: bytes of a slot, a multiple of 4 KiB.
    """

    def __init__(self, files: Files, folder: int, slot_bytes: int) -> None:
        self._files = files
        self._folder = folder
        self._slot_bytes = slot_bytes
        self._slots_per_slab = slabs.slots_per_slab(slot_bytes)
        self._slab, self._fd = -1, -1
        # Anonymous memory begins at a page boundary, which O_DIRECT requires.
        self._buffer = memoryview(mmap.mmap(-1, slot_bytes))

    def file_of(self, slot: int) -> str:
        """The name of the file that contains `slot`."""
        return slabs.slab_name(slot // self._slots_per_slab)

    def read(self, slot: int) -> memoryview | None:
        """Read a slot. Waits for the disk.

        Returns:
            The bytes of the slot, valid until the next call; None if the file is too short.

        Raises:
            OSError: the file cannot be opened or read.
        """
        slab, place = divmod(slot, self._slots_per_slab)
        if slab != self._slab:
            self.close()
            self._fd, _ = open_data(self._files, self._folder, self.file_of(slot), os.O_RDONLY)
            self._slab = slab
        whole = read_fully(self._files, self._fd, self._buffer, place * self._slot_bytes)
        return self._buffer if whole else None

    def close(self) -> None:
        """Close the open file. Idempotent."""
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
    for each in read_mounts():
        if each.number == mount:
            major, minor = map(int, each.device.split(":"))
    return f"{major:02x}:{minor:02x}"
