# SPDX-License-Identifier: Apache-2.0
"""Which directories are used, and which count as another user's trap."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv.system import directories
from flexkv.system.directories import open_directory

NOBODY = 65534
OTHER = 12345

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which every user can make something, as in /tmp."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def theirs(path: Path, user: int = NOBODY, mode: int = 0o755) -> Path:
    """A directory of another user."""
    path.mkdir(parents=True)
    os.chown(path, user, user)
    path.chmod(mode)
    return path


def opened(path: Path, *, private: bool = False) -> str:
    """The real path of the opened directory."""
    fd = open_directory(str(path), private=private)
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def held(path: Path) -> list[str]:
    """The process's open descriptors of a path and of all above it. Threads of other tests may
    open others meanwhile."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(each for each in targets if each in {str(path), *map(str, path.parents)})


def refused(path: Path, component: Path, *, private: bool = False) -> None:
    before = held(path)
    with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}") as error:
        open_directory(str(path), mode_above=0o755, private=private)
    assert error.value.filename == str(component)
    assert held(path) == before


@needs_root
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o775])
def test_below_a_directory_that_another_user_planted_nothing_is_used(
    shared: Path, mode: int, private: bool
) -> None:
    shared.chmod(mode)
    planted = theirs(shared / "kv")
    theirs(planted / "deep")
    (planted / "roots").mkdir()
    for path in (planted, planted / "deep", planted / "roots", planted / "deep" / "new"):
        refused(path, planted, private=private)
    assert not (planted / "deep" / "new").exists()


@needs_root
def test_a_user_whom_root_has_chosen_owns_what_is_below(shared: Path) -> None:
    home = theirs(shared / "homes" / "nobody", mode=0o775)
    kept = theirs(home / "kv")
    assert opened(kept) == str(kept)
    with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}"):
        open_directory(str(kept), private=True)
    other = theirs(home / "other", user=OTHER)  # whoever is of the group may have made it
    with pytest.raises(PermissionError, match=f"{OTHER}, who may have made it .* mode 0775"):
        open_directory(str(other))


@needs_root
def test_a_mount_is_roots_choice_wherever_it_is(shared: Path) -> None:
    source, point = theirs(shared / "source"), shared / "point"
    point.mkdir()
    mount = ["mount", "--bind", source, point]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this sandbox cannot mount")
    try:
        assert opened(point) == str(point)
        refused(source, source)
    finally:
        subprocess.run(["umount", point], check=True)


@needs_root
def test_a_link_is_followed_if_nobody_else_can_have_made_it(shared: Path) -> None:
    mine = shared / "mine"
    (mine / "target").mkdir(parents=True, mode=0o755)
    for place, link in ((shared, "planted"), (mine, "moved"), (shared, "own")):
        (place / link).symlink_to(mine / "target")
    for link in (shared / "planted", mine / "moved"):
        os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    refused(shared / "planted", shared / "planted")
    refused(shared / "planted" / "below", shared / "planted")
    assert opened(mine / "moved") == opened(shared / "own") == str(mine / "target")
    theirs(shared / "kv")
    (mine / "out").symlink_to("../kv")
    refused(mine / "out", shared / "kv")


def test_links_are_resolved_as_by_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "whole").symlink_to(f"{tmp_path}//a/./b/")
    (tmp_path / "round").symlink_to("round")
    for path in ("a/up/whole", "a/b/../../a/b/", "whole/../b"):
        assert opened(tmp_path / path) == str(tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path / "a")
    assert opened(Path("b")) == opened(Path("../whole")) == str(tmp_path / "a" / "b")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_directory(str(tmp_path / "round"))


def test_missing_directories_are_made_but_not_behind_a_link(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/a"):
        open_directory(str(tmp_path / "a" / "b"))
    os.close(open_directory(str(tmp_path / "a" / "b"), mode_above=0o755))
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to("a/none")
    with pytest.raises(FileNotFoundError, match="a/none"):
        open_directory(str(tmp_path / "link" / "c"), mode_above=0o755)
    (tmp_path / "good").symlink_to("a")
    os.close(open_directory(str(tmp_path / "good" / "c"), mode_above=0o755))
    assert (tmp_path / "a" / "c").is_dir()


@needs_root
def test_a_component_exchanged_after_its_check_is_not_used(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk goes on from the directory that it has checked."""
    (shared / "kv" / "cache").mkdir(parents=True)
    trap = theirs(shared / "trap" / "cache")
    real = os.fstat

    def exchange(fd: int) -> os.stat_result:
        status = real(fd)
        if os.readlink(f"/proc/self/fd/{fd}") == str(shared / "kv"):
            monkeypatch.setattr(os, "fstat", real)
            (shared / "kv").rename(shared / "away")
            trap.parent.rename(shared / "kv")
        return status

    monkeypatch.setattr(os, "fstat", exchange)
    assert opened(shared / "kv" / "cache") == str(shared / "away" / "cache")


@pytest.mark.parametrize(
    ("uid_map", "roots"), [("0 0 4294967295", {0}), ("1000 1000 1", {0, 65534})]
)
def test_in_a_namespace_without_root_its_files_show_as_the_overflow_users(
    uid_map: str, roots: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uid_map").write_text(f"         {uid_map}\n")
    (tmp_path / "overflowuid").write_text("65534\n")
    monkeypatch.setattr(directories, "_UID_MAP", tmp_path / "uid_map")
    monkeypatch.setattr(directories, "_OVERFLOW_UID", tmp_path / "overflowuid")
    assert directories.root_ids() == roots
