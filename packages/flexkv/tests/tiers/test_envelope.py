# SPDX-License-Identifier: Apache-2.0
"""The envelope of a block fits that block and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv.tiers.envelope import ENVELOPE_BYTES, MOST_NAME_BYTES, fits, seal

NAMES = st.binary(max_size=MOST_NAME_BYTES)
BLOCKS = st.binary(min_size=1, max_size=4096)


@given(NAMES, BLOCKS)
def test_an_envelope_fits_what_it_was_sealed_with(name: bytes, block: bytes) -> None:
    envelope = seal(name, memoryview(block))
    assert len(envelope) == ENVELOPE_BYTES
    assert fits(memoryview(envelope), name, memoryview(block))


@given(NAMES, BLOCKS, st.data())
def test_one_changed_byte_is_noticed_wherever_it_is(
    name: bytes, block: bytes, data: st.DataObject
) -> None:
    whole = bytearray(seal(name, memoryview(block)) + block)
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    view = memoryview(whole)
    assert not fits(view[:ENVELOPE_BYTES], name, view[ENVELOPE_BYTES:])


@given(NAMES, NAMES, BLOCKS, BLOCKS)
def test_an_envelope_fits_no_other_name_and_no_other_bytes(
    name: bytes, other: bytes, block: bytes, bytes_: bytes
) -> None:
    envelope = seal(name, memoryview(block))
    assert fits(envelope, other, memoryview(block)) is (name == other)
    assert fits(envelope, name, memoryview(bytes_)) is (block == bytes_)


@given(NAMES, BLOCKS, st.integers(0, ENVELOPE_BYTES - 1))
def test_a_cut_envelope_fits_nothing(name: bytes, block: bytes, size: int) -> None:
    assert not fits(seal(name, memoryview(block))[:size], name, memoryview(block))


def test_a_name_is_never_cut() -> None:
    with pytest.raises(ValueError, match="at most"):
        seal(bytes(MOST_NAME_BYTES + 1), memoryview(b"x"))
