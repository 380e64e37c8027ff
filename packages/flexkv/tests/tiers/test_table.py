# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flexkv.tiers.disk import table
from flexkv.tiers.disk.table import Header

KEYS = st.binary(min_size=1, max_size=table.KEY_BYTES)
CHECKSUMS = st.binary(min_size=table.CHECKSUM_BYTES, max_size=table.CHECKSUM_BYTES)
NUMBERS = st.integers(1, (1 << 64) - 1)
SLOTS = st.integers(0, 40)
HEADERS = st.builds(
    Header,
    slot_bytes=NUMBERS,
    num_slots=NUMBERS,
    epoch=NUMBERS,
    fingerprint=st.text("0123456789abcdef", min_size=16, max_size=64),
)


@dataclass(frozen=True, slots=True)
class Record:
    """What a record is made of."""

    slot: int
    epoch: int
    key: bytes
    checksum: bytes
    generation: int

    def encode(self) -> bytes:
        return table.encode_record(self.slot, self.epoch, self.key, self.checksum, self.generation)


GENERATIONS = st.integers(1, (1 << 63) - 1)
RECORDS = st.builds(Record, SLOTS, NUMBERS, KEYS, CHECKSUMS, GENERATIONS)


def in_slot(slot: int, record: bytes) -> bytes:
    """A table with `record` in `slot` and nothing else."""
    return table.EMPTY_RECORD * slot + record


@given(HEADERS)
def test_a_header_says_what_was_written(header: Header) -> None:
    data = header.encode()
    assert len(data) == table.HEADER_BYTES
    assert Header.decode(data) == header


@given(HEADERS, st.integers(0, 8 * 108 - 1))
def test_a_header_with_a_flipped_bit_is_none(header: Header, bit: int) -> None:
    data = bytearray(header.encode())
    data[bit // 8] ^= 1 << bit % 8
    assert Header.decode(bytes(data)) is None


@given(HEADERS, st.integers(0, 107))
def test_a_header_that_ends_early_is_none(header: Header, length: int) -> None:
    assert Header.decode(header.encode()[:length]) is None


@given(RECORDS)
def test_a_record_says_what_was_written(record: Record) -> None:
    data = record.encode()
    assert len(data) == table.RECORD_BYTES
    found = list(table.decode_records(in_slot(record.slot, data), record.epoch))
    assert found == [(record.slot, record.key, record.checksum, record.generation)]


@given(RECORDS, st.integers(0, 8 * table.RECORD_BYTES - 1))
def test_a_record_with_a_flipped_bit_is_an_empty_slot(record: Record, bit: int) -> None:
    data = bytearray(record.encode())
    data[bit // 8] ^= 1 << bit % 8
    assert not list(table.decode_records(in_slot(record.slot, bytes(data)), record.epoch))


@given(RECORDS, SLOTS)
def test_a_record_in_another_slot_is_an_empty_slot(record: Record, other: int) -> None:
    assume(record.slot != other)
    assert not list(table.decode_records(in_slot(other, record.encode()), record.epoch))


@given(RECORDS, NUMBERS)
def test_a_record_of_another_epoch_is_an_empty_slot(record: Record, other: int) -> None:
    assume(record.epoch != other)
    assert not list(table.decode_records(in_slot(record.slot, record.encode()), other))


@given(st.integers(0, table.RECORD_BYTES - 1), st.data())
def test_a_record_that_was_half_overwritten_is_an_empty_slot(
    length: int, data: st.DataObject
) -> None:
    records = [
        table.encode_record(0, 9, data.draw(KEYS), data.draw(CHECKSUMS), data.draw(NUMBERS))
        for _ in range(2)
    ]
    torn = records[0][:length] + records[1][length:]
    assume(torn not in records)
    assert not list(table.decode_records(torn, 9))


@given(st.binary(max_size=8 * table.RECORD_BYTES), NUMBERS)
def test_other_bytes_are_empty_slots(data: bytes, epoch: int) -> None:
    assert not list(table.decode_records(data, epoch))


@pytest.mark.parametrize("generation", [0, 1 << 63, (1 << 64) - 1])
def test_a_generation_that_cannot_be_ours_makes_an_empty_slot(generation: int) -> None:
    """With the last one that a record can hold, no block could be written any more."""
    data = table.encode_record(0, 9, b"key", bytes(16), generation)
    assert not list(table.decode_records(data, 9))


def test_a_table_that_ends_within_a_record_has_those_before_it() -> None:
    records = b"".join(table.encode_record(s, 7, b"k%d" % s, bytes(16), s + 1) for s in range(3))
    assert [slot for slot, *_ in table.decode_records(records[:-1], 7)] == [0, 1]


@given(st.lists(st.binary(max_size=80), unique=True))
def test_keys_of_any_length_stay_apart(keys: list[bytes]) -> None:
    short = [table.disk_key(key) for key in keys]
    assert len(set(short)) == len(keys)
    assert all(len(key) <= table.KEY_BYTES for key in short)
    assert all(s == key for s, key in zip(short, keys, strict=True) if len(key) <= 32)


@given(st.binary(min_size=1, max_size=200), NUMBERS, st.data())
def test_a_checksum_is_of_all_bytes_and_of_the_epoch(
    block: bytes, epoch: int, data: st.DataObject
) -> None:
    checksum = table.checksum_of(block, epoch)
    changed = bytearray(block)
    bit = data.draw(st.integers(0, 8 * len(block) - 1))
    changed[bit // 8] ^= 1 << bit % 8
    assert len(checksum) == table.CHECKSUM_BYTES
    assert table.checksum_of(bytes(changed), epoch) != checksum
    assert table.checksum_of(block, epoch ^ 1) != checksum


def test_the_format_is_that_of_version_1() -> None:
    """What stores on disk were written in. A change of it needs another version number."""
    header = Header(slot_bytes=1 << 20, num_slots=3, epoch=1 << 63, fingerprint="0f" * 32)
    record = table.encode_record(
        2, 1 << 63, table.disk_key(b"k" * 33), table.checksum_of(b"block", 1 << 63), 5
    )
    digest = hashlib.sha256(header.encode() + record).hexdigest()
    assert digest == "48061088909972b63745e946b70e43200664ef4cd384edcf370cc878f0dcc62a"
