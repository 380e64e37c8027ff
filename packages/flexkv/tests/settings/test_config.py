# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv.settings.config import CacheConfig, configure_logging, settings


def test_every_setting_is_documented() -> None:
    for setting in settings():
        assert {"env", "unit", "help", "parse", "allowed"} <= set(setting.metadata)


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


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The root of FlexKV's loggers, which is as it was afterwards."""
    logger = logging.getLogger("flexkv")
    before = logger.level, list(logger.handlers), logger.propagate
    logger.handlers.clear()
    yield logger
    logger.level, logger.handlers, logger.propagate = before


def test_log_levels_and_one_handler(logger: logging.Logger) -> None:
    configure_logging(CacheConfig())
    configure_logging(CacheConfig(log_level="WARNING"))
    assert len(logger.handlers) == 1
    assert not logger.propagate
    assert logger.isEnabledFor(logging.WARNING)
    assert not logger.isEnabledFor(logging.INFO)
    configure_logging(CacheConfig(log_level="OFF"))
    assert not logger.isEnabledFor(logging.CRITICAL)
