# SPDX-License-Identifier: Apache-2.0
"""Checksums that bind blocks to their names, and the envelope of a block in a shared store.

On a disk, FlexKV's table says which block is in which slot. A shared store has no table that FlexKV
could trust. So each block there carries its whole name, its length, and a checksum over name,
length and bytes.
"""

from __future__ import annotations

import struct

import xxhash

ENVELOPE_BYTES = 512
"""The size of an envelope. Envelope and block are read and written as one piece of memory."""

_MAGIC = b"FLEXKVB1"
_HEAD = struct.Struct("<8sQH")
"""The magic, whose digit is the version of the format; bytes of the block; bytes of the name."""
_CHECKSUM_BYTES = 16
_CHECKSUM_AT = ENVELOPE_BYTES - _CHECKSUM_BYTES
MOST_NAME_BYTES = _CHECKSUM_AT - _HEAD.size


def checksum_of(data: bytes | memoryview, seal: int, key: bytes) -> bytes:
    """The checksum of a block: XXH3-128 of its bytes, seeded with a seal and the key, 16 bytes.
    Bytes of another seal or another block do not match. Releases the GIL while it computes.

    Args:
        seal: seal of the disk's table, which stands for its epoch and the model; 0 elsewhere.
        key: what distinguishes the block from all others under the seal.
    """
    return xxhash.xxh3_128_digest(data, xxhash.xxh3_64_intdigest(key, seal))


def seal(name: bytes, block: memoryview) -> bytes:
    """Make the envelope of a block, ENVELOPE_BYTES long. The name distinguishes the block from all
    others: fingerprint, epoch and whole key. Raises ValueError if the name is longer than
    MOST_NAME_BYTES."""
    head = _head(name, len(block))
    return head + checksum_of(block, 0, head)


def fits(envelope: bytes | memoryview, name: bytes, block: memoryview) -> bool:
    """Whether `envelope` was sealed with exactly this name and these bytes."""
    if len(envelope) != ENVELOPE_BYTES:
        return False
    head = _head(name, len(block))
    if envelope[:_CHECKSUM_AT] != head:
        return False
    # The head was compared byte by byte, so the checksum only has to bind it to the bytes.
    return bytes(envelope[_CHECKSUM_AT:]) == checksum_of(block, 0, head)


def _head(name: bytes, size: int) -> bytes:
    if len(name) > MOST_NAME_BYTES:
        raise ValueError(f"a name of {len(name)} bytes; allowed: at most {MOST_NAME_BYTES}")
    return (_HEAD.pack(_MAGIC, size, len(name)) + name).ljust(_CHECKSUM_AT, b"\0")
