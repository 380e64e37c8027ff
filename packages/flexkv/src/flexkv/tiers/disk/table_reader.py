# SPDX-License-Identifier: Apache-2.0
"""Reads the table of a folder.

The owner reads the records once, when it opens its store. Other processes read the table while the
owner changes it. They write nothing and take no lock, not even a shared one: an engine that starts
at that moment would find the lock taken and give up.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexkv.tiers.disk import table
from flexkv.tiers.disk.files import OsFiles, is_regular, read_fully
from flexkv.tiers.disk.folder import RESET, TABLE, has_blocks

_PART_BYTES = 1 << 16
"""Bytes of a part of a table, which one call reads. Not tuned."""
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


@dataclass(frozen=True, slots=True)
class FoundTable:
    """The table of a folder, as a process that does not own it has read it.

    Attributes:
        header: None if the folder had no table, or one that an engine would replace.
        damaged: whether an engine would replace the table because its header is damaged, missing or
            of other blocks. False for a table that is being created.
        cut_slots: slots without a record, because the file ends before.
        parts: the parts that are not zeros, each with its number.
    """

    header: table.Header | None
    damaged: bool = False
    cut_slots: int = 0
    parts: Sequence[tuple[int, bytearray]] = ()

    def records(self) -> Iterator[Record]:
        """The intact records, by slot."""
        if self.header is None:
            return iter(())
        return map(Record._make, _decode(self.parts, self.header.seal))


def read_table(files: OsFiles, folder: int, fingerprint: str) -> FoundTable:
    """Read the table of the blocks of `fingerprint` in an open directory, which others may own.
    Raises OSError if the table cannot be read."""
    if is_regular(folder, RESET):
        return FoundTable(None)
    try:
        fd = files.open(folder, TABLE, os.O_RDONLY)
    except FileNotFoundError:
        return FoundTable(None, has_blocks(folder))
    try:
        pages = b""
        for _ in range(_HEADER_READS):
            pages = read_pages(files, fd)
            header = header_in(pages, fingerprint)
            if header is not None:
                cut = max(0, header.num_slots - table.slots_in(os.fstat(fd).st_size))
                parts = _read_parts(files, fd, header.num_slots)
                return FoundTable(header, cut_slots=cut, parts=list(parts))
        return FoundTable(None, any(pages) or has_blocks(folder))
    finally:
        files.close(fd)


def read_pages(files: OsFiles, fd: int) -> bytes:
    """The copies of the header of an open table; zeros where the file is shorter. Raises OSError if
    preadv(2) failed."""
    pages = bytearray(table.HEADER_BYTES)
    read_fully(files, fd, memoryview(pages), 0)
    return bytes(pages)


def header_in(pages: bytes, fingerprint: str) -> table.Header | None:
    """The header of the blocks of `fingerprint` in `pages`; None if there is none."""
    header = table.Header.decode(pages)
    return header if header is not None and header.fingerprint == fingerprint else None


def read_records(
    files: OsFiles, fd: int, header: table.Header, progress: Callable[[int, int], None]
) -> Iterator[tuple[int, bytes, bytes, int, int]]:
    """The intact records of an open table, by slot; see `table.decode_records`. `progress`: called
    with the slots that were read and all slots. Raises OSError if a system call failed."""

    def reported() -> Iterator[tuple[int, bytearray]]:
        progress(0, header.num_slots)
        for number, part in _read_parts(files, fd, header.num_slots):
            progress(min((number + 1) * _PART_RECORDS, header.num_slots), header.num_slots)
            yield number, part
        progress(header.num_slots, header.num_slots)

    return _decode(reported(), header.seal)


def _decode(
    parts: Iterable[tuple[int, bytearray]], seal: int
) -> Iterator[tuple[int, bytes, bytes, int, int]]:
    return itertools.chain.from_iterable(
        table.decode_records(part, seal, number * _PART_RECORDS) for number, part in parts
    )


def _read_parts(files: OsFiles, fd: int, num_slots: int) -> Iterator[tuple[int, bytearray]]:
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
