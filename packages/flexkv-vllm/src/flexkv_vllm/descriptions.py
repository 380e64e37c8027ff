# SPDX-License-Identifier: Apache-2.0
"""What events say of a block, also after a restart: a disk keeps it as text."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

_TOKEN = "I"


class Description(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a FlexKV block's event, apart from its medium. Kept while host memory has it,
    and for a while longer if a lower tier may be writing it.

    Attributes:
        position: position of the block in its prefix, in FlexKV blocks.
        group: vLLM's number of its KV cache group.
        hash: the last hash that covers it.
        parent: hash of the block before it; None at the beginning of a prompt.
        packed: all its tokens, 4 bytes each, little-endian; see `pack_tokens`.
        extra_keys: see `event_extra_keys`.
        adapter: number and name of the request's adapter; None for both if it has none.
        session: the id of the request's session; None if it is not known. No disk keeps it.
    """

    position: int
    group: int
    hash: bytes
    parent: bytes | None
    packed: bytes
    extra_keys: list[Any] | None
    adapter: tuple[int | None, str | None]
    session: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Its token ids."""
        return _ordered(array(_TOKEN, self.packed)).tolist()

    def encode(self) -> bytes:
        """The text that a disk keeps."""
        return _encoder.encode(msgspec.structs.replace(self, session=None))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Description)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes."""
    return _ordered(array(_TOKEN, tokens)).tobytes()


def decode(text: bytes, key: bytes) -> Description | None:
    """Read what `Description.encode` made, in this process or another; None if it does not describe
    the block of `key`, which begins with the block's hash."""
    try:
        kept = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not kept.hash or not key.startswith(kept.hash) or len(kept.packed) % array(_TOKEN).itemsize:
        return None
    return msgspec.structs.replace(kept, extra_keys=_tuples(kept.extra_keys))


def _tuples(keys: list[Any] | None) -> list[Any] | None:
    """Extra keys with tuples in place of lists, as they were before `encode`."""

    def made(each: Any) -> Any:
        return tuple(map(made, each)) if isinstance(each, list) else each

    return None if keys is None else [made(each) for each in keys]


def _ordered(tokens: array[int]) -> array[int]:
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
