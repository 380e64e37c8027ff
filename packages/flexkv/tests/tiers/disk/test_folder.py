# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from disk_folders import OURS, made

from flexkv.tiers.disk.files import try_lock
from flexkv.tiers.disk.folder import (
    MAX_OWNERS,
    check_root,
    claim,
    describe_owner,
    folders,
    lock_folder,
)
from flexkv.types.errors import DiskError

NOBODY = 65534

OWNER = """
import sys, time
from flexkv.tiers.disk.folder import claim
claim(sys.argv[1], sys.argv[2], 1)
print(flush=True)
time.sleep(600)
"""


def test_a_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "cache"
    folder = claim(str(root), OURS, 1)
    assert folder.path == str(root / OURS)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / OURS).stat().st_mode) == 0o700
    assert stat.S_IMODE((root / OURS / "lock").stat().st_mode) == 0o600
    folder.release()
    folder.release()


def test_a_second_owner_is_told_who_the_first_is(tmp_path: Path) -> None:
    first = claim(str(tmp_path), OURS, 1)
    with pytest.raises(DiskError, match=f"in use by process {os.getpid()}; allowed"):
        claim(str(tmp_path), OURS, 1)
    first.release()
    claim(str(tmp_path), OURS, 1).release()


def test_owners_that_share_have_a_folder_each(tmp_path: Path) -> None:
    owned = [claim(str(tmp_path), OURS, MAX_OWNERS) for _ in range(3)]
    assert [os.path.basename(f.path) for f in owned] == [OURS, f"{OURS}-1", f"{OURS}-2"]
    owned[1].release()
    again = claim(str(tmp_path), OURS, MAX_OWNERS)
    assert again.path == owned[1].path
    for folder in [owned[0], owned[2], again]:
        folder.release()


def test_there_is_an_end_to_sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexkv.tiers.disk.folder.MAX_OWNERS", 2)
    owned = [claim(str(tmp_path), OURS, 2) for _ in range(2)]
    with pytest.raises(DiskError, match="all 2 folders"):
        claim(str(tmp_path), OURS, 2)
    for folder in owned:
        folder.release()


def test_a_second_server_gets_no_folder_beside_those_of_the_first(tmp_path: Path) -> None:
    owned = [claim(str(tmp_path), OURS, 2) for _ in range(2)]
    said = f"the 2 folders .*{OURS}.* one of them by process {os.getpid()}; .* with 2 engines"
    with pytest.raises(DiskError, match=said):
        claim(str(tmp_path), OURS, 2)
    for folder in owned:
        folder.release()


def test_the_folder_of_a_killed_owner_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path), OURS]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(DiskError, match=f"in use by process {process.pid}"):
            claim(str(tmp_path), OURS, 1)
        process.kill()
    claim(str(tmp_path), OURS, 1).release()


def test_a_folder_removed_while_it_is_claimed_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a file that another process has just unlinked protects nothing."""
    real = try_lock

    def late(fd: int) -> bool:
        monkeypatch.setattr("flexkv.tiers.disk.folder.try_lock", real)
        shutil.rmtree(tmp_path / OURS)
        return real(fd)

    monkeypatch.setattr("flexkv.tiers.disk.folder.try_lock", late)
    folder = claim(str(tmp_path), OURS, 1)
    with pytest.raises(DiskError, match="in use by process"):
        claim(str(tmp_path), OURS, 1)
    folder.release()


def test_a_folder_is_claimed_that_is_just_about_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is locked, but not out of the way yet."""
    path = made(tmp_path / OURS)
    remover = lock_folder(str(path))
    assert remover is not None
    waits: list[float] = []

    def let_go(seconds: float) -> None:
        waits.append(seconds)
        shutil.rmtree(path)

    monkeypatch.setattr(time, "sleep", let_go)
    folder = claim(str(tmp_path), OURS, 1)
    assert len(waits) == 1
    remover.release()
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(DiskError, match="in use by process"):
        claim(str(tmp_path), OURS, 1)
    folder.release()


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
        claim(str(tmp_path / "cache"), OURS, 1)
    assert victim.read_text() == "my thesis"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_directory_that_is_not_writable_serves_the_folders_that_are_there(
    has_folder: bool,
) -> None:
    """As others' folders below `tmp_path` cannot be reached, this one is elsewhere."""
    with tempfile.TemporaryDirectory() as above:
        os.chmod(above, 0o755)
        root = Path(above, "kv")
        root.mkdir()
        if has_folder:
            folder = made(root / OURS)
            for path in (folder, *folder.iterdir()):
                os.chown(path, NOBODY, NOBODY)
        pid = os.fork()
        if pid == 0:
            os.setresuid(NOBODY, NOBODY, NOBODY)
            refusals = 0
            for use in (check_root, lambda path: claim(path, OURS, 1).release()):
                try:
                    use(str(root))
                except DiskError:
                    refusals += 1
            os._exit(refusals)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (0 if has_folder else 2)


def test_a_damaged_lock_in_a_folder_of_flexkv_stops_no_start(tmp_path: Path) -> None:
    folder = made(tmp_path / OURS)
    (folder / "lock").write_bytes(b"12\x8b45\n")
    assert describe_owner(str(folder)) == "unknown"
    claim(str(tmp_path), OURS, 1).release()
    assert describe_owner(str(folder)) == str(os.getpid())


def test_a_forked_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    folder = claim(str(tmp_path), OURS, 1)
    held, release = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(held[1], b"1")
        os.read(release[0], 1)
        os._exit(0)
    os.read(held[0], 1)
    with pytest.raises(DiskError, match="in use"):  # by its parent, still
        claim(str(tmp_path), OURS, 1)
    folder.release()
    claim(str(tmp_path), OURS, 1).release()
    os.write(release[1], b"1")
    os.waitpid(child, 0)


def test_what_cannot_be_a_cache_directory_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DiskError, match=r"file.* from ssd_cache_dir: .*allowed: a directory"):
        claim(str(file), OURS, 1)
    with pytest.raises(DiskError, match="cannot read the cache directory"):
        folders(str(tmp_path / "none"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("name", ["", OURS], ids=["cache directory", "folder"])
def test_what_another_user_has_left_open_to_everybody_is_refused(tmp_path: Path, name: str) -> None:
    claim(str(tmp_path), OURS, 1).release()
    path = tmp_path / name
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o777)
    for _ in range(2):  # no lock is left behind
        with pytest.raises(DiskError, match=rf"^{path} .* belongs to user {NOBODY}, .*0777"):
            claim(str(tmp_path), OURS, 1)
    path.chmod(0o755)
    if not name:
        claim(str(tmp_path), OURS, 1).release()
        os.chown(tmp_path / OURS, NOBODY, NOBODY)  # as on NFS, whose server maps root to nobody
        claim(str(tmp_path), OURS, 1).release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("root_mode", [0o755, 0o1777])
def test_a_folder_that_another_user_has_planted_is_refused(tmp_path: Path, root_mode: int) -> None:
    """Its files are there, writable for all: its owner would read and change what is written."""
    claim(str(tmp_path), OURS, 1).release()
    os.chown(tmp_path / OURS, NOBODY, NOBODY)
    (tmp_path / OURS).chmod(0o755)
    tmp_path.chmod(root_mode)
    for _ in range(2):
        with pytest.raises(DiskError, match=rf"^{tmp_path / OURS} .* belongs to user {NOBODY}, "):
            claim(str(tmp_path), OURS, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_cache_directory_that_another_user_has_planted_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "tmp" / "kv"
    root.mkdir(parents=True)
    os.chown(root, NOBODY, NOBODY)
    claim(str(root), OURS, 1).release()  # an administrator has made it
    (tmp_path / "tmp").chmod(0o1777)
    refusal = f"belongs to user {NOBODY}, who may have made it"
    for path in (root, root / "deeper"):
        with pytest.raises(DiskError, match=f"{path} from ssd_cache_dir: {root}: {refusal}"):
            claim(str(path), OURS, 1)
    link = tmp_path / "tmp" / "link"
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(DiskError, match=f"{link}: {refusal}"):
        claim(str(link), OURS, 1)
    os.chown(root, 0, 0)
    claim(str(root), OURS, 1).release()


def test_with_an_open_umask_nobody_else_can_write_above_a_cache(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        claim(str(tmp_path / "a" / "b" / "c"), OURS, 1).release()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b", "a/b/c")]
    assert modes == [0o755, 0o755, 0o700]


def test_a_directory_of_ones_own_may_be_open_to_everybody(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    claim(str(tmp_path), OURS, 1).release()
