# SPDX-License-Identifier: Apache-2.0
"""The form in which a cache keeps what SGLang's events say of a page, for other processes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec

_TYPES = {array(each).itemsize: each for each in "qI"}
"""By the bytes of a token its type; the last one suffices for text."""


class KeptPage(msgspec.Struct, frozen=True, array_like=True):
    """A page without its number, which its key has.

    Attributes:
        parent: the number of the page before it; None for the first page of a prompt.
        are_pairs: whether SGLang hashes pairs of tokens.
        width: bytes of a token.
        tokens: its tokens, or the tokens of its pairs, little-endian.
    """

    parent: int | None
    are_pairs: bool
    width: int
    tokens: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KeptPage)


def encode(parent: int | None, tokens: Sequence[Any]) -> bytes:
    """The text of a page.

    Args:
        parent: see `KeptPage`.
        tokens: token ids, or pairs of them.
    """
    are_pairs = bool(tokens) and isinstance(tokens[0], (tuple, list))
    single = list(chain.from_iterable(tokens)) if are_pairs else tokens
    try:
        packed = array("I", single)
    except OverflowError:  # SGLang's number of an image
        packed = array("q", single)
    kept = KeptPage(parent, are_pairs, packed.itemsize, _ordered(packed).tobytes())
    return _encoder.encode(kept)


def decode(text: bytes) -> tuple[int | None, Sequence[Any]] | None:
    """Parent and tokens of a page; None if `text` is not as `encode` made it, in this process or
    another."""
    try:
        kept = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not kept.tokens or kept.width not in _TYPES:
        return None
    if len(kept.tokens) % (kept.width * (1 + kept.are_pairs)):
        return None
    tokens = _ordered(array(_TYPES[kept.width], kept.tokens)).tolist()
    if kept.are_pairs:
        return kept.parent, list(zip(tokens[::2], tokens[1::2], strict=True))
    return kept.parent, tokens


def _ordered(tokens: array[int]) -> array[int]:
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
