# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from disk_blocks import SLOT, buffers, bytes_of
from faults.faulty_files import NoDirectFiles

from flexkv.tiers.disk import OsFiles, slabs
from flexkv.tiers.disk.files import open_folder
from flexkv.tiers.disk.slabs import Slabs

PER_SLAB = 4


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB_BYTES", PER_SLAB * SLOT)


class FullFiles(OsFiles):
    """Files on a disk with room for `room` bytes in each."""

    def __init__(self, room: int) -> None:
        self.room = room

    def allocate(self, fd: int, length: int) -> None:
        if length > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, length)


def slabs_in(folder: Path, files: OsFiles, slots: int) -> Slabs:
    fd = open_folder(str(folder))
    try:
        return Slabs(files, fd, SLOT, slots)
    finally:
        os.close(fd)


def contents(made: Slabs, count: int) -> list[bytes]:
    (buffer,) = buffers(1)
    result = []
    for slot in range(count):
        assert made.read(slot, [buffer]) == [True]
        result.append(bytes(buffer))
    return result


def fill(made: Slabs, count: int) -> list[bytes]:
    (buffer,) = buffers(1)
    blocks = [bytes_of(b"%d" % slot) for slot in range(count)]
    for slot in reversed(range(count)):
        buffer[:] = blocks[slot]
        assert made.write(slot, [buffer]) == [None]
    return blocks


def files_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


@pytest.mark.parametrize("files", [OsFiles(), NoDirectFiles()], ids=["direct", "buffered"])
def test_every_slot_has_a_place_of_its_own(tmp_path: Path, files: OsFiles) -> None:
    made = slabs_in(tmp_path, files, 10)
    assert made.direct is not isinstance(files, NoDirectFiles)
    blocks = fill(made, 10)
    assert contents(made, 10) == blocks
    made.close()
    made.close()


@pytest.mark.parametrize("files", [OsFiles(), NoDirectFiles()], ids=["direct", "buffered"])
def test_a_run_of_slots_is_the_same_as_each_of_them(tmp_path: Path, files: OsFiles) -> None:
    made = slabs_in(tmp_path, files, 10)
    blocks = fill(made, 10)
    targets = buffers(3)[::-1]  # that are not neighbours in this order
    assert made.read(5, targets) == [True] * 3
    assert [bytes(target) for target in targets] == blocks[5:8]
    assert made.write(1, targets) == [None] * 3
    assert contents(made, 10) == [blocks[0], *blocks[5:8], *blocks[4:]]
    made.close()


def test_all_bytes_are_allocated_at_once_and_only_for_the_owner(tmp_path: Path) -> None:
    slabs_in(tmp_path, OsFiles(), 10).close()
    assert files_in(tmp_path) == {
        "slab-00000": 4 * SLOT,
        "slab-00001": 4 * SLOT,
        "slab-00002": 2 * SLOT,
    }
    for path in tmp_path.iterdir():
        assert path.stat().st_blocks * 512 >= path.stat().st_size
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("slots", [1, 4, 5, 9, 10, 17])
def test_another_number_of_slots_keeps_those_that_both_have(tmp_path: Path, slots: int) -> None:
    made = slabs_in(tmp_path, OsFiles(), 10)
    blocks = fill(made, 10)
    made.close()
    made = slabs_in(tmp_path, OsFiles(), slots)
    assert contents(made, min(10, slots)) == blocks[:slots]
    made.close()
    assert sum(files_in(tmp_path).values()) == slots * SLOT


def test_a_full_disk_leaves_nothing_new_and_keeps_the_old(tmp_path: Path) -> None:
    made = slabs_in(tmp_path, OsFiles(), 2)
    blocks = fill(made, 2)
    made.close()
    before = files_in(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        slabs_in(tmp_path, FullFiles(3 * SLOT), 10)
    assert files_in(tmp_path) == before
    made = slabs_in(tmp_path, OsFiles(), 2)
    assert contents(made, 2) == blocks
    made.close()
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(OSError, match="No space left"):
        slabs_in(empty, FullFiles(SLOT), 10)
    assert not files_in(empty)


def test_a_file_that_was_cut_has_no_bytes_behind_its_end(tmp_path: Path) -> None:
    made = slabs_in(tmp_path, OsFiles(), 10)
    blocks = fill(made, 10)
    os.truncate(tmp_path / "slab-00001", 2 * SLOT - 100)
    (buffer,) = buffers(1)
    assert made.read(4, [buffer]) == [True]
    assert buffer == blocks[4]
    assert [made.read(slot, [buffer]) for slot in (5, 7, 8)] == [[False], [False], [True]]
    assert made.read(4, buffers(2)) == [True, False]
    made.close()
