# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flexkv import CacheConfig, ConfigError, load_config


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


@pytest.mark.parametrize("given", ["/a/path", Path("/a/path"), ["/a/path"], (Path("/a/path"),)])
def test_a_folder_may_be_given_in_python_as_it_is_in_a_file(given: Any) -> None:
    config = CacheConfig(ssd_cache_gb="2", ssd_cache_dir=given)  # type: ignore[arg-type]
    assert (config.ssd_cache_gb, config.ssd_cache_dir) == (2.0, ("/a/path",))
    assert load_config({"ssd_cache_gb": 2, "ssd_cache_dir": given}, environ={}) == config


def test_a_path_object_is_one_folder() -> None:
    config = CacheConfig(ssd_cache_gb=1, ssd_cache_dir=Path("/a;/b"))  # type: ignore[arg-type]
    assert config.ssd_cache_dir == ("/a;/b",)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"ssd_cache_dir": "kv", "ssd_cache_gb": 1}, "'kv' from CacheConfig(ssd_cache_dir=...)"),
        ({"ssd_cache_dir": "~/kv", "ssd_cache_gb": 1}, "'~/kv' from"),
        ({"ssd_cache_dir": b"/a", "ssd_cache_gb": 1}, "b'/a' from"),
        ({"ssd_cache_dir": ("/a", "b"), "ssd_cache_gb": 1}, "('/a', 'b') from"),
        ({"ssd_cache_dir": "/a"}, "'/a' from CacheConfig(ssd_cache_dir=...), but ssd_cache_gb"),
        ({"cpu_cache_gb": -1}, "-1 from CacheConfig(cpu_cache_gb=...) is not a valid"),
        ({"enable": None}, "None from CacheConfig(enable=...)"),
        ({"log_level": "loud"}, "'loud' from"),
    ],
)
def test_a_program_gets_one_clear_error(given: dict[str, Any], shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CacheConfig(**given)
    assert shown in str(caught.value)
    assert "; allowed: " in str(caught.value)


def test_a_size_of_zero_turns_off_what_needs_it() -> None:
    assert CacheConfig(ssd_cache_gb=0, ssd_cache_dir="/a") == CacheConfig()  # type: ignore[arg-type]


def test_settings_without_shared_stores_are_allowed() -> None:
    config = CacheConfig(
        mooncake_master="h:1", mooncake_metadata="http://h:2/metadata", objects_url="s3://b"
    )
    assert config.without_shared_stores() == CacheConfig()
