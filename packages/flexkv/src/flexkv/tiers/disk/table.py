# SPDX-License-Identifier: Apache-2.0
"""The slot table of a disk store: a header, twice, then one fixed record for every slot.

A record names the block in its slot and proves itself: it ends in a CRC over itself, its own
position and the table's seal. A torn, moved, foreign or outdated record is an empty slot. The
record also holds the checksum that the block's bytes must have, so nothing depends on the order
in which data and table reach the disk.

The seal is made of the header's epoch and fingerprint, and a block's checksum of the seal, the
block's key and its bytes: under another header, or another key, neither record nor bytes pass.

Layout, little-endian, no padding:

    header (4,096 bytes, two of them)
                          magic 8s | version I | serial I | slot_bytes Q | num_slots Q |
                          epoch Q | fingerprint 64s | crc32 I | zeros
    record (128 bytes)    key 96s | checksum 16s | generation Q | key_length B | zeros 3s | crc32 I
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from flexkv.tiers.base import MAX_KEY_BYTES

PAGE_BYTES = 4096
HEADER_OFFSETS = (0, PAGE_BYTES)
"""Of the copies of the header."""
HEADER_BYTES = len(HEADER_OFFSETS) * PAGE_BYTES
RECORD_BYTES = 128
CHECKSUM_BYTES = 16
_MAGIC = b"FLEXKVTB"
VERSION = 3
MAX_SLOT_BYTES = 1 << 32
MAX_SLOTS = 1 << 31
"""What a header can say and mean it: blocks of 4 GiB, and slots that an index can number."""
_HEADER = struct.Struct("<8sIIQQQ64s")
_BODY = struct.Struct(f"<{MAX_KEY_BYTES}s16sQB3s")
_RECORD = struct.Struct(_BODY.format + "I")
_SEAL = struct.Struct("<Q")
_VERSION = struct.Struct("<8xI")
_CRC = struct.Struct("<I")
EMPTY_RECORD = bytes(RECORD_BYTES)
_LAST_GENERATION = 1 << 63
"""Generations that a table counts up to never come near it: a record beyond is not one of ours, and
would leave the writes that follow it no number."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a table is for.

    Attributes:
        slot_bytes: bytes of a slot, a multiple of 4 KiB.
        num_slots: slots, and so records.
        epoch: random; records and checksums of another epoch are worth nothing.
        fingerprint: hexadecimal, of the blocks.
        serial: greater than that of the header that this one replaced.
    """

    slot_bytes: int
    num_slots: int
    epoch: int
    fingerprint: str
    serial: int

    @property
    def seal(self) -> int:
        """What records and checksums are bound to, 64 bits."""
        return xxhash.xxh3_64_intdigest(self.fingerprint.encode("ascii"), self.epoch)

    def encode(self) -> bytes:
        """One copy of it, a page."""
        body = _HEADER.pack(
            _MAGIC,
            VERSION,
            self.serial,
            self.slot_bytes,
            self.num_slots,
            self.epoch,
            self.fingerprint.encode("ascii"),
        )
        return (body + _CRC.pack(zlib.crc32(body))).ljust(PAGE_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Header | None:
        """The header that a table begins with, by its copies in `data`: of two that differ the
        later one. None if neither is one that this version wrote."""
        copies = [cls._decode_copy(data[start : start + PAGE_BYTES]) for start in HEADER_OFFSETS]
        intact = [copy for copy in copies if copy is not None]
        return max(intact, key=lambda copy: copy.serial, default=None)

    @classmethod
    def _decode_copy(cls, data: bytes) -> Header | None:
        if len(data) < _HEADER.size + _CRC.size:
            return None
        body = data[: _HEADER.size]
        (crc,) = _CRC.unpack_from(data, _HEADER.size)
        magic, version, serial, slot_bytes, num_slots, epoch, name = _HEADER.unpack(body)
        fingerprint = name.rstrip(b"\0")
        if (
            crc != zlib.crc32(body)
            or (magic, version) != (_MAGIC, VERSION)
            or not 0 < slot_bytes <= MAX_SLOT_BYTES
            or slot_bytes % PAGE_BYTES
            or not 0 < num_slots <= MAX_SLOTS
            or not fingerprint.isascii()
        ):
            return None
        return cls(slot_bytes, num_slots, epoch, fingerprint.decode("ascii"), serial)


def has_magic(data: bytes) -> bool:
    """Whether the first bytes of a file, `data`, are those of a table of some version of FlexKV."""
    return any(data[start:].startswith(_MAGIC) for start in HEADER_OFFSETS)


def newer_version(data: bytes) -> int | None:
    """The version of the table that begins with `data`, if a newer FlexKV wrote it."""
    if Header.decode(data) is not None or not data.startswith(_MAGIC):
        return None
    (version,) = _VERSION.unpack_from(data.ljust(_VERSION.size, b"\0"))
    return version if version > VERSION else None


def encode_record(slot: int, seal: int, key: bytes, checksum: bytes, generation: int) -> bytes:
    """The record of a block.

    Args:
        slot: where the block lies.
        seal: the header's.
        key: of the block, at most `MAX_KEY_BYTES` long.
        checksum: of the slot's bytes, 16 bytes (see `checksum_of`).
        generation: 1 or more, and more with every write to the store, over restarts too: of two
            records of the same key the greater is the later.
    """
    body = _BODY.pack(key, checksum, generation, len(key), b"")
    return body + _CRC.pack(zlib.crc32(body, slot ^ _seed(seal)))


def decode_records(
    table: bytes | memoryview, seal: int, first: int = 0
) -> Iterator[tuple[int, bytes, bytes, int]]:
    """Slot, key, checksum and generation of every record in `table` that is intact.

    Args:
        table: the bytes behind the header, or whole records out of them.
        seal: the header's.
        first: slot of the first record in `table`.
    """
    seed = _seed(seal)
    crc32 = zlib.crc32
    start = 0
    whole = memoryview(table)[: len(table) // RECORD_BYTES * RECORD_BYTES]
    for slot, fields in enumerate(_RECORD.iter_unpack(whole), first):
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


def checksum_of(data: bytes | memoryview, seal: int, key: bytes) -> bytes:
    """XXH3-128 of the bytes of the block of `key`, 16 bytes, seeded with the table's seal and the
    key: what an earlier epoch, another model or another block left behind never matches. Gives the
    GIL back while it computes."""
    return xxhash.xxh3_128_digest(data, xxhash.xxh3_64_intdigest(key, seal))


def _seed(seal: int) -> int:
    # Two start values give two CRCs, whatever the bytes (CRC-32 is linear and invertible in its
    # start value): a record that was moved to another slot never passes.
    return zlib.crc32(_SEAL.pack(seal))
