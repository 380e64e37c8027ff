# SPDX-License-Identifier: Apache-2.0
"""The slot table of a disk store: a header, twice, then one fixed record for every slot.

A record names the block in its slot. It ends with a CRC over itself, its position and the table's
seal. A torn, moved, foreign or outdated record counts as an empty slot. The record also holds the
checksum that the block's bytes must have. So the order in which data and table reach the disk does
not matter.

The seal depends on the header's epoch and fingerprint. A block's checksum depends on the seal, the
block's key and its bytes. Under another header or another key, neither record nor bytes pass.

Layout, little-endian, no padding:

    header (4,096 bytes, two of them)
                          magic 8s | version I | serial I | slot_bytes Q | num_slots Q |
                          epoch Q | fingerprint 64s | crc32 I | zeros
    record (128 bytes)    key 96s | checksum 16s | generation Q | key_length B | stored 3s | crc32 I
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from flexkv.index.ages import UNIT_SECONDS, UNKNOWN
from flexkv.tiers.base import MAX_KEY_BYTES

PAGE_BYTES = 4096
HEADER_OFFSETS = (0, PAGE_BYTES)
"""Where the copies of the header begin, in bytes."""
HEADER_BYTES = len(HEADER_OFFSETS) * PAGE_BYTES
RECORD_BYTES = 128
CHECKSUM_BYTES = 16
_MAGIC = b"FLEXKVTB"
VERSION = 3
MAX_SLOT_BYTES = 1 << 32
MAX_SLOTS = 1 << 31
"""The largest values of a header: blocks of 4 GiB, and slots that an index can number."""
_HEADER = struct.Struct("<8sIIQQQ64s")
_BODY = struct.Struct(f"<{MAX_KEY_BYTES}s16sQB3s")
_RECORD = struct.Struct(_BODY.format + "I")
_SEAL = struct.Struct("<Q")
_VERSION = struct.Struct("<8xI")
_CRC = struct.Struct("<I")
_STORED_BYTES = 3
EMPTY_RECORD = bytes(RECORD_BYTES)
_LAST_GENERATION = 1 << 63
"""No table counts its generations up to this. FlexKV has not written a record with a greater one,
and the writes after it would have no generation left."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a table. Slots have a multiple of 4 KiB. The epoch is a random number; records
    and checksums of another epoch do not pass. The serial is greater than that of the header that
    this one replaced."""

    slot_bytes: int
    num_slots: int
    epoch: int
    fingerprint: str
    serial: int

    @property
    def seal(self) -> int:
        """The seal of the records and checksums, 64 bits."""
        return xxhash.xxh3_64_intdigest(self.fingerprint.encode("ascii"), self.epoch)

    def encode(self) -> bytes:
        """One copy of the header, `PAGE_BYTES` long."""
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
        """Read the header from its copies in `data`. If both are intact and differ, the later one
        counts. None if this version has written neither."""
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
    """Whether `data`, the first bytes of a file, begins a table of any version of FlexKV."""
    return any(data[start:].startswith(_MAGIC) for start in HEADER_OFFSETS)


def newer_version(data: bytes) -> int | None:
    """The version of the table that begins with `data`, if a newer FlexKV wrote it; else None."""
    if Header.decode(data) is not None or not data.startswith(_MAGIC):
        return None
    (version,) = _VERSION.unpack_from(data.ljust(_VERSION.size, b"\0"))
    return version if version > VERSION else None


def encode_record(
    slot: int, seal: int, key: bytes, checksum: bytes, generation: int, *, stored: int = UNKNOWN
) -> bytes:
    """Make the record of a block, `RECORD_BYTES` long.

    Args:
        slot: the slot of the block.
        seal: the header's seal.
        key: the block's key, at most `MAX_KEY_BYTES` long.
        checksum: checksum of the block's bytes, `CHECKSUM_BYTES` long.
        generation: 1 or more. It grows with every write to the store, over restarts too, so of two
            records of one key the greater is the later.
        stored: when the block was stored; see `flexkv.index.ages`. The record has it rounded down.
    """
    time = (stored // UNIT_SECONDS).to_bytes(_STORED_BYTES, "little")
    body = _BODY.pack(key, checksum, generation, len(key), time)
    return body + _CRC.pack(zlib.crc32(body, slot ^ _seed(seal)))


def decode_records(
    table: bytes | bytearray | memoryview, seal: int, first: int = 0
) -> Iterator[tuple[int, bytes, bytes, int, int]]:
    """Read records of the table with this seal, the first of which is that of the slot `first`.
    Yields slot, key, checksum, generation and time of each intact one."""
    seed = _seed(seal)
    crc32 = zlib.crc32
    start = 0
    whole = memoryview(table)[: len(table) // RECORD_BYTES * RECORD_BYTES]
    for slot, fields in enumerate(_RECORD.iter_unpack(whole), first):
        key, checksum, generation, length, stored, crc = fields
        # Generations begin at 1, so empty records are skipped without their CRC.
        if (
            0 < generation < _LAST_GENERATION
            and crc32(whole[start : start + _BODY.size], slot ^ seed) == crc
        ):
            time = int.from_bytes(stored, "little") * UNIT_SECONDS
            yield slot, key[:length], checksum, generation, time
        start += RECORD_BYTES


def table_bytes(num_slots: int) -> int:
    """Size of the table of `num_slots` slots, in bytes."""
    return HEADER_BYTES + num_slots * RECORD_BYTES


def slots_in(size: int) -> int:
    """How many slots have a record in a table of `size` bytes."""
    return max(0, size - HEADER_BYTES) // RECORD_BYTES


def record_offset(slot: int) -> int:
    """Where the record of `slot` begins in the table, in bytes."""
    return HEADER_BYTES + slot * RECORD_BYTES


def _seed(seal: int) -> int:
    # Two start values give two CRCs, whatever the bytes (CRC-32 is linear and invertible in its
    # start value): a record that was moved to another slot never passes.
    return zlib.crc32(_SEAL.pack(seal))
