# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from flexkv import CacheConfig, ConfigError
from flexkv.operators.engine_door import LocalHttp, local_http

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a token and a line's end."""
    made = tmp_path / "token"
    made.write_text(TOKEN + "\n")
    made.chmod(0o600)
    return made


def of(file: Path | None, port: int | None = 8100) -> LocalHttp | None:
    config = CacheConfig(control_port=port, control_token_file=None if file is None else str(file))
    return local_http(config)


def test_a_port_needs_a_token(file: Path) -> None:
    assert of(file, None) is None
    assert of(file) == LocalHttp(8100, TOKEN)
    with pytest.raises(ConfigError, match="control_token_file is not set"):
        of(None)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_token_that_others_may_read_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:o}, and others may read it"):
        of(file)


@pytest.mark.parametrize("text", ["", "short", "x" * 513, "0123456789abcdef 0123", "\u00e9" * 20])
def test_what_is_no_token_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"(has no such token|is no text); allowed: a file of"):
        of(file)


def test_what_is_no_file_is_refused(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    for each in (link, tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"control_token_file '.*' "):
            of(each)
