# SPDX-License-Identifier: Apache-2.0
"""Which blocks of shared stores `flexkv clear` chooses, as far as no store is asked."""

from __future__ import annotations

import pytest

from flexkv.cli.clear import shared_blocks
from flexkv.settings import CacheConfig
from flexkv.types.errors import ConfigError

FINGERPRINT = "fe" * 16
CONFIG = CacheConfig(mooncake_master="127.0.0.1:9", mooncake_metadata="http://127.0.0.1:9/metadata")


def test_the_fingerprints_of_mooncake_are_those_of_the_folders(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = [f"/kv/{FINGERPRINT}", f"/kv/{FINGERPRINT}-1", "/kv/a folder that was renamed"]
    found = shared_blocks(CONFIG, None, lambda: folders)
    assert [(each.store, each.fingerprint) for each in found] == [
        (CONFIG.mooncake_master, FINGERPRINT)
    ]
    assert "those of removed cache directories are left out" in capsys.readouterr().err


def test_folders_that_were_renamed_name_no_fingerprint() -> None:
    with pytest.raises(ConfigError, match="NAME is 'all' on the command line, and mooncake "):
        shared_blocks(CONFIG, None, lambda: ["/kv/a folder that was renamed"])
