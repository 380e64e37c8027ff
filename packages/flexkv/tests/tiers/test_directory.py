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
from flexkv.tiers.disk.directory import claim, folders, lock_folder, owner, remove, remove_others

OURS = "0a" * 32
OTHER = "0b" * 32

OWNER = """
import sys, time
from flexkv.tiers.disk.directory import claim
claim(sys.argv[1], sys.argv[2], False)
print(flush=True)
time.sleep(600)
"""


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
    for path in [sibling, str(tmp_path / OTHER)]:
        os.mkdir(path)
        taken = lock_folder(path)
        assert taken is not None
        taken.release()
    busy = claim(str(tmp_path), "0c" * 32, False)
    (tmp_path / "notes.txt").write_text("not a cache")
    (tmp_path / ("0d" * 32)).mkdir()  # named like a cache, but without a lock
    gone = {str(tmp_path / OTHER)} if share else {str(tmp_path / OTHER), sibling}
    assert set(remove_others(str(tmp_path), mine.path, share)) == gone
    assert not any(map(os.path.exists, gone))
    left = {mine.path, busy.path} | ({sibling} if share else set())
    assert set(folders(str(tmp_path))) == left
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / ("0d" * 32)).exists()
    mine.release()
    busy.release()


def test_an_owned_folder_is_not_removed(tmp_path: Path) -> None:
    folder = claim(str(tmp_path), OURS, False)
    assert not remove(folder.path)
    folder.release()
    assert remove(folder.path)
    assert not os.path.exists(folder.path)


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
