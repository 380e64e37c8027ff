# SPDX-License-Identifier: Apache-2.0
"""Reads and checks every block of a folder, also while an engine owns it.

A slot that is being replaced looks damaged: some bytes are new, but the record is still the old
one. A suspect slot is therefore checked again against the table as it is then. The block is bad
only if neither its record nor its bytes have changed. The check takes no lock, so it also works if
the owner runs in another container.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from flexkv.system.regular_files import closing_fd
from flexkv.tiers.disk.files import OsFiles, open_data, open_folder, read_fully
from flexkv.tiers.disk.folder import fingerprint_of
from flexkv.tiers.disk.inspect import table_problem, unreadable
from flexkv.tiers.disk.slabs import slab_name, slots_per_slab
from flexkv.tiers.disk.table import Header
from flexkv.tiers.disk.table_reader import FoundTable, Record, read_table
from flexkv.tiers.envelope import checksum_of

THREADS = 8
"""The number of parallel reads, as many as in an engine."""

MEMORY = 256 << 20
"""The most bytes of the buffers of all threads. One thread always has its buffer. Not tuned."""

RECHECK_SECONDS = 2.0
"""Seconds between two checks of a suspect block. A write that takes longer also counts as stalled
in the engine, whose default limit is 1 s."""

LOOKS = 3
"""The most repeated checks. A block that was replaced before each of them is not reported. Not
tuned."""


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that an engine would find damaged, or a table that it would replace: it has no slot
    and an empty key. Keys are hexadecimal, and the reason is a sentence without its full stop."""

    folder: str
    slot: int | None
    key: str
    reason: str


@dataclass(slots=True)
class Report:
    """The result of checking one folder.

    Attributes:
        blocks, bytes: those in the table when the check began.
        read_bytes: how many of these bytes could be read.
        replaced_blocks: how many of these blocks an engine replaced or removed meanwhile.
        bad: bad blocks, sorted by slot.
    """

    folder: str
    blocks: int = 0
    bytes: int = 0
    read_bytes: int = 0
    replaced_blocks: int = 0
    bad: list[BadBlock] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Finding:
    """The result of checking a suspect block. Two results are equal if nothing has changed between
    the checks."""

    seal: int
    record: Record
    found: bytes | None
    """The checksum of the bytes that were read; None if the read failed."""
    reason: str


def check_folder(
    files: OsFiles,
    path: str,
    begin: Callable[[int], None],
    advance: Callable[[int], None],
) -> Report:
    """Check all blocks of a folder. Needs memory for its table, and `MEMORY` for buffers. Calls
    `begin` once with the number of bytes that will be read. Several threads call `advance` with the
    number of bytes that they have read since. Raises DiskError if the table cannot be read."""
    try:
        with closing_fd(open_folder(path)) as folder:
            return _check(files, path, folder, begin, advance)
    except OSError as error:
        raise unreadable(path, error) from None


def _check(
    files: OsFiles,
    path: str,
    folder: int,
    begin: Callable[[int], None],
    advance: Callable[[int], None],
) -> Report:
    fingerprint = fingerprint_of(path)
    table = read_table(files, folder, fingerprint)
    report = Report(path)
    if reason := table_problem(folder, table):
        report.bad.append(BadBlock(path, None, "", reason))
    if table.header is None:
        return report
    slot_bytes = table.header.slot_bytes
    report.blocks = sum(1 for _ in table.records())
    report.bytes = report.blocks * slot_bytes
    begin(report.bytes)
    seen = _suspects(files, folder, table.header, table.records(), advance)
    report.read_bytes = report.bytes - slot_bytes * sum(
        finding.found is None for finding in seen.values()
    )
    report.replaced_blocks = len(seen)
    for _ in range(LOOKS):
        if not seen:
            break
        time.sleep(RECHECK_SECONDS)
        table = read_table(files, folder, fingerprint)
        now: dict[int, _Finding] = {}
        if table.header is not None:
            records = _current(table, seen)
            now = _suspects(files, folder, table.header, records, lambda _: None)
        bad = {slot: finding for slot, finding in now.items() if seen[slot] == finding}
        report.bad += [
            BadBlock(path, slot, each.record.key.hex(), each.reason) for slot, each in bad.items()
        ]
        seen = {slot: finding for slot, finding in now.items() if slot not in bad}
    report.replaced_blocks -= len(report.bad)
    report.bad.sort(key=lambda block: block.slot or 0)
    return report


def _suspects(
    files: OsFiles,
    folder: int,
    header: Header,
    records: Iterable[Record],
    advance: Callable[[int], None],
) -> dict[int, _Finding]:
    """Check the blocks of `records` in several threads. Returns the suspect ones by slot."""
    feed = _Feed(iter(records))

    def work() -> list[_Finding]:
        # Anonymous memory begins at a page boundary, which direct I/O requires.
        buffer = memoryview(mmap.mmap(-1, header.slot_bytes))
        findings = []
        with _SlotReader(files, folder, header.slot_bytes) as reader:
            while (record := feed.take()) is not None:
                finding = _examine(reader, record, header.seal, buffer)
                if finding is not None:
                    findings.append(finding)
                advance(header.slot_bytes)
        return findings

    threads = max(1, min(THREADS, MEMORY // header.slot_bytes))
    with ThreadPoolExecutor(threads, "flexkv-verify") as pool:
        try:
            parts = [pool.submit(work) for _ in range(threads)]
            return {f.record.slot: f for part in parts for f in part.result()}
        finally:
            feed.stop()


def _current(table: FoundTable, seen: dict[int, _Finding]) -> list[Record]:
    """The valid records of the slots in `seen`. If several records have one key, the latest is
    valid."""
    records = [record for record in table.records() if record.slot in seen]
    latest = dict.fromkeys((record.key for record in records), 0)
    for record in table.records():
        if record.key in latest:
            latest[record.key] = max(latest[record.key], record.generation)
    return [record for record in records if record.generation == latest[record.key]]


class _SlotReader:
    """Reads slots by direct I/O where the file system can. For one thread. Keeps only one file
    open, because a large cache has more files than a process may open."""

    def __init__(self, files: OsFiles, folder: int, slot_bytes: int) -> None:
        self._files = files
        self._folder = folder
        self._slot_bytes = slot_bytes
        self._slots_per_slab = slots_per_slab(slot_bytes)
        self._slab, self._fd = -1, -1

    def __enter__(self) -> _SlotReader:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the open file."""
        if self._fd >= 0:
            self._files.close(self._fd)
        self._slab, self._fd = -1, -1

    def file_of(self, slot: int) -> str:
        """The name of the file that contains `slot`."""
        return slab_name(slot // self._slots_per_slab)

    def read(self, record: Record, seal: int, buffer: memoryview) -> bytes | None:
        """Read the block of `record` into `buffer`. Returns the checksum of the bytes; None if the
        file is too short. Raises OSError if the file cannot be opened or read."""
        slab, place = divmod(record.slot, self._slots_per_slab)
        if slab != self._slab:
            self.__exit__()
            name = self.file_of(record.slot)
            self._fd, _ = open_data(self._files, self._folder, name, os.O_RDONLY)
            self._slab = slab
        if not read_fully(self._files, self._fd, buffer, place * self._slot_bytes):
            return None
        return checksum_of(buffer, seal, record.key)


class _Feed:
    """Distributes records to several threads until `stop`."""

    def __init__(self, records: Iterator[Record]) -> None:
        self._records = records
        self._lock = threading.Lock()
        self._stopped = False

    def take(self) -> Record | None:
        """The next record; None at the end or after `stop`."""
        with self._lock:
            return None if self._stopped else next(self._records, None)

    def stop(self) -> None:
        self._stopped = True


def _examine(reader: _SlotReader, record: Record, seal: int, buffer: memoryview) -> _Finding | None:
    """Check the block of `record`. None if it is intact."""
    found = None
    name = reader.file_of(record.slot)
    try:
        found = reader.read(record, seal, buffer)
        reason = "its bytes do not match its checksum"
        if found is None:
            reason = f"{name} ends before this block"
    except FileNotFoundError:
        reason = f"{name} is missing"
    except OSError as error:
        reason = f"{name} cannot be read: {error.strerror}"
    if found == record.checksum:
        return None
    return _Finding(seal, record, found, reason)
