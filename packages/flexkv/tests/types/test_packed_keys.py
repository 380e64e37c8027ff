# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from typing import Any

import pytest

from flexkv.eviction import LRUPolicy
from flexkv.index.block_index import block_index
from flexkv.types.packed_keys import PackedKeys
from flexkv_kernels.block_index import pack_keys

KEYS = [bytes([number]) * 32 for number in range(6)]
END = b"end"


def packed(keys: list[bytes], end: bytes = b"") -> PackedKeys:
    return pack_keys([key.hex() for key in keys], end)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 31, 32, 33])
@pytest.mark.parametrize("upper", [False, True])
def test_keys_are_the_bytes_of_their_hashes(size: int, upper: bool) -> None:
    keys = [os.urandom(size) for _ in range(5)]
    hashes = [key.hex().upper() if upper else key.hex() for key in keys]
    assert list(pack_keys(hashes, END)) == [key + END for key in keys]


@pytest.mark.parametrize("place", [0, 1, 27, 28, 29])
def test_only_hexadecimal_digits_are_hashes(place: int) -> None:
    for number in range(256):
        text = "0" * place + chr(number) + "0" * (29 - place)
        if chr(number) in "0123456789abcdefABCDEF":
            assert len(pack_keys([text], END)) == 1
        else:
            with pytest.raises(ValueError, match="allowed: hexadecimal digits"):
                pack_keys([text], END)


@pytest.mark.parametrize("hashes", [["00", "0000"], ["0000", "00"], ["000"]])
def test_hashes_have_one_length(hashes: list[str]) -> None:
    with pytest.raises(ValueError, match="allowed: hexadecimal digits, as many as others have"):
        pack_keys(hashes, END)


def test_what_is_no_hash_is_named() -> None:
    broken: Any = [b"00"]
    with pytest.raises(TypeError):
        pack_keys(broken, END)


def test_keys_are_a_sequence() -> None:
    keys = packed(KEYS)
    assert len(keys) == 6
    assert keys[2] == keys[-4] == KEYS[2]
    assert list(keys[1:4]) == KEYS[1:4]
    assert list(keys[1:4][1:]) == KEYS[2:4]
    assert list(keys[:-2] + keys[-2:]) == KEYS
    assert list(packed([]) + keys[:2]) == list(keys[:2] + packed([])) == KEYS[:2]
    assert not packed([])
    for wrong in (6, -7):
        with pytest.raises(IndexError):
            keys[wrong]
    with pytest.raises(ValueError, match="step"):
        keys[::2]


def test_keys_of_two_lengths_are_not_joined() -> None:
    with pytest.raises(ValueError, match="keys of 32 and of 35 bytes"):
        packed(KEYS) + packed(KEYS, END)


def test_an_index_takes_them_as_it_takes_others() -> None:
    keys = packed(KEYS)
    index = block_index(8, LRUPolicy())
    blocks = index.reserve_all(keys, range(4), (0,))
    assert [block.key for block in blocks] == KEYS[:4]
    assert [block.parent and block.parent.key for block in blocks] == [None, *KEYS[:3]]
    assert index.missing(keys) == index.missing(KEYS) == [4, 5]
    index.publish(blocks)
    assert index.lookup(keys) == index.lookup(KEYS) == 4
    assert index.lookup(keys[2:]) == 2
    assert index.present(keys) == [True] * 4 + [False] * 2
    assert index.lease(keys) is None
    leased = index.lease(keys[1:3])
    assert leased is not None
    assert leased.keys == KEYS[1:3]
    assert leased.slots == blocks.slots[1:3]
    index.release(blocks[1:3])
    assert len(index.reserve_all(keys, [3], ())) == 0
    index.touch(keys)
    index.clear()
    assert index.lookup(keys) == 0


def test_keys_that_differ_in_one_byte_are_told_apart() -> None:
    """A lookup compares hashes of keys, and no keys."""
    for size in (1, 7, 8, 9, 16, 17, 24, 32, 33, 48):
        index = block_index(1, LRUPolicy())
        key = bytes(size)
        index.publish(index.reserve_all([key], [0], (0,)))
        for place in range(size):
            other = bytearray(key)
            other[place] = 1
            assert index.lookup([bytes(other)]) == 0
        assert index.lookup([key + b"\0"]) == index.lookup([key[1:]]) == 0
        assert index.lookup([key]) == 1
