# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest
from disk_blocks import FINGERPRINT, opened
from disk_folders import OTHER, OURS, TABLE, made

from flexkv.tiers.disk import removal
from flexkv.tiers.disk.folder import MAX_OWNERS, Folder, claim, folders
from flexkv.tiers.disk.removal import Removal, check_room, make_room, remove, remove_others
from flexkv.tiers.disk.table import VERSION
from flexkv.types.errors import DiskError


@pytest.mark.parametrize("owners", [1, 2])
def test_only_what_nobody_owns_is_removed(tmp_path: Path, owners: int) -> None:
    mine = claim(str(tmp_path), OURS, 1)
    sibling, unused = (str(tmp_path / f"{OURS}-{number}") for number in (1, 2))
    (tmp_path / OURS / "table").write_bytes(TABLE)
    for path in [sibling, unused, str(tmp_path / OTHER)]:
        made(path)
    busy = claim(str(tmp_path), "0c" * 32, 1)
    (tmp_path / ("0c" * 32) / "table").write_bytes(TABLE)
    (tmp_path / "notes.txt").write_text("not a cache")
    (tmp_path / ("0d" * 32)).mkdir()  # named like a cache, but without a table
    (tmp_path / ("0d" * 32) / "lock").touch()
    kept = {sibling} if owners == 2 else set()
    gone = {str(tmp_path / OTHER), sibling, unused} - kept
    remove_others(str(tmp_path), mine.path, owners)
    assert not any(map(os.path.exists, gone))
    left = {mine.path, busy.path} | kept
    assert set(folders(str(tmp_path))) == left
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / ("0d" * 32) / "lock").exists()
    mine.release()
    busy.release()


def test_an_owned_folder_is_not_removed(tmp_path: Path) -> None:
    folder = claim(str(tmp_path), OURS, 1)
    (tmp_path / OURS / "table").write_bytes(TABLE)
    assert remove(folder.path) is Removal.IN_USE
    folder.release()
    assert remove(folder.path) is Removal.REMOVED
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_claimed_while_its_removal_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To unlink large files takes a while."""
    path = made(tmp_path / OURS)
    claimed: list[Folder] = []
    real = os.unlink

    def slow(name: str, *, dir_fd: int | None = None) -> None:
        if not claimed:
            claimed.append(claim(str(tmp_path), OURS, 1))
            (path / "table").write_bytes(TABLE)
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", slow)
    assert remove(str(path)) is Removal.REMOVED
    assert [entry.name for entry in tmp_path.iterdir()] == [OURS]
    assert sorted(entry.name for entry in path.iterdir()) == ["lock", "table"]
    assert remove(str(path)) is Removal.IN_USE
    claimed[0].release()


@pytest.mark.parametrize("survives", ["slab-00000", "table", "lock"])
def test_a_removal_that_was_cut_off_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: str
) -> None:
    """Whenever it was: what is left is still known, and still locked."""
    path = made(tmp_path / OTHER)
    real = os.unlink

    def dying(name: str, *, dir_fd: int | None = None) -> None:
        if name == survives:
            raise OSError(5, "Input/output error")
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", dying)
    with pytest.raises(OSError, match="Input/output error"):
        remove(str(path))
    monkeypatch.undo()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(f"{OTHER}.removed-")
    assert (left / "lock").exists()
    assert folders(str(tmp_path)) == []
    mine = claim(str(tmp_path), OURS, 1)
    remove_others(str(tmp_path), mine.path, 1)
    assert not left.exists()
    mine.release()


def test_what_a_removal_did_not_leave_stays(tmp_path: Path) -> None:
    """Without a table, and with something else in it."""
    left = tmp_path / f"{OTHER}.removed-01"
    left.mkdir()
    for name in ("lock", "notes"):
        (left / name).touch()
    assert folders(str(tmp_path), leftovers=True) == []
    (left / "notes").unlink()
    assert folders(str(tmp_path), leftovers=True) == [str(left)]
    (left / "lock").write_text("my thesis")
    with pytest.raises(OSError, match="is a file of another program"):
        remove(str(left))
    assert (left / "lock").read_text() == "my thesis"


def test_only_our_own_files_are_removed(tmp_path: Path) -> None:
    path = made(tmp_path / OTHER, "precious.txt", "slab-0", "table.txt")
    (path / "slab-00007").mkdir()
    (path / "slab-00008").symlink_to("precious.txt")
    assert remove(str(path)) is Removal.FOREIGN_FILES
    left = {entry.name for entry in path.iterdir()}
    assert left == {"precious.txt", "slab-0", "table.txt", "slab-00007", "slab-00008"}


FOREIGN = ["precious.txt", "slab-00000"]


@pytest.mark.parametrize(
    ("table", "names"),
    [
        *itertools.product([None, b"", b"my thesis", "link", "fifo"], [FOREIGN[:1], FOREIGN]),
        *((table, FOREIGN[1:]) for table in (b"my thesis", "link", "fifo")),
    ],
)
def test_what_only_looks_like_a_folder_of_ours_is_left_as_it_is(
    tmp_path: Path, table: bytes | str | None, names: list[str]
) -> None:
    path = tmp_path / "deadbeefdeadbeef"
    path.mkdir()
    (path / "lock").write_text("mine")
    for name in names:
        (path / name).touch()
    (tmp_path / "theirs").write_bytes(TABLE)
    if table == "link":
        (path / "table").symlink_to(tmp_path / "theirs")
    elif table == "fifo":
        os.mkfifo(path / "table")
    elif isinstance(table, bytes):
        (path / "table").write_bytes(table)
    before = sorted(path.iterdir())
    mine = claim(str(tmp_path), OURS, 1)
    assert folders(str(tmp_path)) == []
    remove_others(str(tmp_path), mine.path, 1)
    with pytest.raises(OSError, match="holds no table of FlexKV"):
        remove(str(path))
    assert sorted(path.iterdir()) == before
    assert (path / "lock").read_text() == "mine"
    mine.release()


def test_a_link_that_is_put_above_a_folder_meanwhile_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, moved, victim = (tmp_path / name for name in ("root", "moved", "victim"))
    with opened(root):
        pass
    (victim / FINGERPRINT).mkdir(parents=True)

    def swap(_: int) -> str:
        root.rename(moved)
        root.symlink_to(victim)
        return "00"

    monkeypatch.setattr("secrets.token_hex", swap)
    assert remove(str(root / FINGERPRINT)) is Removal.REMOVED
    assert [each.name for each in victim.iterdir()] == [FINGERPRINT]
    assert list(moved.iterdir()) == []


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    victim = made(tmp_path / "victim")
    before = sorted(victim.iterdir())
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / OTHER).symlink_to(victim)
    (tmp_path / "cache" / OURS).symlink_to(victim)
    root = str(tmp_path / "cache")
    assert folders(root) == []
    with pytest.raises(DiskError, match="Not a directory"):
        claim(root, OURS, 1)
    with pytest.raises(OSError, match="holds no table"):
        remove(os.path.join(root, OTHER))
    assert sorted(victim.iterdir()) == before


MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on a file system of 10 MiB, as far as it says."""

    def free_bytes(root: str) -> float:
        files = [path.lstat() for path in Path(root).rglob("*") if path.is_file()]
        return 10 * MIB - sum(file.st_blocks * 512 for file in files)

    monkeypatch.setattr(removal, "free_bytes", free_bytes)
    return tmp_path


def filled(path: Path, size: int, used: int) -> Path:
    """A folder of FlexKV of about `size` bytes that was owned last at the time `used`."""
    made(path)
    (path / "slab-00000").write_bytes(bytes(size))
    os.utime(path / "lock", (used, used))
    return path


def left_in(root: Path) -> set[str]:
    return {path.name[0] for path in root.iterdir()}


@pytest.mark.parametrize(
    ("size", "left"), [(0, "abcd"), (3, "abcd"), (5, "acd"), (6, "ad"), (7, "ad"), (9, "a")]
)
def test_no_more_is_removed_than_room_is_needed(disk: Path, size: int, left: str) -> None:
    """The folders that were used longest ago leave first: b, then c, then d."""
    mine = claim(str(disk), "a" * 32, 1)
    filled(disk / ("d" * 32), 2 * MIB, 3)
    filled(disk / ("b" * 32), 2 * MIB, 1)
    filled(disk / ("c" * 32), 2 * MIB, 2)
    check_room(str(disk), mine.path, size * MIB, 1, size * MIB)
    assert left_in(disk) == set("abcd")
    make_room(str(disk), mine.path, size * MIB, 1)
    assert left_in(disk) == set(left)
    mine.release()


def test_what_a_folder_has_already_needs_no_room(disk: Path) -> None:
    filled(disk / ("a" * 32), 8 * MIB, 1)
    filled(disk / ("b" * 32), MIB, 2)
    mine = claim(str(disk), "a" * 32, 1)
    check_room(str(disk), mine.path, 8 * MIB, 1, 8 * MIB)
    make_room(str(disk), mine.path, 8 * MIB, 1)
    assert left_in(disk) == {"a", "b"}
    mine.release()


def test_a_folder_that_another_engine_removes_meanwhile_is_no_room(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = filled(disk / ("b" * 32), 4 * MIB, 1)
    filled(disk / ("c" * 32), 4 * MIB, 2)
    found = removal._others

    def found_before_it_went(root: str, mine: str, owners: int) -> list[str]:
        paths = found(root, mine, owners)
        if gone.exists():
            assert remove(str(gone)) is Removal.REMOVED
        return paths

    monkeypatch.setattr(removal, "_others", found_before_it_went)
    mine = claim(str(disk), "a" * 32, 1)
    check_room(str(disk), mine.path, MIB, 1, MIB)
    mine.release()


@pytest.mark.parametrize("why", ["too large", "in use", "same model", "newer format", "not ours"])
def test_a_room_that_there_cannot_be_is_refused_before_anything_is_removed(
    disk: Path, why: str
) -> None:
    other = filled(disk / (("a" * 32 + "-1") if why == "same model" else "b" * 32), 8 * MIB, 1)
    busy = claim(str(disk), "b" * 32, 1) if why == "in use" else None
    if why == "newer format":
        (other / "table").write_bytes(b"FLEXKVTB" + bytes([VERSION + 1]))
    if why == "not ours":
        (other / "table").write_bytes(b"my thesis")
    mine = claim(str(disk), "a" * 32, MAX_OWNERS)
    size = (11 if why == "too large" else 5) * MIB
    with pytest.raises(
        DiskError, match=r"asks for 0\.0[01]\d* GiB .* has 0\.00 GiB left; allowed: "
    ):
        check_room(str(disk), mine.path, size, MAX_OWNERS, size)
    assert (other / "slab-00000").stat().st_size == 8 * MIB
    mine.release()
    if busy is not None:
        busy.release()


def test_a_folder_of_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    path = made(tmp_path / OTHER)
    (path / "table").write_bytes(b"FLEXKVTB" + bytes([VERSION + 1]))
    before = sorted(path.iterdir())
    mine = claim(str(tmp_path), OURS, 1)
    remove_others(str(tmp_path), mine.path, 1)
    with pytest.raises(OSError, match=f"is of format {VERSION + 1}"):
        remove(str(path))
    assert sorted(path.iterdir()) == before
    mine.release()


def test_what_a_removal_that_was_cut_off_left_always_goes(disk: Path) -> None:
    filled(disk / ("b" * 32 + ".removed-0123"), MIB, 1)
    mine = claim(str(disk), "a" * 32, 1)
    make_room(str(disk), mine.path, MIB, 1)
    assert left_in(disk) == {"a"}
    mine.release()


@pytest.mark.parametrize("foreign", [False, True])
def test_a_removal_that_may_not_last_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: bool
) -> None:
    path = tmp_path / OTHER
    made(str(path))
    if foreign:
        (path / "notes.txt").write_text("not a cache")

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="a power failure may bring it back"):
        remove(str(path))
    assert [each.name for each in path.glob("*")] == (["notes.txt"] if foreign else [])


def test_a_removal_ends_when_the_drive_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced, real = tmp_path / OTHER, list[list[str]](), os.fsync
    made(str(path))

    def sync(fd: int) -> None:
        real(fd)
        assert os.path.samestat(os.fstat(fd), os.stat(tmp_path))
        synced.append(os.listdir(fd))

    monkeypatch.setattr(os, "fsync", sync)
    assert remove(str(path)) is Removal.REMOVED
    assert synced == [[]]
