# SPDX-License-Identifier: Apache-2.0
"""Intact bytes in the wrong place: of another slot, another store, or another time."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from disk_blocks import FINGERPRINT, SLOT, names, opened

from flexkv.tiers.disk import table
from flexkv.tiers.job import Outcome

SLOTS = 40
KEYS = names(SLOTS)
DONE = Outcome.DONE
OTHER = "cd" * 32
SLAB = "slab-00000"


def fill(root: Path, salt: bytes = b"", fingerprint: str = FINGERPRINT) -> Path:
    """A store of `KEYS`, with other bytes for another salt; returns its folder."""
    with opened(root, slots=SLOTS, salt=salt, fingerprint=fingerprint) as client:
        assert client.write(KEYS) == [DONE] * SLOTS
    return root / fingerprint


def swap(path: Path, offset: int, other: int, size: int) -> None:
    with path.open("r+b") as file:
        fd = file.fileno()
        first, second = os.pread(fd, size, offset), os.pread(fd, size, other)
        os.pwrite(fd, second, offset)
        os.pwrite(fd, first, other)


def copy(source: Path, target: Path, offset: int, size: int) -> None:
    with source.open("rb") as one, target.open("r+b") as other:
        os.pwrite(other.fileno(), os.pread(one.fileno(), size, offset), offset)


def missing_after(root: Path, expected: Outcome) -> int:
    """How many of `KEYS` are not read; they end as `expected`."""
    with opened(root, slots=SLOTS) as client:
        outcomes = client.read(KEYS)
        assert set(outcomes) <= {DONE, expected}
        client.refill(KEYS)
    return SLOTS - outcomes.count(DONE)


@pytest.mark.parametrize("what", ["data", "records", "both"])
def test_swapped_slots_are_misses(tmp_path: Path, faults: Callable[[int], None], what: str) -> None:
    chance = random.Random(what)
    folder = fill(tmp_path)
    for _ in range(5):
        slots = chance.sample(range(SLOTS), 20)
        for one, other in zip(slots[::2], slots[1::2], strict=True):
            if what != "records":
                swap(folder / SLAB, one * SLOT, other * SLOT, SLOT)
            if what != "data":
                offsets = table.record_offset(one), table.record_offset(other)
                swap(folder / "table", *offsets, table.RECORD_BYTES)
        expected = Outcome.DAMAGED if what == "data" else Outcome.MISSING
        assert missing_after(tmp_path, expected) == 20
        faults(20)


@pytest.mark.parametrize("what", ["data", "records", "both"])
@pytest.mark.parametrize("fingerprint", [FINGERPRINT, OTHER], ids=["same kind", "other kind"])
def test_slots_of_another_store_are_misses(
    tmp_path: Path, faults: Callable[[int], None], what: str, fingerprint: str
) -> None:
    """The other store has the same keys in the same slots, and other bytes for them."""
    chance = random.Random(what + fingerprint)
    folder = fill(tmp_path / "ours")
    other = fill(tmp_path / "theirs", b"other", fingerprint)
    slots = chance.sample(range(SLOTS), 20)
    for slot in slots:
        if what != "records":
            copy(other / SLAB, folder / SLAB, slot * SLOT, SLOT)
        if what != "data":
            offset = table.record_offset(slot)
            copy(other / "table", folder / "table", offset, table.RECORD_BYTES)
    expected = Outcome.DAMAGED if what == "data" else Outcome.MISSING
    assert missing_after(tmp_path / "ours", expected) == 20
    faults(20)


@pytest.mark.parametrize("name", [SLAB, "table"])
def test_a_file_of_another_store_of_the_same_kind_is_worth_nothing(
    tmp_path: Path, faults: Callable[[int], None], name: str
) -> None:
    folder = fill(tmp_path / "ours")
    other = fill(tmp_path / "theirs", b"other")
    shutil.copy(other / name, folder / name)
    assert missing_after(tmp_path / "ours", Outcome.DAMAGED) == SLOTS
    faults(SLOTS)


def test_a_whole_store_of_another_kind_under_our_name_is_empty(
    tmp_path: Path, faults: Callable[[int], None]
) -> None:
    folder = fill(tmp_path / "ours")
    other = fill(tmp_path / "theirs", b"other", OTHER)
    for name in (SLAB, "table"):
        shutil.copy(other / name, folder / name)
    assert missing_after(tmp_path / "ours", Outcome.MISSING) == SLOTS
    faults(SLOTS)


@pytest.mark.parametrize("what", ["epoch", "epoch and fingerprint", "all but the key"])
def test_a_header_over_the_slots_of_another_store_gives_misses(
    tmp_path: Path, faults: Callable[[int], None], what: str
) -> None:
    """All of it intact, and only the header, or a record, put together from two."""
    folder = fill(tmp_path / "ours")
    other = fill(tmp_path / "theirs", b"other", OTHER)
    ours, theirs = header_of(folder), header_of(other)
    if what == "all but the key":
        with opened(tmp_path / "ours", slots=SLOTS) as client:
            slots = client.slots_of(KEYS)
        records = {
            slot: (key, checksum, generation)
            for slot, key, checksum, generation, _ in table.decode_records(
                (folder / "table").read_bytes()[table.HEADER_BYTES :], ours.seal
            )
        }
        with (folder / "table").open("r+b") as file:
            for one, next_one in zip(KEYS, KEYS[1:] + KEYS[:1], strict=True):
                _, checksum, generation = records[slots[one]]
                record = table.encode_record(slots[one], ours.seal, next_one, checksum, generation)
                os.pwrite(file.fileno(), record, table.record_offset(slots[one]))
        assert missing_after(tmp_path / "ours", Outcome.DAMAGED) == SLOTS
    else:
        for name in (SLAB, "table"):
            shutil.copy(other / name, folder / name)
        mixed = replace(theirs, fingerprint=FINGERPRINT) if what == "epoch" else ours
        (folder / "table").open("r+b").write(mixed.encode() * 2)
        assert missing_after(tmp_path / "ours", Outcome.MISSING) == SLOTS
    faults(SLOTS)


def header_of(folder: Path) -> table.Header:
    header = table.Header.decode((folder / "table").read_bytes()[: table.HEADER_BYTES])
    assert header is not None
    return header


@pytest.mark.parametrize("name", [SLAB, "table"])
def test_a_file_of_another_time_has_what_did_not_change_since(
    tmp_path: Path, faults: Callable[[int], None], name: str
) -> None:
    """As a backup that was restored in part, or a disk that lost its last writes."""
    folder = fill(tmp_path)
    shutil.copy(folder / name, tmp_path / "kept")
    later = names(15, first=100)
    with opened(tmp_path, slots=SLOTS) as client:
        assert client.write(later) == [DONE] * 15
        left = client.found(KEYS)
    shutil.copy(tmp_path / "kept", folder / name)
    with opened(tmp_path, slots=SLOTS) as client:
        outcomes = client.read([*KEYS, *later])
        read = [key for key, o in zip([*KEYS, *later], outcomes, strict=True) if o is DONE]
        assert read == left
    faults(15)


@pytest.mark.parametrize("names_back", [["table"], [SLAB], ["table", SLAB]], ids="+".join)
def test_what_was_cleared_does_not_return_with_old_slots(
    tmp_path: Path, faults: Callable[[int], None], names_back: list[str]
) -> None:
    folder = fill(tmp_path)
    for name in names_back:
        shutil.copy(folder / name, tmp_path / name)
    with opened(tmp_path, slots=SLOTS) as client:
        client.tier.clear()
    with opened(tmp_path, slots=SLOTS, salt=b"new weights") as client:
        assert client.write(KEYS[:20]) == [DONE] * 20
    # All but the header, which is what a table is known by.
    for name in names_back:
        start = table.HEADER_BYTES if name == "table" else 0
        size = (folder / name).stat().st_size - start
        copy(tmp_path / name, folder / name, start, size)
    with opened(tmp_path, slots=SLOTS, salt=b"new weights") as client:
        outcomes = client.read(KEYS)
        expected = Outcome.MISSING if "table" in names_back else Outcome.DAMAGED
        assert outcomes == [expected] * 20 + [Outcome.MISSING] * 20
    faults(20)
