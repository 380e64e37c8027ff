# SPDX-License-Identifier: Apache-2.0
"""A folder that another process of this machine owns and writes, read beside it.

Nothing here writes or takes a lock. What is known of the folder is its table as of the last look.
A block is verified by the record that it was found by, and the table's header is read again after
it: a block that was replaced or cleared meanwhile is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading

from flexkv.tiers.disk import directory, slabs, table
from flexkv.tiers.disk.files import (
    Files,
    is_regular,
    open_data,
    open_folder,
    open_regular,
    read_fully,
)
from flexkv.tiers.disk.inspect import Record
from flexkv.tiers.job import Outcome

_PART_BYTES = 1 << 16
"""Of a table: its records are decoded again where any byte of the part has changed."""
_PART_RECORDS = _PART_BYTES // table.RECORD_BYTES


class FollowedFolder:
    """The blocks of one folder. `read` is for any number of threads, all else for one.

    Args:
        path: of the folder.
        slot_bytes: of its blocks.
        files: the system calls.

    Raises:
        OSError: as the system says.
    """

    def __init__(self, path: str, slot_bytes: int, files: Files) -> None:
        self.path = path
        self._slot_bytes = slot_bytes
        self._files = files
        self._slabs: dict[int, int] = {}
        self._opening = threading.Lock()
        self._table = -1
        self._folder = open_folder(path)
        if os.fstat(self._folder).st_uid not in {0, os.geteuid()}:
            self.close()
            raise PermissionError(
                errno.EPERM, "belongs to another user, who could change blocks", path
            )
        self._forget(None)

    def __len__(self) -> int:
        """Blocks that it had at the last look."""
        return len(self._records)

    def find(self, key: bytes) -> Record | None:
        """The record of a block as of the last look."""
        return self._records.get(key)

    def drop(self, record: Record) -> None:
        """Do not find a block again before its record changes."""
        if self._records.get(record.key) is record:
            del self._records[record.key]

    def look(self) -> bool:
        """Take in what has changed. False if the folder is gone.

        Raises:
            OSError: as the system says.
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
        """Read a block into `buffer`; waits for the disk.

        Raises:
            OSError: as the system says.
        """
        seen = self._seen
        if seen is None:
            return Outcome.MISSING
        slab, place = divmod(record.slot, slabs.slots_per_slab(self._slot_bytes))
        there = read_fully(self._files, self._slab(slab), buffer, place * self._slot_bytes)
        intact = there and table.checksum_of(buffer, seen.seal, record.key) == record.checksum
        header = self._header()
        valid = header is not None and header.seal == seen.seal
        return Outcome.DONE if intact and valid else Outcome.MISSING

    def close(self) -> None:
        """Idempotent; nothing may be reading."""
        for fd in (*self._slabs.values(), self._table, self._folder):
            if fd >= 0:
                os.close(fd)
        self._slabs.clear()
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
        """What the table says that it is for now; None if it is worth nothing."""
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
        """Take in the records of a part of the table, in place of those that it had."""
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

    def _slab(self, slab: int) -> int:
        """The open data file with this number."""
        with self._opening:
            if slab not in self._slabs:
                name = slabs.slab_name(slab)
                self._slabs[slab], _ = open_data(self._files, self._folder, name, os.O_RDONLY)
            return self._slabs[slab]
