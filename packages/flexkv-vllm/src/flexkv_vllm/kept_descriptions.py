# SPDX-License-Identifier: Apache-2.0
"""The form in which a disk keeps what events say of a block."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

_TOKEN = "I"


class KeptDescription(msgspec.Struct, frozen=True, array_like=True):
    """What a block's events say after a restart; see `Description`.

    Attributes:
        position: position of the block in its prefix, in FlexKV blocks.
        group: vLLM's number of its KV cache group.
        hash: the last hash that covers it.
        parent: hash of the block before it; None at the beginning of a prompt.
        tokens: all its tokens, 4 bytes each, little-endian.
        extra_keys, adapter: as of a `Description`.
    """

    position: int
    group: int
    hash: bytes
    parent: bytes | None
    tokens: bytes
    extra_keys: list[Any] | None
    adapter: tuple[int | None, str | None]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KeptDescription)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes."""
    return _ordered(array(_TOKEN, tokens)).tobytes()


def unpack_tokens(packed: bytes) -> Sequence[int]:
    """The token ids of `pack_tokens`."""
    return _ordered(array(_TOKEN, packed)).tolist()


def encode(description: KeptDescription) -> bytes:
    """The text that a disk keeps."""
    return _encoder.encode(description)


def decode(text: bytes, key: bytes) -> KeptDescription | None:
    """Read a text; None if it does not describe the block of `key`.

    Args:
        text: as `encode` made it, in this process or another.
        key: begins with the block's hash.
    """
    try:
        kept = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not kept.hash or not key.startswith(kept.hash) or len(kept.tokens) % array(_TOKEN).itemsize:
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
