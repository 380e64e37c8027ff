# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from flexkv.settings.without_effect import without_effect
from flexkv.types.errors import ConfigError
from flexkv_sglang.hicache.backend_settings import IGNORED, read_settings

OF_SGLANG = {
    "backend_name": "flexkv",
    "module_path": "flexkv_sglang.hicache.storage",
    "class_name": "FlexKVStorage",
    "interface_v1": 1,
}


def test_further_keys_are_settings() -> None:
    extra = OF_SGLANG | {"ssd_cache_gb": 2, "ssd_cache_dir": "/a"}
    settings = read_settings(extra, {"FLEXKV_SSD_TIMEOUT_SECONDS": "3"})
    assert settings.ssd_cache_gb == 2
    assert settings.ssd_cache_dir == ("/a",)
    assert settings.ssd_timeout_seconds == 3


@pytest.mark.parametrize("value", [0, None])
def test_another_interface_is_refused(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"interface_v1 is .*storage-backend-extra-config.*allowed: 1"
    ):
        read_settings(OF_SGLANG | {"interface_v1": value}, {})


def test_an_unknown_key_is_named_with_its_source() -> None:
    with pytest.raises(
        ConfigError, match=r"'ssd_cach_gb'.*storage-backend-extra-config.*ssd_cache_gb"
    ):
        read_settings(OF_SGLANG | {"ssd_cach_gb": 2}, {})


def test_what_hicache_decides_is_named() -> None:
    settings = read_settings(OF_SGLANG | {"load_mode": "auto", "cpu_cache_gb": 2}, {})
    (sentence,) = without_effect(settings, IGNORED)
    assert sentence.startswith("load_mode: set, but without effect, because HiCache decides")
