# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flexkv.index.ages import LAST, UNIT_SECONDS, UNKNOWN
from flexkv.tiers.base import MAX_KEY_BYTES
from flexkv.tiers.disk import table
from flexkv.tiers.disk.table import Header
from flexkv.tiers.envelope import checksum_of

KEYS = st.binary(min_size=1, max_size=MAX_KEY_BYTES)
CHECKSUMS = st.binary(min_size=table.CHECKSUM_BYTES, max_size=table.CHECKSUM_BYTES)
NUMBERS = st.integers(1, (1 << 64) - 1)
SLOTS = st.integers(0, 40)
HEADERS = st.builds(
    Header,
    slot_bytes=st.integers(1, table.MAX_SLOT_BYTES // 4096).map(lambda pages: 4096 * pages),
    num_slots=st.integers(1, table.MAX_SLOTS),
    epoch=NUMBERS,
    fingerprint=st.text("0123456789abcdef", min_size=16, max_size=64),
    serial=st.integers(0, (1 << 32) - 1),
)
OTHER_PAGES = st.sampled_from([b"", bytes(4096), b"FLEXKVTB" + bytes(4088), b"x" * 4096])


@dataclass(frozen=True, slots=True)
class Record:
    """What a record is made of."""

    slot: int
    epoch: int
    key: bytes
    checksum: bytes
    generation: int
    stored: int

    def encode(self) -> bytes:
        of_block = self.key, self.checksum, self.generation
        return table.encode_record(self.slot, self.epoch, *of_block, stored=self.stored)


GENERATIONS = st.integers(1, (1 << 63) - 1)
STORED = st.integers(UNKNOWN, LAST // UNIT_SECONDS).map(lambda units: units * UNIT_SECONDS)
RECORDS = st.builds(Record, SLOTS, NUMBERS, KEYS, CHECKSUMS, GENERATIONS, STORED)


def in_slot(slot: int, record: bytes) -> bytes:
    """A table with `record` in `slot` and nothing else."""
    return table.EMPTY_RECORD * slot + record


@given(HEADERS)
def test_a_header_says_what_was_written(header: Header) -> None:
    page = header.encode()
    assert len(page) == table.PAGE_BYTES
    assert len(page * 2) == table.HEADER_BYTES
    assert Header.decode(page * 2) == header


@given(HEADERS, OTHER_PAGES, st.booleans())
def test_one_copy_of_a_header_is_enough(header: Header, other: bytes, first: bool) -> None:
    page = header.encode()
    other = other.ljust(4096, b"\0")
    assert Header.decode(page + other if first else other + page) == header
    assert table.has_magic(page + other if first else other + page)


@given(HEADERS, HEADERS, st.booleans())
def test_of_two_headers_the_later_one_counts(one: Header, other: Header, first: bool) -> None:
    assume(one.serial != other.serial)
    pages = [one.encode(), other.encode()]
    later = max(one, other, key=lambda header: header.serial)
    assert Header.decode(b"".join(pages if first else reversed(pages))) == later


@given(HEADERS, st.integers(0, 8 * 108 - 1))
def test_a_header_with_a_flipped_bit_is_none(header: Header, bit: int) -> None:
    data = bytearray(header.encode())
    data[bit // 8] ^= 1 << bit % 8
    assert Header.decode(bytes(data)) is None


@given(HEADERS, st.integers(0, 107))
def test_a_header_that_ends_early_is_none(header: Header, length: int) -> None:
    assert Header.decode(header.encode()[:length]) is None


@pytest.mark.parametrize(
    ("slot_bytes", "num_slots"),
    [
        (0, 10),
        (1 << 40, 10),
        ((1 << 64) - 1, 10),
        (4095, 10),
        (4097, 10),
        (4096, 0),
        (4096, (1 << 31) + 1),
        (4096, (1 << 64) - 1),
    ],
)
def test_a_header_that_no_store_can_have_is_none(slot_bytes: int, num_slots: int) -> None:
    """Whoever takes its word for a size runs out of memory, or divides by zero."""
    assert Header.decode(Header(slot_bytes, num_slots, 1, "0f" * 32, 1).encode()) is None


def test_the_version_of_a_newer_table_is_told() -> None:
    page = bytearray(Header(4096, 1, 1, "0f" * 32, 1).encode())
    assert table.newer_version(bytes(page)) is None
    page[8] = table.VERSION + 1
    assert table.newer_version(bytes(page)) == table.VERSION + 1
    # With one good copy it is a damaged byte.
    assert table.newer_version(bytes(page) + Header(4096, 1, 1, "0f" * 32, 1).encode()) is None
    page[8] = table.VERSION - 1
    assert table.newer_version(bytes(page)) is None
    assert table.newer_version(b"FLEXKVTB") is None
    assert table.newer_version(b"my thesis " * 500) is None


@given(RECORDS)
def test_a_record_says_what_was_written(record: Record) -> None:
    data = record.encode()
    assert len(data) == table.RECORD_BYTES
    found = list(table.decode_records(in_slot(record.slot, data), record.epoch))
    fields = record.key, record.checksum, record.generation, record.stored
    assert found == [(record.slot, *fields)]


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


@given(st.binary(min_size=1, max_size=200), NUMBERS, KEYS, KEYS, st.data())
def test_a_checksum_is_of_all_bytes_of_the_seal_and_of_the_key(
    block: bytes, seal: int, key: bytes, other: bytes, data: st.DataObject
) -> None:
    assume(key != other)
    checksum = checksum_of(block, seal, key)
    changed = bytearray(block)
    bit = data.draw(st.integers(0, 8 * len(block) - 1))
    changed[bit // 8] ^= 1 << bit % 8
    assert len(checksum) == table.CHECKSUM_BYTES
    assert checksum_of(bytes(changed), seal, key) != checksum
    assert checksum_of(block, seal ^ 1, key) != checksum
    assert checksum_of(block, seal, other) != checksum


@given(HEADERS, HEADERS)
def test_a_seal_is_of_epoch_and_fingerprint(one: Header, other: Header) -> None:
    same = (one.epoch, one.fingerprint) == (other.epoch, other.fingerprint)
    assert (one.seal == other.seal) == same
    assert replace(one, slot_bytes=4096, num_slots=1, serial=0).seal == one.seal
    assert replace(one, epoch=one.epoch ^ 1).seal != one.seal


def test_the_format_is_that_of_version_3() -> None:
    """What stores on disk were written in. A change of it needs another version number."""
    header = Header(slot_bytes=1 << 20, num_slots=3, epoch=1 << 63, fingerprint="0f" * 32, serial=7)
    key = bytes(range(MAX_KEY_BYTES))
    checksum = checksum_of(b"block", header.seal, key)
    record = table.encode_record(2, header.seal, key, checksum, 5)
    digest = hashlib.sha256(header.encode() + record).hexdigest()
    assert digest == "a7e9050058274a66690bbac5a954297df883ffa379d67e47a121fc33648cecd0"
