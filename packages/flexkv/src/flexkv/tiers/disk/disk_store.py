# SPDX-License-Identifier: Apache-2.0
"""A disk store: the files of one folder, read and written.

All calls wait for the disk; `Drive` makes them on threads of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from flexkv.index.ages import UNKNOWN, BlockAges
from flexkv.index.slot_index import restore, slot_index
from flexkv.tiers.disk import table
from flexkv.tiers.disk.descriptions import Descriptions
from flexkv.tiers.disk.files import (
    OsFiles,
    disk_error,
    is_regular,
    reason_of,
    without_trace,
    write_fully,
)
from flexkv.tiers.disk.folder import LOCK, RESET, TABLE, Folder, first_pages, has_blocks, is_at
from flexkv.tiers.disk.ledger import load_ledger, save_ledger
from flexkv.tiers.disk.slabs import Slabs, slots_per_slab
from flexkv.tiers.disk.table_reader import header_in, read_pages, read_records
from flexkv.tiers.envelope import checksum_of
from flexkv.tiers.job import Outcome, Result
from flexkv.types.errors import DiskError

logger = logging.getLogger(__name__)

_Record: TypeAlias = tuple[int, bytes, bytes, int, int]
_PAGE = 4096
_RESERVED_BYTES = 6 * _PAGE
"""Part of the bound that is kept for the lock, the ledger, its successor, two pages of the identity
and the folder itself."""
_MAP_BYTES = 32
"""Bytes per slot for the file system's map of a data file, which counts as the file's. ext4 keeps
12 bytes for each run of blocks that are written or not, in pages that are half full at least."""
_SLAB_MAP_BYTES = 2 * _PAGE
"""Bytes per data file for the last page of its map and the index over these pages."""


def slots_within(capacity: int, slot_bytes: int) -> int:
    """How many slots keep all files of a store within `capacity` bytes on disk."""
    room = capacity - _RESERVED_BYTES - table.HEADER_BYTES - _PAGE
    each = slot_bytes + table.RECORD_BYTES + _MAP_BYTES
    slabs = -(-room // (each * slots_per_slab(slot_bytes)))
    return max(0, (room - slabs * _SLAB_MAP_BYTES) // each)


def bytes_of(capacity: int, slot_bytes: int) -> int:
    """Bytes of the files that a store of `capacity` bytes allocates."""
    slots = slots_within(capacity, slot_bytes)
    return slots * slot_bytes + table.table_bytes(slots)


def check_table(folder: Folder) -> None:
    """Check that the table in a folder, if there is one, is ours to write over. Raises DiskError if
    it is not, or cannot be read."""
    path = os.path.join(folder.path, TABLE)
    try:
        pages = first_pages(folder.fd)
    except FileNotFoundError:
        return
    except OSError as error:
        raise disk_error(
            f"cannot use {path}: {error.strerror}; allowed: a file that this user can write", error
        ) from None
    version = table.newer_version(pages)
    if version is not None:
        raise DiskError(
            f"{path} is of format {version}, written by a newer FlexKV; allowed: formats up to "
            f"{table.VERSION}: use that FlexKV, another ssd_cache_dir, or remove {folder.path}"
        )
    if any(pages) and not table.has_magic(pages):
        raise DiskError(
            f"{path} is not a table of FlexKV; allowed: one of FlexKV, or none: remove it, or use "
            f"another ssd_cache_dir"
        )


class DiskStore:
    """The open files of one folder, and the index over them.

    `read`, `write` and `write_record` are thread-safe as long as no two threads work on the same
    slot; `invalidate` and `save_ledger` are for one thread, the index for one. Methods raise
    OSError if a system call fails. Owns the folder, its lock and its descriptors.

    Attributes:
        index: what the table said when it was opened; its user keeps it up to date.
        generation: the greatest that the table holds.
        seal: what records and checksums are bound to.
        direct: whether I/O passes the page cache by.
        ages: of the cache's blocks; None if their age does not matter.
        old_blocks: blocks that were too old when the store was opened.
    """

    def __init__(
        self,
        files: OsFiles,
        folder: Folder,
        fingerprint: str,
        slot_bytes: int,
        capacity: int,
        *,
        ages: BlockAges | None = None,
        claim: Callable[[], Folder] | None = None,
        progress: Callable[[int, int], None] = lambda read, slots: None,
    ) -> None:
        """Open the store in `folder`, created, grown or cut to `capacity` bytes if need be. Owns
        the folder from now on. `claim` claims the folder again for `reopen`; `progress` as in
        `read_records`. Raises DiskError if there is no room, or the system refuses. `folder` is
        released."""
        self._files = files
        self._folder = folder
        self._claim = claim
        self._fingerprint = fingerprint
        self._table = -1
        self._slabs: Slabs | None = None
        self.descriptions: Descriptions | None = None
        self._header: table.Header
        self._num_slots = slots_within(capacity, slot_bytes)
        self.ages = ages
        self.old_blocks = 0
        self.path = folder.path
        self.slot_bytes = slot_bytes
        try:
            if self._num_slots == 0:
                raise DiskError(
                    f"ssd_cache_gb leaves {capacity} bytes for {self.path}, less than one block of "
                    f"{slot_bytes} bytes; allowed: room for at least one block in every directory"
                )
            self._open(progress)
        except DiskError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise disk_error(
                f"cannot keep {self._num_slots} blocks of {slot_bytes} bytes in {self.path} "
                f"(ssd_cache_gb, ssd_cache_dir): {reason_of(error)}; allowed: a file system with "
                f"that much room, and files that this user can write",
                error,
            ) from None

    def _open_files(self, *, anew: bool) -> None:
        """Open the files. Creates, grows or truncates them if need be. `anew`: without the blocks
        that are there."""
        files, folder = self._files, self._folder.fd
        self._table = files.open(folder, TABLE, os.O_RDWR | os.O_CREAT)
        pages = read_pages(files, self._table)
        header = header_in(pages, self._fingerprint)
        reset = anew or is_regular(folder, RESET)
        if not reset:
            self._report_losses(header, pages)
        if header is None or header.slot_bytes != self.slot_bytes or reset:
            serial = header.serial if header is not None else 0
            header = table.Header(self.slot_bytes, 1, new_epoch(), self._fingerprint, serial)
            files.truncate(self._table, 0)
            files.truncate(self._table, table.table_bytes(1))
            # First of all: the folder is known by it, whatever becomes of this process.
            self._save_header(header)
            self._unmark()
            header = self._header
        self._slabs = Slabs(files, folder, self.slot_bytes, self._num_slots)
        self._resize_table(self._num_slots)
        self._header = replace(header, num_slots=self._num_slots)
        if pages != self._header.encode() * len(table.HEADER_OFFSETS):
            self._save_header(self._header)
        self.seal = self._header.seal
        self.direct = self._slabs.direct
        self._owner = os.fstat(folder).st_uid
        self.descriptions = Descriptions(files, folder, self._num_slots)

    def _open(self, progress: Callable[[int, int], None]) -> None:
        """Open the files and read the records."""
        self._open_files(anew=False)
        assert self._slabs is not None
        self.index = slot_index(self._num_slots)
        lost: list[int] = []
        records = read_records(self._files, self._table, self._header, progress)
        if not self._slabs.were_whole:
            records = self._held(records, lost)
        self.generation, latest, outdated = restore(self.index, records)
        for slot in (*outdated, *lost, *self._expire(latest)):
            self.write_record(slot, table.EMPTY_RECORD)
        if lost:
            logger.warning(
                "data files in %s were removed or cut; the %d blocks that they had are lost",
                self.path,
                len(lost),
            )
        self.ledger = load_ledger(self._folder.fd)
        if self.ledger.problem:
            logger.error(
                "in %s, %s; FlexKV counts from 0 again, and ssd_write_gb_per_day allows no write "
                "for 24 hours, because those of before are unknown; check the drive; to write "
                "before, stop the engine and remove the file",
                self.path,
                self.ledger.problem,
            )

    def _expire(self, latest: int) -> list[int]:
        """Remove the blocks that are too old. Returns their slots. `latest`: the last of all
        times; one to come says that the clock has fallen."""
        if self.ages is None:
            return []
        self.ages.at_least(latest)
        slots = self.index.take_old(self.ages.oldest, self._num_slots, self._num_slots)
        for slot in slots:
            self.index.discard(slot)
            self.index.release(slot)
        self.old_blocks = len(slots)
        return slots

    def lost(self) -> str:
        """Why the open files are not those of the folder any more; empty if they are."""
        folder = self._folder
        if not is_at(folder.path, folder.fd):
            return "it was removed or replaced"
        if os.fstat(folder.fd).st_uid != self._owner:
            return "it belongs to another user now"
        assert self._slabs is not None
        lock = LOCK, folder.lock, 0
        first = TABLE, self._table, table.table_bytes(self._num_slots)
        for name, fd, size in (lock, first, *self._slabs.files()):
            try:
                there = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
            except FileNotFoundError:
                return f"its file {name} was removed"
            if not os.path.samestat(there, os.fstat(fd)):
                return f"its file {name} was replaced"
            if there.st_size < size:
                return f"its file {name} was cut"
        return ""

    def reopen(self) -> None:
        """Open the files anew, in a folder that is created if it is gone, without a block. Nothing
        reads or writes meanwhile. After an error, also a DiskError, call again, or `close`."""
        self.close()
        assert self._claim is not None
        self._folder = self._claim()
        self.path = self._folder.path
        self._open_files(anew=True)

    def read(
        self,
        slot: int,
        keys: Sequence[bytes],
        checksums: Sequence[bytes],
        seal: int,
        buffers: Sequence[memoryview],
    ) -> list[Result]:
        """Read adjacent slots of one slab, the first of which is `slot`, each into its buffer, and
        verify each block. Returns for each slot DONE, DAMAGED if the checksum does not fit the
        bytes, or the error of the read."""
        assert self._slabs is not None
        outcomes: list[Result] = []
        found = self._slabs.read(slot, buffers)
        for there, key, checksum, buffer in zip(found, keys, checksums, buffers, strict=True):
            if isinstance(there, OSError):
                outcomes.append(there)
                continue
            intact = there and checksum_of(buffer, seal, key) == checksum
            outcomes.append(Outcome.DONE if intact else Outcome.DAMAGED)
        return outcomes

    def write(
        self,
        slot: int,
        keys: Sequence[bytes],
        generations: Sequence[int],
        seal: int,
        buffers: Sequence[memoryview],
        *,
        stored: Sequence[int] | None = None,
    ) -> list[bytes | OSError]:
        """Write adjacent slots of one slab, the first of which is `slot`, and then their records.
        `stored`: times of the blocks; None if they are unknown. Returns the checksum of each block,
        or the error of its write. After an error the contents of the slot are undefined, and its
        record may be the old one, whose checksum no longer fits."""
        checksums = [
            checksum_of(buffer, seal, key) for key, buffer in zip(keys, buffers, strict=True)
        ]
        assert self._slabs is not None
        written = self._slabs.write(slot, buffers)
        stored = [UNKNOWN] * len(keys) if stored is None else stored
        fields = zip(keys, checksums, generations, stored, strict=True)
        records = [
            table.encode_record(place, seal, key, checksum, generation, stored=at)
            for place, (key, checksum, generation, at) in enumerate(fields, slot)
        ]
        recorded = self._write_records(slot, records, written)
        return [
            checksum if error is None else error
            for checksum, error in zip(checksums, recorded, strict=True)
        ]

    def write_record(self, slot: int, record: bytes) -> None:
        """Write the record of a slot without its bytes, or several adjacent records."""
        offset = table.record_offset(slot)
        write_fully(self._files, self._table, memoryview(record), offset)

    def sync(self) -> None:
        """Wait until the table's records survive a power failure."""
        self._files.sync(self._table)

    def seal_of(self, epoch: int) -> int:
        """The seal of records and checksums once the table has this epoch."""
        return replace(self._header, epoch=epoch).seal

    def invalidate(self, epoch: int) -> None:
        """Reset: the next process finds no block here but those of the new epoch's seal, even after
        a power failure.

        Two places record the reset, of which one is enough: a file beside the table, and the header
        of the table with an epoch that no earlier record has, as `new_epoch` makes it. The error of
        a header that could not be written says whether the file records the reset.
        """
        marked = self._mark()
        try:
            self._save_header(replace(self._header, epoch=epoch))
        except OSError as error:
            place = "a file beside it records it" if marked else "nothing on disk records it"
            raise OSError(error.errno, f"{error.strerror}; {place}") from None
        self._unmark()

    def save_ledger(self, content: bytes) -> None:
        """Write the counters, as `Ledger.dump` gave them. The error is FileNotFoundError if the
        folder was removed."""
        save_ledger(self._folder.fd, content)

    def close(self) -> None:
        """Close the files and release the lock. Idempotent."""
        if self._slabs is not None:
            self._slabs.close()
        if self._table >= 0:
            with contextlib.suppress(OSError):
                self._files.close(self._table)
        if self.descriptions is not None:
            with contextlib.suppress(OSError):
                self.descriptions.close()
        self._slabs, self._table, self.descriptions = None, -1, None
        self._folder.release()

    def _held(self, records: Iterable[_Record], lost: list[int]) -> Iterator[_Record]:
        """The records whose slots the data files had. Adds the slots of the others to `lost`."""
        assert self._slabs is not None
        for record in records:
            if self._slabs.held(record[0]):
                yield record
            else:
                lost.append(record[0])

    def _save_header(self, header: table.Header) -> None:
        """Write all copies of a header, with a higher number than all before it."""
        self._header = replace(header, serial=header.serial + 1)
        failed = None
        for offset in table.HEADER_OFFSETS:
            try:
                write_fully(self._files, self._table, memoryview(self._header.encode()), offset)
            except OSError as error:
                failed = error
        self._files.sync(self._table)
        if failed is not None:
            raise failed

    def _mark(self) -> bool:
        """Create the file that makes the table invalid. False if a system call fails."""
        try:
            fd = self._files.open(self._folder.fd, RESET, os.O_WRONLY | os.O_CREAT)
            self._files.close(fd)
            self._files.sync(self._folder.fd)
        except OSError:
            return False
        return True

    def _unmark(self) -> None:
        """Remove the file of `_mark`. If a system call fails, the table stays invalid."""
        with contextlib.suppress(OSError):
            os.unlink(RESET, dir_fd=self._folder.fd)

    def _write_records(
        self, slot: int, records: Sequence[bytes], errors: Sequence[OSError | None]
    ) -> list[OSError | None]:
        """Write those of adjacent records whose blocks have no error. Returns for each record the
        error of its block or its own; None if there was none."""
        written = not any(errors)
        if len(records) > 1 and written and self._try_record(slot, b"".join(records)) is None:
            return list(errors)
        return [
            error or self._try_record(place, record)
            for place, (record, error) in enumerate(zip(records, errors, strict=True), slot)
        ]

    def _try_record(self, slot: int, records: bytes) -> OSError | None:
        """Write one record or several adjacent ones. Returns the error of the system call."""
        try:
            self.write_record(slot, records)
        except OSError as error:
            return without_trace(error)
        return None

    def _report_losses(self, header: table.Header | None, pages: bytes) -> None:
        """Log the blocks that a damaged table loses. `header`: that in the first `pages` of it."""
        path = os.path.join(self.path, TABLE)
        if header is not None:
            cut = header.num_slots - table.slots_in(os.fstat(self._table).st_size)
            if cut > 0:
                logger.error(
                    "%s was cut: the blocks of %d of %d slots are lost; check the drive",
                    path,
                    cut,
                    header.num_slots,
                )
        elif any(pages):
            logger.warning(
                "both headers of %s are damaged, or of other blocks or an older FlexKV; its blocks "
                "are discarded, and the cache begins empty",
                path,
            )
        elif has_blocks(self._folder.fd):
            logger.error(
                "%s is missing, empty or zeros, and files of blocks are beside it; its blocks are "
                "lost, and the cache begins empty; check the drive",
                path,
            )

    def _resize_table(self, num_slots: int) -> None:
        length = table.table_bytes(num_slots)
        if os.fstat(self._table).st_size > length:
            self._files.truncate(self._table, length)
        self._files.allocate(self._table, length)


def new_epoch() -> int:
    """A random epoch of 64 bits, never 0."""
    return random.SystemRandom().randrange(1, 1 << 64)
