# SPDX-License-Identifier: Apache-2.0
"""Reads the table and the slots of a folder, also while another process owns and changes them.

The owner reads the table with `read_records` when it opens its store. All others keep a `TableCopy`
and read blocks with a `SlotReader`. They write nothing and take no lock, not even a shared one: an
engine that starts at that moment would find the lock taken and give up.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from flexkv.tiers.disk import slabs, table
from flexkv.tiers.disk.files import Files, is_regular, open_data, read_fully
from flexkv.tiers.disk.folder import RESET, TABLE, has_blocks
from flexkv.tiers.envelope import checksum_of

_PART_BYTES = 1 << 16
"""Bytes of a part of a table. If any byte of a part has changed, its records are decoded again. Not
tuned."""
_PART_RECORDS = _PART_BYTES // table.RECORD_BYTES
_EMPTY_PART = bytes(_PART_BYTES)
_HEADER_READS = 3
"""Attempts to read a header. If the owner replaces the header during a read, it may look damaged.
Not tuned."""


class Record(NamedTuple):
    """The table's record of one slot; see `table.encode_record`."""

    slot: int
    key: bytes
    checksum: bytes
    generation: int
    stored: int


def read_pages(files: Files, fd: int) -> bytes:
    """The copies of the header of an open table; zeros where the file is shorter.

    Raises:
        OSError: preadv(2) failed.
    """
    pages = bytearray(table.HEADER_BYTES)
    read_fully(files, fd, memoryview(pages), 0)
    return bytes(pages)


def header_in(pages: bytes, fingerprint: str) -> table.Header | None:
    """The header of the blocks of `fingerprint` in `pages`; None if there is none."""
    header = table.Header.decode(pages)
    return header if header is not None and header.fingerprint == fingerprint else None


def read_records(
    files: Files, fd: int, header: table.Header, progress: Callable[[int, int], None]
) -> Iterator[tuple[int, bytes, bytes, int, int]]:
    """The intact records of an open table, by slot; see `table.decode_records`. `progress`: called
    with the slots that were read and all slots.

    Raises:
        OSError: a system call failed.
    """

    def reported() -> Iterator[tuple[int, bytearray]]:
        progress(0, header.num_slots)
        for number, part in _read_parts(files, fd, header.num_slots):
            progress(min((number + 1) * _PART_RECORDS, header.num_slots), header.num_slots)
            yield number, part
        progress(header.num_slots, header.num_slots)

    parts = reported()
    return itertools.chain.from_iterable(
        table.decode_records(part, header.seal, number * _PART_RECORDS) for number, part in parts
    )


def _read_parts(files: Files, fd: int, num_slots: int) -> Iterator[tuple[int, bytearray]]:
    """Read the parts of an open table that have data, each with its number. Holes are skipped,
    because a header may claim any number of slots. Bytes behind the end of the file are zeros."""
    end = table.table_bytes(num_slots)
    hole = offset = table.HEADER_BYTES
    while offset < end:
        if offset >= hole:
            try:
                offset = os.lseek(fd, offset, os.SEEK_DATA)
                hole = os.lseek(fd, offset, os.SEEK_HOLE)
            except OSError as error:
                if error.errno != errno.ENXIO:  # no more data
                    raise
                return
        number = (offset - table.HEADER_BYTES) // _PART_BYTES
        start = table.HEADER_BYTES + number * _PART_BYTES
        part = bytearray(min(_PART_BYTES, end - start))
        read_fully(files, fd, memoryview(part), start)
        if not _EMPTY_PART.startswith(part):
            yield number, part
        offset = start + _PART_BYTES


class TableCopy:
    """A copy of the table in an open directory, whose descriptor is borrowed. Any number of threads
    may call `read_header`; one thread calls the rest. A table of blocks of another size than
    `slot_bytes` counts as missing.

    Attributes:
        header: header of the table at the last `update`; None if the folder had no table then, or
            one that an engine would replace.
        damaged: whether an engine would replace the table because its header is damaged, missing or
            of other blocks. False for a table that is being created.
        cut_slots: slots without a record, because the file ends before.
    """

    def __init__(
        self, files: Files, folder: int, fingerprint: str, slot_bytes: int | None = None
    ) -> None:
        self.header: table.Header | None = None
        self.damaged = False
        self.cut_slots = 0
        self._files = files
        self._folder = folder
        self._fingerprint = fingerprint
        self._slot_bytes = slot_bytes
        self._parts: dict[int, bytearray] = {}  # those that are not zeros

    def update(self) -> set[int]:
        """Bring the copy up to date. Returns the numbers of the parts whose records may have
        changed.

        Raises:
            OSError: the table cannot be read.
        """
        fd = self._open()
        try:
            header, self.damaged = self._read_header(fd)
            changed: set[int] = set()
            if header is None or self.header is None or header.seal != self.header.seal:
                changed.update(self._parts)
                self._parts.clear()
            self.header = header
            size = os.fstat(fd).st_size if header else 0
            self.cut_slots = max(0, header.num_slots - table.slots_in(size)) if header else 0
            gone = set(self._parts)
            for number, part in _read_parts(self._files, fd, header.num_slots) if header else ():
                gone.discard(number)
                if part != self._parts.get(number):
                    self._parts[number] = part
                    changed.add(number)
            for number in gone:
                del self._parts[number]
            return changed | gone
        finally:
            self._close(fd)

    def records(self) -> Iterator[Record]:
        """The intact records, by slot."""
        return itertools.chain.from_iterable(map(self.records_of, sorted(self._parts)))

    def records_of(self, number: int) -> Iterator[Record]:
        """The intact records of a part, by slot."""
        if self.header is None:
            return iter(())
        part, first = self._parts.get(number, b""), number * _PART_RECORDS
        return map(Record._make, table.decode_records(part, self.header.seal, first))

    def read_header(self) -> table.Header | None:
        """The header that the table has now; see `header`.

        Raises:
            OSError: the table cannot be read.
        """
        fd = self._open()
        try:
            return self._read_header(fd)[0]
        finally:
            self._close(fd)

    def _open(self) -> int:
        """Open the table; -1 if it is missing. It does not stay open: the owner may replace it."""
        try:
            return self._files.open(self._folder, TABLE, os.O_RDONLY)
        except FileNotFoundError:
            return -1

    def _close(self, fd: int) -> None:
        if fd >= 0:
            self._files.close(fd)

    def _read_header(self, fd: int) -> tuple[table.Header | None, bool]:
        """The header of the open table, and whether an engine would replace it as damaged."""
        if is_regular(self._folder, RESET):
            return None, False
        if fd < 0:
            return None, has_blocks(self._folder)
        pages = b""
        for _ in range(_HEADER_READS):
            pages = read_pages(self._files, fd)
            header = header_in(pages, self._fingerprint)
            if header is not None:
                fits = self._slot_bytes in {None, header.slot_bytes}
                return header if fits else None, False
        return None, any(pages) or has_blocks(self._folder)


class SlotReader:
    """Reads slots of one folder by direct I/O where the file system can. For one thread.

    Keeps only one file open, because a large cache has more files than a process may open. Borrows
    the descriptor of the directory. A slot has a multiple of 4 KiB.
    """

    def __init__(self, files: Files, folder: int, slot_bytes: int) -> None:
        self._files = files
        self._folder = folder
        self._slot_bytes = slot_bytes
        self._slots_per_slab = slabs.slots_per_slab(slot_bytes)
        self._slab, self._fd = -1, -1

    def __enter__(self) -> SlotReader:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the open file."""
        if self._fd >= 0:
            self._files.close(self._fd)
        self._slab, self._fd = -1, -1

    def file_of(self, slot: int) -> str:
        """The name of the file that contains `slot`."""
        return slabs.slab_name(slot // self._slots_per_slab)

    def read(self, record: Record, seal: int, buffer: memoryview) -> bytes | None:
        """Read the block of `record`, whose table has this seal, into `buffer`, which is
        `slot_bytes` long and aligned to 4 KiB. Waits for the disk. Returns the checksum of the
        bytes; None if the file is too short. The block is intact only if the checksum is that of
        `record`.

        Raises:
            OSError: the file cannot be opened or read.
        """
        slab, place = divmod(record.slot, self._slots_per_slab)
        if slab != self._slab:
            self.__exit__()
            name = self.file_of(record.slot)
            self._fd, _ = open_data(self._files, self._folder, name, os.O_RDONLY)
            self._slab = slab
        if not read_fully(self._files, self._fd, buffer, place * self._slot_bytes):
            return None
        return checksum_of(buffer, seal, record.key)
