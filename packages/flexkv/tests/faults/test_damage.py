# SPDX-License-Identifier: Apache-2.0
"""Bytes on disk that changed: exactly the blocks that lost bytes are misses."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_blocks import FINGERPRINT, SLOT, names, opened, unopened

from flexkv.tiers.disk import OsFiles, table
from flexkv.tiers.job import Outcome

SLOTS = 40
KEYS = names(SLOTS)
DONE = Outcome.DONE
Damage = Callable[[random.Random, bytes], bytes]


def flip(chance: random.Random, data: bytes) -> bytes:
    """One bit."""
    bit = chance.randrange(8 * len(data))
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def zero(chance: random.Random, data: bytes) -> bytes:
    """A run of bytes, one of which was not zero."""
    place = chance.choice([i for i, byte in enumerate(data) if byte])
    start = chance.randint(0, place)
    end = chance.randint(place + 1, len(data))
    return data[:start] + bytes(end - start) + data[end:]


def scribble(chance: random.Random, data: bytes) -> bytes:
    """Other bytes from some place on."""
    start = chance.randrange(len(data))
    return data[:start] + bytes(byte ^ chance.randint(1, 255) for byte in data[start:])


KINDS = pytest.mark.parametrize("damage", [flip, zero, scribble])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a store in which every slot is full."""
    with opened(tmp_path, slots=SLOTS) as client:
        assert client.write(KEYS) == [DONE] * SLOTS
    return tmp_path / FINGERPRINT


def places(root: Path) -> dict[bytes, int]:
    """The slot of each block."""
    with opened(root, slots=SLOTS) as client:
        return client.slots_of(KEYS)


def change(path: Path, offset: int, size: int, how: Callable[[bytes], bytes]) -> None:
    """Put `how` of `size` bytes in their place."""
    with path.open("r+b") as file:
        before = os.pread(file.fileno(), size, offset)
        after = how(before)
        assert after != before
        assert len(after) == size
        os.pwrite(file.fileno(), after, offset)


def change_blocks(
    folder: Path, slots: dict[bytes, int], chance: random.Random, damage: Damage
) -> list[Outcome]:
    """Damage the bytes of 25 blocks; what reads of `KEYS` must come to."""
    damaged = set(chance.sample(KEYS, 25))
    for key in damaged:
        change(folder / "slab-00000", slots[key] * SLOT, SLOT, lambda data: damage(chance, data))
    return [Outcome.DAMAGED if key in damaged else DONE for key in KEYS]


def intact(outcomes: list[Outcome]) -> list[bytes]:
    """Those of `KEYS` that were read."""
    return [key for key, outcome in zip(KEYS, outcomes, strict=True) if outcome is DONE]


@KINDS
def test_blocks_whose_bytes_changed_are_misses_and_no_others(
    folder: Path, faults: Callable[[int], None], damage: Damage
) -> None:
    chance = random.Random(damage.__name__)
    root = folder.parent
    for _ in range(5):
        expected = change_blocks(folder, places(root), chance, damage)
        with opened(root, slots=SLOTS) as client:
            assert client.found(KEYS) == KEYS
            assert client.read(KEYS) == expected
            assert client.found(KEYS) == intact(expected)
            client.refill(KEYS)
        faults(expected.count(Outcome.DAMAGED))


@KINDS
def test_blocks_whose_records_changed_are_misses_and_no_others(
    folder: Path, faults: Callable[[int], None], damage: Damage
) -> None:
    chance = random.Random(damage.__name__)
    root = folder.parent
    for _ in range(5):
        slots = places(root)
        damaged = set(chance.sample(KEYS, 20))
        for key in damaged:
            offset, size = table.record_offset(slots[key]), table.RECORD_BYTES
            change(folder / "table", offset, size, lambda data: damage(chance, data))
        with opened(root, slots=SLOTS) as client:
            left = [key for key in KEYS if key not in damaged]
            assert client.found(KEYS) == left
            assert client.read(left) == [DONE] * len(left)
            client.refill(KEYS)
        faults(len(damaged))


@KINDS
@pytest.mark.parametrize("copy", table.HEADER_OFFSETS)
def test_a_table_of_whose_headers_one_changed_loses_nothing(
    folder: Path, faults: Callable[[int], None], damage: Damage, copy: int
) -> None:
    chance = random.Random(damage.__name__)
    for _ in range(10):
        change(folder / "table", copy, 108, lambda data: damage(chance, data))
        with opened(folder.parent, slots=SLOTS) as client:
            assert client.read(KEYS) == [DONE] * SLOTS
        # Both are whole again.
        pages = (folder / "table").read_bytes()[: table.HEADER_BYTES]
        assert pages[: table.PAGE_BYTES] == pages[table.PAGE_BYTES :]
        faults(1)


@KINDS
def test_a_table_whose_headers_both_changed_is_an_empty_one(
    folder: Path, faults: Callable[[int], None], damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind the bytes that FlexKV knows its tables by."""
    chance = random.Random(damage.__name__)
    for _ in range(10):
        caplog.clear()
        for copy in table.HEADER_OFFSETS:
            change(folder / "table", copy + 16, 92, lambda data: damage(chance, data))
        with opened(folder.parent, slots=SLOTS) as client:
            assert client.found(KEYS) == []
            client.refill(KEYS)
        assert "its blocks are discarded" in caplog.text
        faults(1)


@pytest.mark.parametrize("left", ["nothing", "zeros", "no file"])
def test_a_table_that_is_lost_beside_blocks_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture, left: str
) -> None:
    path = folder / "table"
    size = path.stat().st_size
    path.unlink()
    if left != "no file":
        path.write_bytes(bytes(size) if left == "zeros" else b"")
    for expected in ([], KEYS):
        with opened(folder.parent, slots=SLOTS) as client:
            assert client.found(KEYS) == expected
            client.refill(KEYS)
    assert caplog.text.count(f"{path} is missing, empty or zeros, and files of blocks") == 1


@pytest.mark.parametrize("slots", [0, 1, 30])
def test_a_table_that_was_cut_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture, slots: int
) -> None:
    os.truncate(folder / "table", table.table_bytes(slots) + 5)
    for _ in range(2):
        with opened(folder.parent, slots=SLOTS) as client:
            client.refill(KEYS)
    lost = f"the blocks of {SLOTS - slots} of {SLOTS} slots are lost"
    assert caplog.text.count(f"{folder / 'table'} was cut: {lost}") == 1


def test_a_new_cache_a_reset_and_another_size_lose_no_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for slots in (SLOTS, SLOTS // 2, SLOTS):
        with opened(tmp_path, slots=slots) as client:
            client.tier.clear()
    (tmp_path / FINGERPRINT / "reset").touch()
    (tmp_path / FINGERPRINT / "table").write_bytes(b"")  # killed while it recorded the reset
    with opened(tmp_path, slots=SLOTS) as client:
        client.refill(KEYS)
    assert "disk_store" not in caplog.text


class FullForTables(OsFiles):
    """No table has room."""

    def allocate(self, fd: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/table"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, length)


def test_a_cache_that_a_start_left_half_made_has_lost_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with unopened(tmp_path, slots=SLOTS, files=FullForTables(), why="No space left"):
        assert (tmp_path / FINGERPRINT / "slab-00000").exists()
    with opened(tmp_path, slots=SLOTS) as client:
        client.refill(KEYS)
    assert "disk_store" not in caplog.text


@pytest.mark.parametrize("name", ["slab-00000", "table", "counters.json", "lock"])
def test_of_a_file_that_was_cut_the_rest_counts(
    folder: Path, faults: Callable[[int], None], name: str
) -> None:
    chance = random.Random(name)
    root = folder.parent
    for _ in range(15):
        slots = places(root)
        before = (folder / name).read_bytes()
        length = chance.randrange(len(before) + 1)
        os.truncate(folder / name, length)
        ends = {
            "slab-00000": {key: (slots[key] + 1) * SLOT for key in KEYS},
            "table": {key: table.record_offset(slots[key] + 1) for key in KEYS},
        }.get(name, dict.fromkeys(KEYS, 0))
        # What is cut reads as zeros, which the last byte of a record may be.
        whole = {key for key in KEYS if not any(before[length : ends[key]])}
        with opened(root, slots=SLOTS) as client:
            assert set(intact(client.read(KEYS))) == whole
            client.refill(KEYS)
        faults(1)


@pytest.mark.parametrize("name", ["slab-00000", "table", "counters.json", "lock"])
def test_a_file_that_is_gone_is_made_anew(
    folder: Path, faults: Callable[[int], None], name: str
) -> None:
    (folder / name).unlink()
    with opened(folder.parent, slots=SLOTS) as client:
        outcomes = set(client.read(KEYS))
        assert outcomes == {Outcome.MISSING if name in {"slab-00000", "table"} else DONE}
        client.refill(KEYS)
    faults(1)


@KINDS
def test_bytes_that_change_while_the_store_is_open_are_misses(
    folder: Path, faults: Callable[[int], None], damage: Damage
) -> None:
    chance = random.Random(damage.__name__)
    slots = places(folder.parent)
    with opened(folder.parent, slots=SLOTS) as client:
        expected = change_blocks(folder, slots, chance, damage)
        assert client.read(KEYS) == expected
    with opened(folder.parent, slots=SLOTS) as client:
        assert client.found(KEYS) == intact(expected)
    faults(expected.count(Outcome.DAMAGED))
