# SPDX-License-Identifier: Apache-2.0
"""How far an engine's fetches are, in its page: the service writes, and the engine reads without a
message or a system call.

A row has the latest message about one fetch. The reader may look while the writer is at it, since a
checksum tells.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from flexkv.service import messages as wire
from flexkv.service.engine_page import FETCH_ROW_BYTES, FETCH_ROWS

_HEAD = struct.Struct("<III")
"""The number of the message in its row, modulo 2^32 and not 0; its size; and its checksum."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(wire.Fetched)


_NONE = _encoder.encode(wire.Fetched(0, None))
"""A message about no fetch."""


class FetchRows:
    """The rows of one engine, for the service or for the engine. Single-threaded.

    Args:
        memory: see `EnginePage`; borrowed.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._numbers = memory.cast("I")[:: FETCH_ROW_BYTES // 4]
        self._read = [0] * FETCH_ROWS

    def write(self, message: wire.Fetched) -> bool:
        """Replace the message in the row of a fetch. If the new one is too large, returns False,
        and the row has none."""
        encoded = _encoder.encode(message)
        fits = len(encoded) <= FETCH_ROW_BYTES - _HEAD.size
        content = encoded if fits else _NONE
        row = row_of(message.fetch)
        number = self._numbers[row] % 0xFFFFFFFF + 1
        head = _HEAD.pack(number, len(content), zlib.crc32(content, number))
        start = row * FETCH_ROW_BYTES
        self._memory[start : start + len(head) + len(content)] = head + content
        return fits

    def read(self, fetch: int) -> wire.Fetched | None:
        """The message in the row of a fetch, which may be about another one; None if there is none
        or if it has been read."""
        row = row_of(fetch)
        if self._numbers[row] == self._read[row]:
            return None
        start = row * FETCH_ROW_BYTES
        copy = bytes(self._memory[start : start + FETCH_ROW_BYTES])
        number, size, checksum = _HEAD.unpack_from(copy)
        content = copy[_HEAD.size : _HEAD.size + size]
        if zlib.crc32(content, number) != checksum:
            return None  # it is being written
        self._read[row] = number
        try:
            return _decoder.decode(content)
        except msgspec.DecodeError:
            return None


def row_of(fetch: int) -> int:
    """The row of a fetch. Another one may have it already."""
    return fetch % FETCH_ROWS
