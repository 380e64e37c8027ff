# SPDX-License-Identifier: Apache-2.0
"""The form in which a disk keeps what events say of a block."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import msgspec

_TOKEN = "I"


class KeptDescription(msgspec.Struct, frozen=True, array_like=True):
    """What a block's events say after a restart; see `Description`.

    Attributes:
        position: position of the block in its prefix, in FlexKV blocks.
        group: vLLM's number of its KV cache group.
        block_size: tokens of each of its vLLM blocks.
        hashes: for each vLLM block, the last hash that covers it.
        parent: hash of the vLLM block before it; None at the beginning of a prompt.
        tokens: all its tokens, 4 bytes each, little-endian.
    """

    position: int
    group: int
    block_size: int
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: bytes


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


def decode(text: bytes, origin: tuple[int, bytes]) -> KeptDescription | None:
    """Read a text; None if it does not describe the block of `origin`.

    Args:
        text: as `encode` made it, in this process or another.
        origin: group and hash of the block.
    """
    try:
        kept = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    hashes, item = kept.hashes, array(_TOKEN).itemsize
    fits = bool(hashes) and (kept.group, hashes[-1]) == origin and kept.block_size > 0
    whole = len(kept.tokens) == kept.block_size * len(hashes) * item
    return kept if fits and whole else None


def _ordered(tokens: array[int]) -> array[int]:
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
