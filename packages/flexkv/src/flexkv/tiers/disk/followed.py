# SPDX-License-Identifier: Apache-2.0
"""Reads a folder while another process of this machine owns and writes it.

Nothing here writes or takes a lock. Lookups use a copy of the folder's table, which `look` brings
up to date. A read verifies the block against its record in that copy, then reads the table's header
again. A block that was replaced or cleared meanwhile is therefore a miss.
"""

from __future__ import annotations

import contextlib
import os
import threading

from flexkv.directories import WRITABLE, refused
from flexkv.regular_files import open_regular
from flexkv.tiers.disk import directory, slabs, table
from flexkv.tiers.disk.files import (
    Files,
    is_regular,
    open_data,
    open_folder,
    read_fully,
)
from flexkv.tiers.disk.inspect import Record
from flexkv.tiers.job import Outcome

_PART_BYTES = 1 << 16
"""Bytes of a part of a table. If any byte of a part has changed, its records are decoded again. Not
tuned."""
_PART_RECORDS = _PART_BYTES // table.RECORD_BYTES


class FollowedFolder:
    """The blocks of one folder. Any number of threads may call `read`; one thread calls the rest.

    Args:
        path: path of the folder.
        slot_bytes: bytes of a block. A folder with blocks of another size counts as empty.
        files: the system calls.

    Raises:
        OSError: the folder cannot be opened, or its user is neither this one nor root, or
            others can write to it.
    """

    def __init__(self, path: str, slot_bytes: int, files: Files) -> None:
        self.path = path
        self._slot_bytes = slot_bytes
        self._files = files
        self._opening = threading.Lock()
        self._table = -1
        self._folder = open_folder(path)
        status = os.fstat(self._folder)
        if status.st_uid not in {0, os.geteuid()} or status.st_mode & WRITABLE:
            self.close()
            raise refused(path, "belongs to another user or lets others write, who change blocks")
        self._forget(None)

    def __len__(self) -> int:
        """The number of blocks in the table at the last `look`."""
        return len(self._records)

    def find(self, key: bytes) -> Record | None:
        """The record of a block at the last `look`; None if it had none."""
        return self._records.get(key)

    def drop(self, record: Record) -> None:
        """Do not find the block of `record` again until its part of the table changes."""
        if self._records.get(record.key) is record:
            del self._records[record.key]

    def look(self) -> bool:
        """Bring the copy of the table up to date.

        Returns:
            False if the folder is gone. The caller then closes this object.

        Raises:
            OSError: the table cannot be read.
        """
        if not self._is_there():
            self._forget(None)
            return False
        header = self._header()
        if header is None:
            self._forget(None)
            return True
        if self._seen is None or header.seal != self._seen.seal:
            self._forget(header)
        end = table.table_bytes(header.num_slots)
        for number, start in enumerate(range(table.HEADER_BYTES, end, _PART_BYTES)):
            part = os.pread(self._table, min(_PART_BYTES, end - start), start)
            if part != self._parts.get(number):
                self._take(number, part, header.seal)
        return True

    def read(self, record: Record, buffer: memoryview) -> Outcome:
        """Read a block. Waits for the disk.

        Args:
            record: the record from `find`.
            buffer: where the block goes, `slot_bytes` long and aligned to 4 KiB; borrowed.

        Returns:
            DONE if the block was read and verified. MISSING if it was replaced, cleared or is
            damaged; the buffer is then undefined.

        Raises:
            OSError: a system call failed.
        """
        seen = self._seen
        if seen is None:
            return Outcome.MISSING
        there = self._read(record.slot, buffer)
        intact = there and table.checksum_of(buffer, seen.seal, record.key) == record.checksum
        header = self._header()
        valid = header is not None and header.seal == seen.seal
        return Outcome.DONE if intact and valid else Outcome.MISSING

    def close(self) -> None:
        """Close all descriptors. No `read` may be under way. Idempotent."""
        for fd in (self._table, self._folder):
            if fd >= 0:
                os.close(fd)
        self._table = self._folder = -1

    def _forget(self, header: table.Header | None) -> None:
        self._seen = header
        self._parts: dict[int, bytes] = {}
        self._keys: dict[int, list[bytes]] = {}
        self._records: dict[bytes, Record] = {}

    def _is_there(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.lstat(self.path), os.fstat(self._folder))
        return False

    def _header(self) -> table.Header | None:
        """The header of the table; None if the table is missing, marked as reset, damaged, or of
        other blocks."""
        with self._opening:
            if self._table < 0:
                try:
                    self._table = open_regular(self._folder, directory.TABLE, os.O_RDONLY)
                except FileNotFoundError:
                    return None
        header = table.Header.decode(os.pread(self._table, table.HEADER_BYTES, 0))
        if header is None or is_regular(self._folder, directory.RESET):
            return None
        fits = header.slot_bytes == self._slot_bytes
        return (
            header if fits and header.fingerprint == directory.fingerprint_of(self.path) else None
        )

    def _take(self, number: int, part: bytes, seal: int) -> None:
        """Replace the records of a part of the table.

        Args:
            number: number of the part.
            part: bytes of the part.
            seal: seal of the table.
        """
        first = number * _PART_RECORDS
        for key in self._keys.get(number, ()):
            known = self._records.get(key)
            if known is not None and first <= known.slot < first + _PART_RECORDS:
                del self._records[key]
        records = [Record._make(fields) for fields in table.decode_records(part, seal, first)]
        for record in records:
            known = self._records.get(record.key)
            if known is None or known.generation < record.generation:
                self._records[record.key] = record
        self._keys[number] = [record.key for record in records]
        self._parts[number] = part

    def _read(self, slot: int, buffer: memoryview) -> bool:
        """Read a slot. False if its file is too short.

        The file is closed again, because an open file keeps its room on the disk: if the folder
        were removed, or cut, to make room, that room would stay taken until this process ends.
        """
        slab, place = divmod(slot, slabs.slots_per_slab(self._slot_bytes))
        fd, _ = open_data(self._files, self._folder, slabs.slab_name(slab), os.O_RDONLY)
        try:
            return read_fully(self._files, fd, buffer, place * self._slot_bytes)
        finally:
            self._files.close(fd)
