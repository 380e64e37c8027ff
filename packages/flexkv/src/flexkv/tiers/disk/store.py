# SPDX-License-Identifier: Apache-2.0
"""A disk store: the files of one folder, and what is done to them.

Everything here waits for the disk. `DiskTier` decides what is done, and calls from its threads.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Sequence

from flexkv.errors import DiskError
from flexkv.tiers.disk import directory, table
from flexkv.tiers.disk.files import Files, is_regular, read_fully, write_fully
from flexkv.tiers.disk.index import SlotIndex
from flexkv.tiers.disk.ledger import load_ledger, save_ledger
from flexkv.tiers.disk.slabs import Slabs, slots_per_slab
from flexkv.transfer.job import Outcome

_PAGE = 4096
_RESERVED_BYTES = 4 * _PAGE
"""Of the bound, for the lock, the ledger, its successor and the folder itself."""
_MAP_BYTES = 32
"""Per slot, for the file system's map of a data file, which counts as the file's: ext4 keeps 12
bytes for each run of blocks that are written or not, in pages that are half full at least."""
_SLAB_MAP_BYTES = 2 * _PAGE
"""Per data file, for the last page of its map and the index over them."""


def slots_within(capacity: int, slot_bytes: int) -> int:
    """How many slots keep all files of a store within `capacity` bytes on disk."""
    room = capacity - _RESERVED_BYTES - table.HEADER_BYTES - _PAGE
    each = slot_bytes + table.RECORD_BYTES + _MAP_BYTES
    slabs = -(-room // (each * slots_per_slab(slot_bytes)))
    return max(0, (room - slabs * _SLAB_MAP_BYTES) // each)


class DiskStore:
    """The open files of one folder, and the index over them.

    `read`, `write` and `erase` are thread-safe as long as no two threads work on the same slot;
    `invalidate` and `save_ledger` are for one thread, the index for one. Owns the folder, its lock
    and its descriptors.

    Attributes:
        path: of the folder.
        index: what the table said when it was opened; its user keeps it up to date.
        ledger: counters.
        generation: the greatest that the table holds.
        epoch: what records and checksums are bound to.
        direct: whether I/O passes the page cache by.
        slot_bytes: bytes of a slot, a multiple of 4 KiB.
    """

    def __init__(
        self,
        files: Files,
        folder: directory.Folder,
        fingerprint: str,
        slot_bytes: int,
        capacity: int,
    ) -> None:
        """Open the store in `folder`, created, grown or cut to `capacity` bytes if need be.

        Raises:
            DiskError: there is no room, or the system refuses. `folder` is released.
        """
        self._files = files
        self._folder = folder
        self._fingerprint = fingerprint
        self._table = -1
        self._slabs: Slabs | None = None
        self.path = folder.path
        self.slot_bytes = slot_bytes
        num_slots = slots_within(capacity, slot_bytes)
        if num_slots == 0:
            folder.release()
            raise DiskError(
                f"ssd_cache_gb leaves {capacity} bytes for {self.path}, less than one block of "
                f"{slot_bytes} bytes; allowed: room for at least one block in every directory"
            )
        try:
            self._table = files.open(folder.fd, directory.TABLE, os.O_RDWR | os.O_CREAT)
            header = self._read_header()
            reset = is_regular(folder.fd, directory.RESET)
            fits = header is not None and header.slot_bytes == slot_bytes and not reset
            self.epoch = header.epoch if header is not None and fits else new_epoch()
            if not fits:
                files.truncate(self._table, 0)
            self._slabs = Slabs(files, folder.fd, slot_bytes, num_slots)
            self._resize_table(num_slots)
            self._save_header(self.epoch)
            self._unmark()
            self.direct = self._slabs.direct
            self.index = SlotIndex(num_slots)
            self.generation, outdated = self.index.restore(
                table.decode_records(self._read_records(), self.epoch)
            )
            for slot in outdated:
                self.erase(slot)
            self.ledger = load_ledger(folder.fd)
        except OSError as error:
            self.close()
            raise DiskError(
                f"cannot keep {num_slots} blocks of {slot_bytes} bytes in {self.path} "
                f"(ssd_cache_gb, ssd_cache_dir): {error.strerror}; allowed: a file system with "
                f"that much room, and files that this user can write"
            ) from None

    def read(
        self, slot: int, checksums: Sequence[bytes], epoch: int, buffers: Sequence[memoryview]
    ) -> list[Outcome]:
        """Read neighbouring slots of one slab, from `slot` on, each into its buffer.

        Returns for each DONE, FAILED, or DAMAGED if its bytes are not those that were written.
        """
        assert self._slabs is not None
        whole = len(buffers) > 1 and self._slabs.read_run(slot, buffers)
        outcomes = []
        for place, (checksum, buffer) in enumerate(zip(checksums, buffers, strict=True), slot):
            try:
                there = whole or self._slabs.read(place, buffer)
            except OSError:
                outcomes.append(Outcome.FAILED)
                continue
            intact = there and table.checksum_of(buffer, epoch) == checksum
            outcomes.append(Outcome.DONE if intact else Outcome.DAMAGED)
        return outcomes

    def write(
        self,
        slot: int,
        keys: Sequence[bytes],
        generations: Sequence[int],
        epoch: int,
        buffers: Sequence[memoryview],
    ) -> list[bytes | None]:
        """Write neighbouring slots of one slab, from `slot` on, and then their records.

        Returns for each the checksum of its bytes. None if it failed: the slot then holds
        anything, and its record may be the old one, whose checksum no longer fits.
        """
        checksums = [table.checksum_of(buffer, epoch) for buffer in buffers]
        written = self._write_data(slot, buffers)
        fields = zip(keys, checksums, generations, strict=True)
        records = [
            table.encode_record(place, epoch, key, checksum, generation)
            for place, (key, checksum, generation) in enumerate(fields, slot)
        ]
        recorded = self._write_records(slot, records, written)
        return [
            checksum if done else None for checksum, done in zip(checksums, recorded, strict=True)
        ]

    def erase(self, slot: int) -> None:
        """Make the record of a slot empty.

        Raises:
            OSError: as the system says.
        """
        record = memoryview(table.EMPTY_RECORD)
        write_fully(self._files, self._table, record, table.record_offset(slot))

    def invalidate(self) -> None:
        """Have the next process find no block here, after a power failure too: neither those that
        are there nor those that this process still writes.

        Two places say so, of which one is enough: a file beside the table, and the header of the
        table, bound to an epoch that no record has.

        Raises:
            OSError: the header could not be written; tells whether the other says so meanwhile.
        """
        marked = self._mark()
        try:
            self._save_header(new_epoch())
        except OSError as error:
            place = "a file beside it says so" if marked else "nothing on disk says so"
            raise OSError(error.errno, f"{error.strerror}; {place}") from None
        self._unmark()

    def save_ledger(self, content: bytes) -> None:
        """Write the counters, as `Ledger.dump` gave them.

        Raises:
            OSError: as the system says; FileNotFoundError if the folder was removed.
        """
        save_ledger(self._folder.fd, content)

    def close(self) -> None:
        """Close the files and give the lock back. Idempotent."""
        if self._slabs is not None:
            self._slabs.close()
        if self._table >= 0:
            with contextlib.suppress(OSError):
                self._files.close(self._table)
        self._slabs, self._table = None, -1
        self._folder.release()

    def _save_header(self, epoch: int) -> None:
        """Bind the table on disk to `epoch`: records of any other are empty from then on.

        Raises:
            OSError: as the system says.
        """
        header = table.Header(self.slot_bytes, self._num_slots, epoch, self._fingerprint)
        write_fully(self._files, self._table, memoryview(header.encode()), 0)
        self._files.sync(self._table)

    def _mark(self) -> bool:
        """Say beside the table that it is worth nothing. False if the system refuses."""
        try:
            fd = self._files.open(self._folder.fd, directory.RESET, os.O_WRONLY | os.O_CREAT)
            self._files.close(fd)
            self._files.sync(self._folder.fd)
        except OSError:
            return False
        return True

    def _unmark(self) -> None:
        """Take back what `_mark` said. If the system refuses, the table stays worth nothing."""
        with contextlib.suppress(OSError):
            os.unlink(directory.RESET, dir_fd=self._folder.fd)

    def _write_data(self, slot: int, buffers: Sequence[memoryview]) -> list[bool]:
        """Whether each was written."""
        assert self._slabs is not None
        if len(buffers) > 1 and self._slabs.write_run(slot, buffers):
            return [True] * len(buffers)
        written = []
        for place, buffer in enumerate(buffers, slot):
            try:
                self._slabs.write(place, buffer)
            except OSError:
                written.append(False)
            else:
                written.append(True)
        return written

    def _write_records(
        self, slot: int, records: Sequence[bytes], wanted: Sequence[bool]
    ) -> list[bool]:
        """Write those of neighbouring records that are wanted; returns which were."""
        if len(records) > 1 and all(wanted) and self._try_record(slot, b"".join(records)):
            return [True] * len(records)
        return [
            wants and self._try_record(place, record)
            for place, (record, wants) in enumerate(zip(records, wanted, strict=True), slot)
        ]

    def _try_record(self, slot: int, records: bytes) -> bool:
        """Write one record, or several that follow each other. False if the system refuses."""
        offset = table.record_offset(slot)
        try:
            write_fully(self._files, self._table, memoryview(records), offset)
        except OSError:
            return False
        return True

    def _read_header(self) -> table.Header | None:
        data = bytearray(table.HEADER_BYTES)
        if not read_fully(self._files, self._table, memoryview(data), 0):
            return None
        header = table.Header.decode(bytes(data))
        if header is None or header.fingerprint != self._fingerprint:
            return None
        return header

    def _resize_table(self, num_slots: int) -> None:
        self._num_slots = num_slots
        length = table.table_bytes(num_slots)
        if os.fstat(self._table).st_size > length:
            self._files.truncate(self._table, length)
        self._files.allocate(self._table, length)

    def _read_records(self) -> memoryview:
        records = memoryview(bytearray(self._num_slots * table.RECORD_BYTES))
        # Shorter than it was made: what is missing reads as empty slots.
        read_fully(self._files, self._table, records, table.HEADER_BYTES)
        return records


def new_epoch() -> int:
    """A random one, never 0, of 64 bits."""
    return random.SystemRandom().randrange(1, 1 << 64)
