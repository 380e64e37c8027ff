# SPDX-License-Identifier: Apache-2.0
"""The descriptions of a disk store's blocks: what events say of a block that its key does not.

Each slot has one record in the file. The record names its block, and its CRC covers the slot and
the table's seal too. A torn, moved, foreign or
outdated record is skipped. No lookup reads descriptions, so a lost one costs events some fields,
and a wrong one could never make a hit.

Layout, little-endian, no padding:

    header (4,096 bytes)  magic 8s | version I | record_bytes I | crc32 I | zeros
    record                crc32 I | text_length I | key_length B | key | text
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator

from flexkv.tiers.base import MAX_KEY_BYTES
from flexkv.tiers.disk.files import OsFiles, is_regular, read_fully, write_fully

FILE = "descriptions"
MAX_TEXT_BYTES = 1 << 16
"""Longer descriptions are not kept: the file would take more than a small part of the disk."""
_HEADER_BYTES = 4096
_MAGIC = b"FLEXKVDS"
_VERSION = 1
_HEADER = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<IIB")
_UNIT_BYTES = 256
_SPARE_BYTES = 64
"""Bytes that a later description may be longer than the first one, which may lack a parent."""
_READ_BYTES = 1 << 16
"""Bytes that one read takes, but at least a record: some 0.5 ms of work. Not tuned."""

_PARTS_AHEAD = 2
"""Parts that are read before their blocks are reported; see `Descriptions.read`. Not tuned."""

_BYTES_PER_CALL = 1 << 14
_BLOCKS_PER_CALL = 64
"""The most descriptions that one call reports. Their events take about 0.5 ms: 8 us for a block of
16 tokens, 40 us for one of 256."""

Part = tuple[int, dict[bytes, bytes]]
"""The slot after those of a part, and its texts by key."""


class Descriptions:
    """The file of descriptions in one folder, whose descriptor is borrowed. For one thread; all
    calls wait for the disk. `exists`: whether there is a file, of this owner or an earlier one."""

    def __init__(self, files: OsFiles, folder: int, num_slots: int) -> None:
        self._files, self._folder, self._num_slots = files, folder, num_slots
        self._fd = -1
        self._record_bytes = 0
        self.exists = is_regular(folder, FILE)

    def write(self, slot: int, seal: int, key: bytes, text: bytes) -> None:
        """Write the description of the block in a slot. A description that is longer than the
        records of the file discards all others. Raises OSError if a system call failed."""
        head = _HEAD.pack(0, len(text), len(key))
        body = head[_CRC.size :] + key + text
        if len(text) > MAX_TEXT_BYTES or len(key) > MAX_KEY_BYTES:
            return
        if self._fd < 0:
            self._open(os.O_RDWR | os.O_CREAT)
        if len(head) + len(key) + len(text) > self._record_bytes:
            self._begin(len(head) + len(key) + len(text))
        record = _CRC.pack(zlib.crc32(body, _seed(seal, slot))) + body
        write_fully(self._files, self._fd, memoryview(record), self._offset(slot))

    def read(self, seal: int) -> Iterator[Part]:
        """Read all descriptions, a part of the slots at a time, the first slots first. Writes may
        come between two parts. Yields the slot after those of a part, and its texts by key. Raises
        OSError if a system call failed."""
        if self._fd < 0:
            self._open(os.O_RDWR)
        size = self._record_bytes
        if not size:
            return
        present = (os.fstat(self._fd).st_size - _HEADER_BYTES + size - 1) // size
        slots = max(0, min(self._num_slots, present))
        step = max(1, _READ_BYTES // size)
        buffer = memoryview(bytearray(step * size))
        for first in range(0, slots, step):
            if self._record_bytes != size:
                return  # a longer description has discarded all
            count = min(step, slots - first)
            part = buffer[: count * size]
            part[:] = bytes(len(part))  # the last record may be shorter than its place
            read_fully(self._files, self._fd, part, self._offset(first))
            yield first + count, dict(_decode(part, size, seal, first))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._files.close(fd)

    def _open(self, flags: int) -> None:
        fd = self._files.open(self._folder, FILE, flags)
        header = memoryview(bytearray(_HEADER.size + _CRC.size))
        try:
            read_fully(self._files, fd, header, 0)
        except OSError:
            self._files.close(fd)
            raise
        magic, version, size = _HEADER.unpack_from(header)
        (crc,) = _CRC.unpack_from(header, _HEADER.size)
        intact = crc == zlib.crc32(header[: _HEADER.size]) and (magic, version) == (
            _MAGIC,
            _VERSION,
        )
        self._fd, self.exists = fd, True
        self._record_bytes = size if intact and 0 < size <= 2 * MAX_TEXT_BYTES else 0

    def _begin(self, size: int) -> None:
        """Discard all descriptions. Begin a file with room for records of `size` bytes."""
        units = -(-(size + _SPARE_BYTES) // _UNIT_BYTES)
        self._record_bytes = 0
        self._files.truncate(self._fd, 0)
        body = _HEADER.pack(_MAGIC, _VERSION, units * _UNIT_BYTES)
        header = (body + _CRC.pack(zlib.crc32(body))).ljust(_HEADER_BYTES, b"\0")
        write_fully(self._files, self._fd, memoryview(header), 0)
        self._record_bytes = units * _UNIT_BYTES

    def _offset(self, slot: int) -> int:
        return _HEADER_BYTES + slot * self._record_bytes


class DescribedSlots:
    """Hands the descriptions of a store's slots from the thread that reads them to the one that
    reports their blocks, in the order of the slots. The first calls `read_part` and `stop`, the
    other one all other methods. None waits for the other. `stop_slot`: the slot after those whose
    blocks can be reported."""

    def __init__(self, parts: Iterator[Part] | None, num_slots: int) -> None:
        self._unread = parts
        self._num_slots = num_slots
        self._parts: deque[Part] = deque()
        self.stop_slot = 0 if parts is not None else num_slots

    @property
    def is_wanted(self) -> bool:
        """Whether the next part is to be read."""
        return self._unread is not None and len(self._parts) < _PARTS_AHEAD

    def read_part(self) -> None:
        """Read the next part; waits for the disk."""
        part = None if self._unread is None else next(self._unread, None)
        if part is None:
            self.stop()
        else:
            self._parts.append(part)
            self.stop_slot = part[0]

    def stop(self) -> None:
        """Read no more. The blocks of the other slots are reported without descriptions."""
        self._unread = None
        self.stop_slot = self._num_slots

    def limit(self, blocks: int) -> int:
        """How many of so many blocks can be reported with one call."""
        if not self._parts:
            return blocks
        texts = self._parts[0][1].values()
        longest = max(map(len, texts), default=1)
        return min(blocks, _BLOCKS_PER_CALL, max(1, _BYTES_PER_CALL // longest))

    def take(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """The descriptions of blocks, as far as they were read and not taken."""
        taken: dict[bytes, bytes] = {}
        for key in keys if self._parts else ():
            for _, texts in self._parts:
                text = texts.pop(key, None)
                if text is not None:
                    taken[key] = text
        return taken

    def forget(self, slots: int) -> None:
        """Forget the descriptions of so many slots, which are reported."""
        while self._parts and self._parts[0][0] <= slots:
            self._parts.popleft()


def _decode(records: memoryview, size: int, seal: int, first: int) -> Iterator[tuple[bytes, bytes]]:
    """Key and text of each intact record of `size` bytes; `first` is the slot of the first."""
    for slot, start in enumerate(range(0, len(records), size), first):
        crc, length, key_length = _HEAD.unpack_from(records, start)
        stop = _HEAD.size + key_length + length
        if not length or stop > size:
            continue
        body = records[start + _CRC.size : start + stop]
        if zlib.crc32(body, _seed(seal, slot)) == crc:
            key_stop = start + _HEAD.size + key_length
            yield (
                bytes(records[start + _HEAD.size : key_stop]),
                bytes(records[key_stop : start + stop]),
            )


def _seed(seal: int, slot: int) -> int:
    return zlib.crc32(struct.pack("<QQ", seal, slot))
