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

from flexkv.tiers.disk.files import Files, open_folder
from flexkv.tiers.disk.folder import fingerprint_of
from flexkv.tiers.disk.inspect import table_problem, unreadable
from flexkv.tiers.disk.reader import Record, SlotReader, TableCopy

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


def verify_folder(
    files: Files,
    path: str,
    begin: Callable[[int], None],
    advance: Callable[[int], None],
) -> Report:
    """Check all blocks of a folder. Needs memory for its table, and `MEMORY` for buffers. Calls
    `begin` once with the number of bytes that will be read. Several threads call `advance` with the
    number of bytes that they have read since.

    Raises:
        DiskError: the table cannot be read.
    """
    try:
        folder = open_folder(path)
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        return _Verification(files, path, folder).run(begin, advance)
    except OSError as error:
        raise unreadable(path, error) from None
    finally:
        os.close(folder)


class _Verification:
    """The check of one folder, whose descriptor is borrowed."""

    def __init__(self, files: Files, path: str, folder: int) -> None:
        self._files = files
        self._path = path
        self._folder = folder
        self._table = TableCopy(files, folder, fingerprint_of(path))

    def run(self, begin: Callable[[int], None], advance: Callable[[int], None]) -> Report:
        """See `verify_folder`.

        Raises:
            OSError: the table cannot be read.
        """
        table = self._table
        table.update()
        report = Report(self._path)
        if reason := table_problem(self._folder, table):
            report.bad.append(BadBlock(self._path, None, "", reason))
        if table.header is None:
            return report
        report.blocks = sum(1 for _ in table.records())
        report.bytes = report.blocks * table.header.slot_bytes
        begin(report.bytes)
        seen = self._look(table.records(), advance)
        unread = sum(1 for finding in seen.values() if finding.found is None)
        report.read_bytes = report.bytes - unread * table.header.slot_bytes
        report.replaced_blocks = len(seen)
        for _ in range(LOOKS):
            if not seen:
                break
            time.sleep(RECHECK_SECONDS)
            table.update()
            now = self._look(_current(table, seen), lambda _: None)
            bad = {slot: finding for slot, finding in now.items() if seen[slot] == finding}
            report.bad += [_bad_block(self._path, finding) for finding in bad.values()]
            seen = {slot: finding for slot, finding in now.items() if slot not in bad}
        report.replaced_blocks -= len(report.bad)
        report.bad.sort(key=lambda block: block.slot or 0)
        return report

    def _look(
        self, records: Iterable[Record], advance: Callable[[int], None]
    ) -> dict[int, _Finding]:
        """Check `records` of the table in several threads. Returns the suspect blocks by slot."""
        header = self._table.header
        if header is None:
            return {}
        seal, slot_bytes = header.seal, header.slot_bytes
        feed = _Feed(iter(records))

        def work() -> list[_Finding]:
            # Anonymous memory begins at a page boundary, which direct I/O requires.
            buffer = memoryview(mmap.mmap(-1, slot_bytes))
            findings = []
            with SlotReader(self._files, self._folder, slot_bytes) as reader:
                while (record := feed.take()) is not None:
                    finding = _examine(reader, record, seal, buffer)
                    if finding is not None:
                        findings.append(finding)
                    advance(slot_bytes)
            return findings

        threads = max(1, min(THREADS, MEMORY // slot_bytes))
        with ThreadPoolExecutor(threads, "flexkv-verify") as pool:
            try:
                parts = [pool.submit(work) for _ in range(threads)]
                return {f.record.slot: f for part in parts for f in part.result()}
            finally:
                feed.stop()


def _current(table: TableCopy, seen: dict[int, _Finding]) -> list[Record]:
    """The valid records of the slots in `seen`. If several records have one key, the latest is
    valid."""
    records = [record for record in table.records() if record.slot in seen]
    latest = dict.fromkeys((record.key for record in records), 0)
    for record in table.records():
        if record.key in latest:
            latest[record.key] = max(latest[record.key], record.generation)
    return [record for record in records if record.generation == latest[record.key]]


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


def _examine(reader: SlotReader, record: Record, seal: int, buffer: memoryview) -> _Finding | None:
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


def _bad_block(path: str, finding: _Finding) -> BadBlock:
    return BadBlock(path, finding.record.slot, finding.record.key.hex(), finding.reason)
