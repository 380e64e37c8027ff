# SPDX-License-Identifier: Apache-2.0
"""The settings of one engine of a server, and those under HiCache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexkv import CacheConfig
from flexkv.settings.without_effect import without_effect
from flexkv.types.errors import ConfigError
from flexkv_sglang.settings import (
    IGNORED_UNDER_HICACHE,
    engines_of,
    read_storage_settings,
    share_of_engine,
)


@pytest.mark.parametrize(
    ("settings", "engines"),
    [
        ({"dp_size": 1, "attn_dp_size": 1}, 1),
        ({"dp_size": 2, "attn_dp_size": 1}, 2),
        ({"dp_size": 1, "attn_dp_size": 4}, 4),
        ({"dp_size": 2}, 2),
    ],
    ids=["one", "replicas", "DP attention", "replicas of an older SGLang"],
)
def test_a_server_has_an_engine_for_each_scheduler(settings: dict[str, int], engines: int) -> None:
    assert engines_of(SimpleNamespace(**settings)) == engines


def test_each_engine_of_a_server_has_an_equal_part_of_its_sizes() -> None:
    server = CacheConfig(
        cpu_cache_gb=64.0,
        ssd_cache_gb=500.0,
        ssd_cache_dir=("/nvme",),
        ssd_write_gb_per_day=1000.0,
        mooncake_segment_gb=4.0,
    )
    engine = share_of_engine(server, 4)
    assert (engine.cpu_cache_gb, engine.ssd_cache_gb) == (16.0, 125.0)
    assert (engine.ssd_write_gb_per_day, engine.mooncake_segment_gb) == (250.0, 1.0)
    assert (engine.ssd_in_use, engine.ssd_cache_dir) == ("error", ("/nvme",))
    assert share_of_engine(server, 1) == server


def test_sizes_that_are_not_given_stay_so() -> None:
    engine = share_of_engine(CacheConfig(), 4)
    assert engine.cpu_cache_gb is engine.ssd_cache_gb is engine.ssd_write_gb_per_day is None


OF_SGLANG = {
    "backend_name": "flexkv",
    "module_path": "flexkv_sglang.hicache.storage",
    "class_name": "FlexKVStorage",
    "interface_v1": 1,
}


def test_further_keys_for_hicache_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_SSD_TIMEOUT_SECONDS", "3")
    extra = OF_SGLANG | {"ssd_cache_gb": 2, "ssd_cache_dir": "/a"}
    settings = read_storage_settings(extra)
    assert settings.ssd_cache_gb == 2
    assert settings.ssd_cache_dir == ("/a",)
    assert settings.ssd_timeout_seconds == 3


@pytest.mark.parametrize("value", [0, None])
def test_another_interface_of_hicache_is_refused(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"interface_v1 is .*storage-backend-extra-config.*allowed: 1"
    ):
        read_storage_settings(OF_SGLANG | {"interface_v1": value})


def test_an_unknown_key_for_hicache_is_named_with_its_source() -> None:
    with pytest.raises(
        ConfigError, match=r"'ssd_cach_gb'.*storage-backend-extra-config.*ssd_cache_gb"
    ):
        read_storage_settings(OF_SGLANG | {"ssd_cach_gb": 2})


def test_what_hicache_decides_is_named() -> None:
    settings = read_storage_settings(OF_SGLANG | {"load_mode": "auto", "cpu_cache_gb": 2})
    (sentence,) = without_effect(settings, IGNORED_UNDER_HICACHE)
    assert sentence.startswith("load_mode: set, but without effect, because HiCache decides")
