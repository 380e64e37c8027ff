# SPDX-License-Identifier: Apache-2.0
"""Reads and checks every block of a folder, beside the engine that may own it.

A slot that is being replaced looks damaged: its bytes are partly new, its record still the old
one. So what looks bad is looked at again, with what the table then says, and is bad only if
neither the record nor the bytes have changed meanwhile. This rests on no lock: it holds also where
the owner cannot be seen.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from flexkv.tiers.disk.directory import fingerprint_of
from flexkv.tiers.disk.files import Files, open_folder
from flexkv.tiers.disk.inspect import (
    Record,
    SlotReader,
    Snapshot,
    read_table,
    unreadable,
)
from flexkv.tiers.disk.table import checksum_of

THREADS = 8
"""Reads at once, as an engine does them."""

MEMORY = 256 << 20
"""Bytes of the buffers of all threads at most; one thread has its buffer in any case."""

SETTLE_SECONDS = 2.0
"""Between two looks at what seems bad. A write that has not ended, nor got on, in that time is one
of a disk that the tier calls stalled."""

LOOKS = 3
"""Further looks at most: what is replaced each time is left alone."""


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that an engine would find damaged, or a table that it would make anew.

    Attributes:
        folder: path.
        slot: None for a table.
        key: of the block, hexadecimal; empty for a table.
        reason: one sentence without its full stop.
    """

    folder: str
    slot: int | None
    key: str
    reason: str


@dataclass(slots=True)
class Report:
    """What a check of one folder found.

    Attributes:
        folder: path.
        blocks: that the table named when the check began.
        bytes: of these.
        replaced_blocks: of these, those that an engine replaced or removed meanwhile.
        bad: sorted by slot.
    """

    folder: str
    blocks: int = 0
    bytes: int = 0
    replaced_blocks: int = 0
    bad: list[BadBlock] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Finding:
    """A look at a block that seemed bad; equal if nothing has changed between two looks."""

    seal: int
    record: Record
    found: bytes
    """Checksum of the bytes; empty if they could not be read."""
    reason: str


def verify_folder(
    files: Files,
    path: str,
    begin: Callable[[int], None],
    advance: Callable[[int], None],
) -> Report:
    """Check all blocks of the folder `path`. Takes the memory of its table and of the buffers.

    Args:
        begin: is told the bytes that will be read.
        advance: is told bytes that were read, by several threads.

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
    """The check of one folder.

    Args:
        files: the system calls.
        path: of the folder.
        folder: open directory; borrowed.
    """

    def __init__(self, files: Files, path: str, folder: int) -> None:
        self._files = files
        self._path = path
        self._folder = folder

    def run(self, begin: Callable[[int], None], advance: Callable[[int], None]) -> Report:
        """See `verify_folder`.

        Raises:
            OSError: the table cannot be read.
        """
        snapshot = self._read_table()
        report = Report(self._path)
        if snapshot.damaged:
            reason = "the header of its table is damaged or of other blocks: all of them are lost"
            report.bad.append(BadBlock(self._path, None, "", reason))
        if snapshot.header is None:
            return report
        report.blocks = sum(1 for _ in snapshot.records())
        report.bytes = report.blocks * snapshot.header.slot_bytes
        begin(report.bytes)
        seen = self._look(snapshot, snapshot.records(), advance)
        report.replaced_blocks = len(seen)
        for _ in range(LOOKS):
            if not seen:
                break
            time.sleep(SETTLE_SECONDS)
            snapshot = self._read_table()
            now = self._look(snapshot, _current(snapshot, seen), lambda _: None)
            bad = {slot: finding for slot, finding in now.items() if seen[slot] == finding}
            report.bad += [_bad_block(self._path, finding) for finding in bad.values()]
            seen = {slot: finding for slot, finding in now.items() if slot not in bad}
        report.replaced_blocks -= len(report.bad)
        report.bad.sort(key=lambda block: block.slot or 0)
        return report

    def _read_table(self) -> Snapshot:
        return read_table(self._folder, fingerprint_of(self._path))

    def _look(
        self, snapshot: Snapshot, records: Iterable[Record], advance: Callable[[int], None]
    ) -> dict[int, _Finding]:
        """Check `records` of `snapshot` in several threads; returns those that seem bad by
        slot."""
        header = snapshot.header
        if header is None:
            return {}
        seal, slot_bytes = header.seal, header.slot_bytes
        feed = _Feed(iter(records))

        def work() -> list[_Finding]:
            reader = SlotReader(self._files, self._folder, slot_bytes)
            findings = []
            try:
                while (record := feed.take()) is not None:
                    finding = _examine(reader, record, seal)
                    if finding is not None:
                        findings.append(finding)
                    advance(slot_bytes)
            finally:
                reader.close()
            return findings

        threads = max(1, min(THREADS, MEMORY // slot_bytes))
        with ThreadPoolExecutor(threads, "flexkv-verify") as pool:
            try:
                parts = [pool.submit(work) for _ in range(threads)]
                return {f.record.slot: f for part in parts for f in part.result()}
            finally:
                feed.stop()


def _current(snapshot: Snapshot, seen: dict[int, _Finding]) -> list[Record]:
    """The records of the slots in `seen` that count: of several of one key only the latest does."""
    records = [record for record in snapshot.records() if record.slot in seen]
    latest = dict.fromkeys((record.key for record in records), 0)
    for record in snapshot.records():
        if record.key in latest:
            latest[record.key] = max(latest[record.key], record.generation)
    return [record for record in records if record.generation == latest[record.key]]


class _Feed:
    """Hands records out to several threads until it is stopped."""

    def __init__(self, records: Iterator[Record]) -> None:
        self._records = records
        self._lock = threading.Lock()
        self._stopped = False

    def take(self) -> Record | None:
        """The next one; None if there is none."""
        with self._lock:
            return None if self._stopped else next(self._records, None)

    def stop(self) -> None:
        self._stopped = True


def _examine(reader: SlotReader, record: Record, seal: int) -> _Finding | None:
    """Read the block of `record`. None if it is intact."""
    found = b""
    name = reader.file_of(record.slot)
    try:
        data = reader.read(record.slot)
        if data is None:
            reason = f"{name} ends before it"
        else:
            found = checksum_of(data, seal, record.key)
            reason = "its bytes are not those that were written"
    except FileNotFoundError:
        reason = f"{name} is missing"
    except OSError as error:
        reason = f"{name} cannot be read: {error.strerror}"
    if found == record.checksum:
        return None
    return _Finding(seal, record, found, reason)


def _bad_block(path: str, finding: _Finding) -> BadBlock:
    return BadBlock(path, finding.record.slot, finding.record.key.hex(), finding.reason)
