# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flexkv.errors import DiskError
from flexkv.tiers.disk import directory
from flexkv.tiers.disk.directory import (
    Folder,
    Removal,
    claim,
    folders,
    owner,
    remove,
    remove_others,
)
from flexkv.tiers.disk.table import Header

OURS = "0a" * 32
OTHER = "0b" * 32

TABLE = Header(4096, 1, 1, OURS).encode()
"""What a folder is known by."""

OWNER = """
import sys, time
from flexkv.tiers.disk.directory import claim
claim(sys.argv[1], sys.argv[2], False)
print(flush=True)
time.sleep(600)
"""


def made(path: object, *more: str) -> Path:
    """A folder of FlexKV that nobody owns, with files `more` that are not FlexKV's."""
    folder = Path(str(path))
    folder.mkdir()
    for name in ("lock", "slab-00000", "slab-00001", "counters.json", "reset", *more):
        (folder / name).touch()
    (folder / "table").write_bytes(TABLE)
    return folder


def test_a_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "cache"
    folder = claim(str(root), OURS, False)
    assert folder.path == str(root / OURS)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / OURS).stat().st_mode) == 0o700
    assert stat.S_IMODE((root / OURS / "lock").stat().st_mode) == 0o600
    folder.release()
    folder.release()


def test_a_second_owner_is_told_who_the_first_is(tmp_path: Path) -> None:
    first = claim(str(tmp_path), OURS, False)
    with pytest.raises(DiskError, match=f"in use by process {os.getpid()}; allowed"):
        claim(str(tmp_path), OURS, False)
    first.release()
    claim(str(tmp_path), OURS, False).release()


def test_owners_that_share_have_a_folder_each(tmp_path: Path) -> None:
    owned = [claim(str(tmp_path), OURS, True) for _ in range(3)]
    assert [os.path.basename(f.path) for f in owned] == [OURS, f"{OURS}-1", f"{OURS}-2"]
    owned[1].release()
    again = claim(str(tmp_path), OURS, True)
    assert again.path == owned[1].path
    for folder in [owned[0], owned[2], again]:
        folder.release()


def test_there_is_an_end_to_sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_OWNERS", 2)
    owned = [claim(str(tmp_path), OURS, True) for _ in range(2)]
    with pytest.raises(DiskError, match="all 2 folders"):
        claim(str(tmp_path), OURS, True)
    for folder in owned:
        folder.release()


def test_the_folder_of_a_killed_owner_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path), OURS]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(DiskError, match=f"in use by process {process.pid}"):
            claim(str(tmp_path), OURS, False)
        process.kill()
    claim(str(tmp_path), OURS, False).release()


@pytest.mark.parametrize("share", [False, True])
def test_only_what_nobody_owns_is_removed(tmp_path: Path, share: bool) -> None:
    mine = claim(str(tmp_path), OURS, False)
    sibling = str(tmp_path / f"{OURS}-1")
    (tmp_path / OURS / "table").write_bytes(TABLE)
    for path in [sibling, str(tmp_path / OTHER)]:
        made(path)
    busy = claim(str(tmp_path), "0c" * 32, False)
    (tmp_path / ("0c" * 32) / "table").write_bytes(TABLE)
    (tmp_path / "notes.txt").write_text("not a cache")
    (tmp_path / ("0d" * 32)).mkdir()  # named like a cache, but without a table
    (tmp_path / ("0d" * 32) / "lock").touch()
    gone = {str(tmp_path / OTHER)} if share else {str(tmp_path / OTHER), sibling}
    assert set(remove_others(str(tmp_path), mine.path, share)) == gone
    assert not any(map(os.path.exists, gone))
    left = {mine.path, busy.path} | ({sibling} if share else set())
    assert set(folders(str(tmp_path))) == left
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / ("0d" * 32) / "lock").exists()
    mine.release()
    busy.release()


def test_an_owned_folder_is_not_removed(tmp_path: Path) -> None:
    folder = claim(str(tmp_path), OURS, False)
    (tmp_path / OURS / "table").write_bytes(TABLE)
    assert remove(folder.path) is Removal.IN_USE
    folder.release()
    assert remove(folder.path) is Removal.REMOVED
    assert list(tmp_path.iterdir()) == []


def test_a_folder_removed_while_it_is_claimed_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a file that another process has just unlinked protects nothing."""
    real = directory.try_lock

    def late(fd: int) -> bool:
        monkeypatch.setattr(directory, "try_lock", real)
        shutil.rmtree(tmp_path / OURS)
        return real(fd)

    monkeypatch.setattr(directory, "try_lock", late)
    folder = claim(str(tmp_path), OURS, False)
    with pytest.raises(DiskError, match="in use by process"):
        claim(str(tmp_path), OURS, False)
    folder.release()


def test_a_folder_is_claimed_while_its_removal_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To unlink large files takes a while."""
    path = made(tmp_path / OURS)
    claimed: list[Folder] = []
    real = os.unlink

    def slow(name: str, *, dir_fd: int | None = None) -> None:
        if not claimed:
            claimed.append(claim(str(tmp_path), OURS, False))
            (path / "table").write_bytes(TABLE)
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", slow)
    assert remove(str(path)) is Removal.REMOVED
    assert [entry.name for entry in tmp_path.iterdir()] == [OURS]
    assert sorted(entry.name for entry in path.iterdir()) == ["lock", "table"]
    assert remove(str(path)) is Removal.IN_USE
    claimed[0].release()


def test_a_folder_is_claimed_that_is_just_about_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is locked, but not out of the way yet."""
    path = made(tmp_path / OURS)
    remover = directory.lock_folder(str(path))
    assert remover is not None
    waits: list[float] = []

    def let_go(seconds: float) -> None:
        waits.append(seconds)
        shutil.rmtree(path)

    monkeypatch.setattr(directory.time, "sleep", let_go)
    folder = claim(str(tmp_path), OURS, False)
    assert len(waits) == 1
    remover.release()
    monkeypatch.setattr(directory.time, "sleep", waits.append)
    with pytest.raises(DiskError, match="in use by process"):
        claim(str(tmp_path), OURS, False)
    folder.release()


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
    mine = claim(str(tmp_path), OURS, False)
    assert remove_others(str(tmp_path), mine.path, False) == (
        [] if survives == "lock" else [str(left)]
    )
    mine.release()


def test_only_our_own_files_are_removed(tmp_path: Path) -> None:
    path = made(tmp_path / OTHER, "precious.txt", "slab-0", "table.txt")
    (path / "slab-00007").mkdir()
    (path / "slab-00008").symlink_to("precious.txt")
    assert remove(str(path)) is Removal.FOREIGN_FILES
    left = {entry.name for entry in path.iterdir()}
    assert left == {"precious.txt", "slab-0", "table.txt", "slab-00007", "slab-00008"}


@pytest.mark.parametrize("table", [None, b"", b"my thesis", "link", "fifo"])
def test_what_only_looks_like_a_folder_of_ours_is_left_as_it_is(
    tmp_path: Path, table: bytes | str | None
) -> None:
    path = tmp_path / "deadbeefdeadbeef"
    path.mkdir()
    (path / "lock").write_text("mine")
    (path / "precious.txt").touch()
    (tmp_path / "theirs").write_bytes(TABLE)
    if table == "link":
        (path / "table").symlink_to(tmp_path / "theirs")
    elif table == "fifo":
        os.mkfifo(path / "table")
    elif isinstance(table, bytes):
        (path / "table").write_bytes(table)
    before = sorted(path.iterdir())
    mine = claim(str(tmp_path), OURS, False)
    assert folders(str(tmp_path)) == []
    assert remove_others(str(tmp_path), mine.path, False) == []
    with pytest.raises(OSError, match="holds no table of FlexKV"):
        remove(str(path))
    assert sorted(path.iterdir()) == before
    assert (path / "lock").read_text() == "mine"
    mine.release()


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    victim = made(tmp_path / "victim")
    before = sorted(victim.iterdir())
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / OTHER).symlink_to(victim)
    (tmp_path / "cache" / OURS).symlink_to(victim)
    root = str(tmp_path / "cache")
    assert folders(root) == []
    with pytest.raises(DiskError, match="Not a directory"):
        claim(root, OURS, False)
    with pytest.raises(OSError, match="holds no table"):
        remove(os.path.join(root, OTHER))
    assert sorted(victim.iterdir()) == before


@pytest.mark.parametrize("kind", ["link", "fifo", "foreign file", "directory"])
def test_a_lock_that_is_not_ours_is_left_as_it_is(tmp_path: Path, kind: str) -> None:
    folder, victim = tmp_path / "cache" / OURS, tmp_path / "victim"
    folder.mkdir(parents=True)
    victim.write_text("my thesis")
    lock = folder / "lock"
    if kind == "link":
        lock.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(lock)
    elif kind == "directory":
        lock.mkdir()
    else:
        victim.rename(lock)
        victim = lock
    with pytest.raises(DiskError, match=r"lock: is .*; allowed: "):
        claim(str(tmp_path / "cache"), OURS, False)
    assert victim.read_text() == "my thesis"


def test_a_forked_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    folder = claim(str(tmp_path), OURS, False)
    held, release = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(held[1], b"1")
        os.read(release[0], 1)
        os._exit(0)
    os.read(held[0], 1)
    with pytest.raises(DiskError, match="in use"):  # by its parent, still
        claim(str(tmp_path), OURS, False)
    folder.release()
    claim(str(tmp_path), OURS, False).release()
    os.write(release[1], b"1")
    os.waitpid(child, 0)


def test_what_cannot_be_a_cache_directory_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DiskError, match=r"file.* from ssd_cache_dir: .*allowed: a directory"):
        claim(str(file), OURS, False)
    with pytest.raises(DiskError, match="cannot read the cache directory"):
        folders(str(tmp_path / "none"))


def test_a_lock_that_says_nothing_has_an_unknown_owner(tmp_path: Path) -> None:
    assert owner(str(tmp_path)) == "unknown"
    (tmp_path / "lock").write_bytes(b"")
    assert owner(str(tmp_path)) == "unknown"
    (tmp_path / "lock").write_bytes(b"\xff")
    assert owner(str(tmp_path))
