# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexkv.settings import CacheConfig


@pytest.mark.parametrize(
    ("mode", "owner", "private"),
    [(0o700, None, True), (0o750, None, False), (0o700, 65534, False), (None, None, False)],
)
def test_the_users_own_runtime_directory_is_the_default(
    mode: int | None,
    owner: int | None,
    private: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    users = tmp_path / "user"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(users))
    if mode is not None:
        users.mkdir()
        users.chmod(mode)
    if owner is not None:
        if os.geteuid() != 0:
            pytest.skip("only root can make a directory of another user")
        os.chown(users, owner, owner)
    root = CacheConfig().session_root
    assert (root == f"{users}/flexkv") is private
    assert private or root.endswith(f"/flexkv-{os.geteuid()}")


def test_a_link_to_a_private_directory_is_not_the_users_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "user")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "link"))
    assert CacheConfig().session_root.endswith(f"/flexkv-{os.geteuid()}")
