# SPDX-License-Identifier: Apache-2.0
"""Folders of this user to which others have, or had, rights."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
from disk_blocks import FINGERPRINT, SLOT, capacity_of, names, opened

from flexkv.tiers.disk import open_disk_tier
from flexkv.tiers.job import Outcome
from flexkv.types.errors import DiskError

NOBODY = 65534
KEYS = names(3)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the blocks of `KEYS`."""
    with opened(tmp_path) as client:
        client.write(KEYS)
    return tmp_path / FINGERPRINT


def modes_of(folder: Path) -> dict[str, int]:
    paths = [folder, *folder.iterdir()]
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}


def found(root: Path) -> list[Outcome]:
    """What a new engine reads of `KEYS`; it fails at a wrong byte."""
    with opened(root) as client:
        return client.read(KEYS)


def refuses(root: Path, reason: str) -> None:
    for _ in range(2):  # nothing is left locked
        with pytest.raises(DiskError, match=reason):
            open_disk_tier([str(root)], FINGERPRINT, SLOT, capacity_of(64))


@pytest.mark.parametrize("name", ["", "table", "slab-00000"])
@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o702])
def test_blocks_that_others_could_change_are_discarded(
    folder: Path, name: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    kept = os.open(folder / "slab-00000", os.O_RDWR)  # as another user may have
    (folder / "notes.txt").write_text("not FlexKV's")
    (folder / "notes.txt").chmod(0o666)
    (folder / name).chmod(mode)
    assert found(folder.parent) == [Outcome.MISSING] * 3
    assert modes_of(folder) == {
        FINGERPRINT: 0o700,
        "notes.txt": 0o666,
        **dict.fromkeys(("lock", "table", "slab-00000", "counters.json"), 0o600),
    }
    assert not os.path.samestat(os.fstat(kept), (folder / "slab-00000").stat())
    os.close(kept)
    assert caplog.text.count(f"could write to {folder} or its files (mode ") == 1
    assert "discards its blocks" in caplog.text
    with opened(folder.parent) as client:
        client.write(KEYS)
    caplog.clear()
    assert found(folder.parent) == [Outcome.DONE] * 3
    assert not caplog.text


@pytest.mark.parametrize("name", ["", "table", "slab-00000", "lock"])
def test_blocks_that_others_could_read_are_kept(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / name).chmod(0o755 if not name else 0o644)
    assert found(folder.parent) == [Outcome.DONE] * 3
    assert all(not mode & 0o077 for mode in modes_of(folder).values())
    assert caplog.text.count(f"could read {folder} or its files (mode ") == 1
    assert found(folder.parent) == [Outcome.DONE] * 3
    assert caplog.text.count("other users") == 1


@needs_root
@pytest.mark.parametrize("name", ["table", "slab-00000", "lock"])
@pytest.mark.parametrize("mode", [0o700, 0o770])
def test_a_file_that_another_user_put_there_is_not_used(folder: Path, name: str, mode: int) -> None:
    os.chown(folder / name, NOBODY, NOBODY)
    (folder / name).chmod(0o666)
    folder.chmod(mode)
    if name == "slab-00000":  # its blocks are the user's: they go
        assert found(folder.parent) == [Outcome.MISSING] * 3
        assert (folder / name).stat().st_uid == 0
    else:
        refuses(folder.parent, rf"{name}.*: belongs to user {NOBODY}; remove it")


@pytest.mark.parametrize("name", ["slab-00000", "table", "lock"])
def test_a_hard_link_is_not_written(folder: Path, name: str) -> None:
    victim = folder.parent / "victim"
    shutil.copy(folder / name, victim)
    if name == "slab-00000":
        victim.write_bytes(b"PRECIOUS" * 1000)
    before = victim.read_bytes()
    (folder / name).unlink()
    os.link(victim, folder / name)
    refuses(folder.parent, f"{folder}.*{name}: has 2 names")
    assert victim.read_bytes() == before


@needs_root
def test_a_folder_of_another_owner_stays_as_it_is(folder: Path) -> None:
    """Root may set any mode; it is not root's folder."""
    os.chown(folder, NOBODY, NOBODY)
    os.chown(folder.parent, NOBODY, NOBODY)
    folder.chmod(0o770)
    refuses(folder.parent, f"belongs to user {NOBODY}, and its mode 0770 lets others write")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o770


def test_where_modes_cannot_be_set_others_may_read_but_not_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, mode: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    for each in (refuse, lambda fd, mode: None):  # root's folder; a file system without modes
        monkeypatch.setattr(os, "fchmod", each)
        folder.chmod(0o755)
        assert found(folder.parent) == [Outcome.DONE] * 3
        folder.chmod(0o775)
        refuses(folder.parent, "keeps mode 0775, which lets others write there")
    assert (folder / "table").exists()


def test_a_table_that_is_not_ours_is_not_removed(folder: Path) -> None:
    (folder / "table").write_bytes(b"my thesis")
    folder.chmod(0o777)
    refuses(folder.parent, "is not a table of FlexKV")
    assert (folder / "table").read_bytes() == b"my thesis"
