# SPDX-License-Identifier: Apache-2.0
"""The slot table of a disk store: a header, then one fixed record for every slot.

A record names the block in its slot and proves itself: it ends in a CRC over itself, its own
position and the table's epoch. A torn, moved, foreign or outdated record is an empty slot. The
record also holds the checksum that the block's bytes must have, so nothing depends on the order
in which data and table reach the disk.

Layout, little-endian, no padding:

    header (4,096 bytes)  magic 8s | version I | reserved I | slot_bytes Q | num_slots Q |
                          epoch Q | fingerprint 64s | crc32 I | zeros
    record (64 bytes)     key 32s | checksum 16s | generation Q | key_length B | zeros 3s | crc32 I
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

HEADER_BYTES = 4096
RECORD_BYTES = 64
KEY_BYTES = 32
CHECKSUM_BYTES = 16
_MAGIC = b"FLEXKVTB"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQQ64s")
_BODY = struct.Struct("<32s16sQB3s")
_RECORD = struct.Struct("<32s16sQB3sI")
_EPOCH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
EMPTY_RECORD = bytes(RECORD_BYTES)
_LAST_GENERATION = 1 << 63
"""Generations that a table counts up to never come near it: a record beyond is not one of ours, and
would leave the writes that follow it no number."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a table is for.

    Attributes:
        slot_bytes: bytes of a slot.
        num_slots: slots, and so records.
        epoch: random; records and checksums of another epoch are worth nothing.
        fingerprint: hexadecimal, of the blocks.
    """

    slot_bytes: int
    num_slots: int
    epoch: int
    fingerprint: str

    def encode(self) -> bytes:
        body = _HEADER.pack(
            _MAGIC,
            _VERSION,
            0,
            self.slot_bytes,
            self.num_slots,
            self.epoch,
            self.fingerprint.encode("ascii"),
        )
        return (body + _CRC.pack(zlib.crc32(body))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Header | None:
        """The header that begins `data`; None if it is not one that this version wrote."""
        if len(data) < _HEADER.size + _CRC.size:
            return None
        body = data[: _HEADER.size]
        (crc,) = _CRC.unpack_from(data, _HEADER.size)
        if crc != zlib.crc32(body):
            return None
        magic, version, _, slot_bytes, num_slots, epoch, fingerprint = _HEADER.unpack(body)
        if magic != _MAGIC or version != _VERSION:
            return None
        text = fingerprint.rstrip(b"\0").decode("ascii", errors="replace")
        return cls(slot_bytes, num_slots, epoch, text)


def has_magic(data: bytes) -> bool:
    """Whether `data` begins as the table of some version of FlexKV does."""
    return data.startswith(_MAGIC)


def encode_record(slot: int, epoch: int, key: bytes, checksum: bytes, generation: int) -> bytes:
    """The record of a block.

    Args:
        slot: where the block lies.
        epoch: the header's.
        key: of the block, at most 32 bytes (see `disk_key`).
        checksum: of the slot's bytes, 16 bytes (see `checksum_of`).
        generation: 1 or more, and more with every write to the store, over restarts too: of two
            records of the same key the greater is the later.
    """
    body = _BODY.pack(key, checksum, generation, len(key), b"")
    return body + _CRC.pack(zlib.crc32(body, slot ^ _seed(epoch)))


def decode_records(
    table: bytes | memoryview, epoch: int
) -> Iterator[tuple[int, bytes, bytes, int]]:
    """Slot, key, checksum and generation of every record in `table` that is intact.

    Args:
        table: the bytes behind the header.
        epoch: the header's.
    """
    seed = _seed(epoch)
    crc32 = zlib.crc32
    start = 0
    whole = memoryview(table)[: len(table) // RECORD_BYTES * RECORD_BYTES]
    for slot, fields in enumerate(_RECORD.iter_unpack(whole)):
        key, checksum, generation, length, _, crc = fields
        # Generations begin at 1: most of a young table is told empty without its CRC.
        if (
            0 < generation < _LAST_GENERATION
            and crc32(whole[start : start + _BODY.size], slot ^ seed) == crc
        ):
            yield slot, key[:length], checksum, generation
        start += RECORD_BYTES


def table_bytes(num_slots: int) -> int:
    """Size of the table of `num_slots` slots, in bytes."""
    return HEADER_BYTES + num_slots * RECORD_BYTES


def record_offset(slot: int) -> int:
    """Where the record of `slot` lies in the table, in bytes."""
    return HEADER_BYTES + slot * RECORD_BYTES


def disk_key(key: bytes) -> bytes:
    """`key` as a record can hold it: longer keys become their blake2b of 32 bytes."""
    if len(key) <= KEY_BYTES:
        return key
    return hashlib.blake2b(key, digest_size=KEY_BYTES).digest()


def checksum_of(data: bytes | memoryview, epoch: int) -> bytes:
    """XXH3-128 of a slot's bytes, 16 bytes, seeded with the table's epoch: bytes that an earlier
    epoch left behind never match. Gives the GIL back while it computes."""
    return xxhash.xxh3_128_digest(data, epoch)


def _seed(epoch: int) -> int:
    # Two start values give two CRCs, whatever the bytes (CRC-32 is linear and invertible in its
    # start value): a record that was moved to another slot never passes.
    return zlib.crc32(_EPOCH.pack(epoch))
