# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from flexkv.preflight.checks import all_checks
from flexkv.preflight.disk import check_directory, compare_directories, disk_name, measure
from flexkv.preflight.findings import Finding, Level, run_checks
from flexkv.settings import CacheConfig
from packages.conftest import PATIENCE_SECONDS

NOBODY = 65534


def found_in(path: str) -> list[Finding]:
    """The findings about one cache directory."""
    config = CacheConfig(ssd_cache_gb=1, ssd_cache_dir=path)  # type: ignore[arg-type]
    name = disk_name(path)
    return run_checks([each for each in all_checks(config) if each.name == name], PATIENCE_SECONDS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_directory_of_others_is_a_problem() -> None:
    # Below `tmp_path` nobody else reaches anything.
    with tempfile.TemporaryDirectory() as theirs:
        pid = os.fork()
        if pid == 0:
            os.setresuid(NOBODY, NOBODY, NOBODY)
            found = found_in(theirs)
            os._exit(0 if [each.level for each in found] == [Level.PROBLEM] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("below", ["", "deep", "deep/new"])
def test_a_directory_that_another_user_planted_is_a_problem(tmp_path: Path, below: str) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "kv" / "deep").mkdir(parents=True)
    os.chown(tmp_path / "kv", NOBODY, NOBODY)
    (found,) = found_in(str(tmp_path / "kv" / below))
    assert found.level is Level.PROBLEM
    assert f"from ssd_cache_dir: {tmp_path / 'kv'}: belongs to user {NOBODY}" in found.text


def test_a_measurement_writes_no_more_than_a_share_of_the_room(tmp_path: Path) -> None:
    """On a small file system of its own, in memory."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        watched: list[int] = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.is_set():
                status = os.statvfs(folder)
                watched.append((status.f_blocks - status.f_bfree) * status.f_frsize)

        thread = threading.Thread(target=watch)
        thread.start()
        written, read = measure(str(folder), 1.0)
        stop.set()
        thread.join()
        assert written > 0
        assert read > 0
        assert max(watched) <= (100 << 20) // 8
        (kind, *_) = check_directory(str(folder), 0, 0)
        assert kind.level is Level.ADVICE
        assert "memory" in kind.text
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_directories_on_one_drive_are_advised_against(tmp_path: Path) -> None:
    roots = [f"{tmp_path}/{name}" for name in ("a", "b")]
    (found,) = compare_directories(roots)
    assert (found.check, found.level) == ("disks", Level.ADVICE)
    assert found.text == f"{roots[0]} and {roots[1]} lie on one drive"
    assert list(compare_directories([str(tmp_path), "/dev/shm"])) == []
    assert list(compare_directories([str(tmp_path)])) == []


def test_a_size_below_one_block_is_a_problem(tmp_path: Path) -> None:
    (found,) = (
        each for each in check_directory(str(tmp_path), 1 << 20, 0) if each.level is Level.PROBLEM
    )
    assert "1.00 MiB wanted, less than one usual block of 2.00 MiB" in found.text


def test_folders_of_other_names_are_not_looked_at(tmp_path: Path) -> None:
    for name in ("models", "a" * 32 + ".removed-01"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "table").write_text("my thesis")
    (tmp_path / ("c" * 32)).write_text("a file")
    found = list(check_directory(str(tmp_path), 1 << 30, 0))
    assert [each.text for each in found if each.level is Level.PROBLEM] == [
        f"an engine of that model refuses it: {tmp_path}/{'c' * 32}: Not a directory"
    ]
