# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexkv.tiers.disk import open_disk_tier
from flexkv.tiers.disk.opening import RealPath, check_apart, places_of
from flexkv.types.errors import DiskError


@pytest.mark.parametrize(
    ("other", "how"),
    [
        ("link", "is the same directory as"),
        ("link/sub", "lies in"),
        ("kv/sub/deep", "lies in"),
        ("elsewhere/../kv", "is the same directory as"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_directories_that_are_one_or_in_each_other_are_refused(
    tmp_path: Path, other: str, how: str, turned: bool
) -> None:
    for name in ("kv", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    roots = [f"{tmp_path}/kv", f"{tmp_path}/{other}"]
    with pytest.raises(DiskError, match=f"{how} .*; allowed: directories apart"):
        open_disk_tier(roots[::-1] if turned else roots, "0" * 32, 4096, 1 << 20)
    assert not list((tmp_path / "kv").iterdir())


def test_directories_apart_are_allowed(tmp_path: Path) -> None:
    roots = [f"{tmp_path}/{name}" for name in ("kv", "kv2", "k")]
    check_apart(places_of(roots))
    with_mount = {"/data": RealPath("/data", 1), "/data/nvme1": RealPath("/data/nvme1", 2)}
    check_apart(with_mount)


def test_a_directory_that_will_be_created_has_the_device_of_the_one_above(tmp_path: Path) -> None:
    (place,) = places_of([f"{tmp_path}/a/b"]).values()
    assert place == (os.path.realpath(tmp_path) + "/a/b", tmp_path.stat().st_dev)
