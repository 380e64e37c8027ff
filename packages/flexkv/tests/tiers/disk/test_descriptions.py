# SPDX-License-Identifier: Apache-2.0
"""Descriptions outlive their process; damaged, moved and foreign ones are skipped."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv.tiers.disk.descriptions import FILE, MAX_TEXT_BYTES, Descriptions
from flexkv.tiers.disk.files import OsFiles

SEAL = 7
TEXTS = {slot: (b"key%d" % slot, b"text of %d" % slot) for slot in (0, 1, 5)}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def write(folder: int, num_slots: int = 8) -> None:
    kept = Descriptions(OsFiles(), folder, num_slots)
    for slot, (key, text) in TEXTS.items():
        kept.write(slot, SEAL, key, text)
    kept.close()


def read(folder: int, seal: int = SEAL, num_slots: int = 8) -> dict[bytes, bytes]:
    kept = Descriptions(OsFiles(), folder, num_slots)
    found: dict[bytes, bytes] = {}
    for _, some in kept.read(seal):
        found |= some
    kept.close()
    return found


def test_descriptions_outlive_the_process(folder: int, tmp_path: Path) -> None:
    assert not Descriptions(OsFiles(), folder, 8).exists
    write(folder)
    assert Descriptions(OsFiles(), folder, 8).exists
    assert read(folder) == dict(TEXTS.values())
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_parts_come_in_the_order_of_slots_and_writes_between_them(
    folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv.tiers.disk.descriptions._READ_BYTES", 600)
    write(folder)
    kept = Descriptions(OsFiles(), folder, 8)
    parts = kept.read(SEAL)
    assert next(parts) == (2, dict([TEXTS[0], TEXTS[1]]))
    kept.write(3, SEAL, b"key3", b"new")
    assert next(parts) == (4, {b"key3": b"new"})
    kept.write(2, SEAL, b"long", bytes(1000))
    assert list(parts) == [], "a longer description has discarded all"
    kept.close()


def test_a_table_with_fewer_slots_reads_only_theirs(folder: int) -> None:
    write(folder)
    assert read(folder, num_slots=2) == dict([TEXTS[0], TEXTS[1]])


def test_descriptions_under_another_seal_are_skipped(folder: int) -> None:
    write(folder)
    assert read(folder, seal=SEAL + 1) == {}


def test_every_damaged_byte_of_a_record_is_noticed(folder: int, tmp_path: Path) -> None:
    write(folder)
    whole = (tmp_path / FILE).read_bytes()
    start = 4096
    for at in range(start, start + 9 + sum(map(len, TEXTS[0]))):
        (tmp_path / FILE).write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert read(folder) == dict([TEXTS[1], TEXTS[5]]), at


def test_a_moved_record_is_skipped(folder: int, tmp_path: Path) -> None:
    write(folder)
    whole = bytearray((tmp_path / FILE).read_bytes())
    whole[4096 + 256 : 4096 + 512] = whole[4096 : 4096 + 256]
    (tmp_path / FILE).write_bytes(whole)
    assert read(folder) == dict([TEXTS[0], TEXTS[5]])


def test_a_torn_file_loses_what_it_lacks(folder: int, tmp_path: Path) -> None:
    write(folder)
    size = (tmp_path / FILE).stat().st_size
    for length in range(size):
        os.truncate(tmp_path / FILE, size - 1 - length)
        assert read(folder).items() <= dict(TEXTS.values()).items()
    assert read(folder) == {}


@pytest.mark.parametrize("content", [b"", b"other program's", b"\xff" * 8192])
def test_a_file_that_is_not_ours_describes_nothing(
    folder: int, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert read(folder) == {}
    write(folder)
    assert read(folder) == dict(TEXTS.values())


def test_a_longer_description_begins_the_file_again(folder: int) -> None:
    write(folder)
    kept = Descriptions(OsFiles(), folder, 8)
    kept.write(3, SEAL, b"long", bytes(range(256)) * 8)
    kept.write(4, SEAL, b"too long", bytes(MAX_TEXT_BYTES + 1))
    kept.close()
    assert read(folder) == {b"long": bytes(range(256)) * 8}
