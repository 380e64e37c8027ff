# SPDX-License-Identifier: Apache-2.0
"""Reads a folder while another process of this machine owns and writes it.

Nothing here writes or takes a lock. Lookups use a copy of the folder's table, which `look` brings
up to date. A read verifies the block against its record in that copy, then reads the table's header
again. A block that was replaced or cleared meanwhile is therefore a miss.
"""

from __future__ import annotations

import contextlib
import os

from flexkv.system.directories import WRITABLE, refused
from flexkv.tiers.disk.cache_directory import fingerprint_of
from flexkv.tiers.disk.files import Files, open_folder
from flexkv.tiers.disk.reader import Record, SlotReader, TableCopy
from flexkv.tiers.job import Outcome


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
        self._fingerprint = fingerprint_of(path)
        self._folder = open_folder(path)
        status = os.fstat(self._folder)
        if status.st_uid not in {0, os.geteuid()} or status.st_mode & WRITABLE:
            self.close()
            raise refused(path, "belongs to another user or lets others write, who change blocks")
        self._forget()

    def __len__(self) -> int:
        """The number of blocks in the table at the last `look`."""
        return len(self._records)

    def find(self, key: bytes) -> Record | None:
        """The record of a block at the last `look`; None if it had none."""
        return self._records.get(key)

    def drop(self, record: Record) -> None:
        """Do not find the block of `record` again until its part of the table changes."""
        if self._records.get(record.key) is record:
            self._records.pop(record.key, None)  # a look may have removed it

    def look(self) -> bool:
        """Bring the copy of the table up to date.

        Returns:
            False if the folder is gone. The caller then closes this object.

        Raises:
            OSError: the table cannot be read.
        """
        if not self._is_there():
            self._forget()
            return False
        for number in self._table.update():
            self._take(number)
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
        copy = self._table
        seen = copy.header
        if seen is None:
            return Outcome.MISSING
        # The file is closed again, because an open file keeps its room on the disk: if the folder
        # were removed, or cut, to make room, that room would stay taken until this process ends.
        with SlotReader(self._files, self._folder, self._slot_bytes) as reader:
            intact = reader.read(record, seen.seal, buffer) == record.checksum
        header = copy.read_header()
        valid = header is not None and header.seal == seen.seal
        return Outcome.DONE if intact and valid else Outcome.MISSING

    def close(self) -> None:
        """Close the folder. No `read` may be under way. Idempotent."""
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1

    def _is_there(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.lstat(self.path), os.fstat(self._folder))
        return False

    def _forget(self) -> None:
        self._table = TableCopy(self._files, self._folder, self._fingerprint, self._slot_bytes)
        self._parts: dict[int, list[Record]] = {}
        self._records: dict[bytes, Record] = {}

    def _take(self, number: int) -> None:
        """Replace the records of a part of the table."""
        for record in self._parts.get(number, ()):
            self.drop(record)
        self._parts[number] = list(self._table.records_of(number))
        for record in self._parts[number]:
            known = self._records.get(record.key)
            if known is None or known.generation < record.generation:
                self._records[record.key] = record
