# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv.system.regular_files import open_regular

NOBODY = 65534
OTHER = 12345

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@needs_root
def test_a_file_belongs_to_this_user_or_to_the_owner_of_its_folder(
    tmp_path: Path, folder: int
) -> None:
    file = tmp_path / "file"
    file.touch(0o666)
    os.chown(file, NOBODY, NOBODY)
    before = os.listdir("/proc/self/fd")
    for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT):
        with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}; remove it: 'file'"):
            open_regular(folder, "file", flags)
    assert os.listdir("/proc/self/fd") == before
    os.chown(tmp_path, NOBODY, NOBODY)
    os.close(open_regular(folder, "file", os.O_RDWR))
    os.chown(tmp_path, OTHER, OTHER)
    os.chown(file, 0, 0)
    os.close(open_regular(folder, "file", os.O_RDWR))


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_CREAT])
def test_a_file_with_a_second_name_is_read_but_not_written(
    tmp_path: Path, folder: int, flags: int
) -> None:
    (tmp_path / "file").write_text("my thesis")
    os.link(tmp_path / "file", tmp_path / "slab")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"has 2 names .*: 'slab'") as error:
        open_regular(folder, "slab", flags)
    assert error.value.errno == errno.EMLINK
    assert os.listdir("/proc/self/fd") == before
    os.close(open_regular(folder, "slab", os.O_RDONLY))
