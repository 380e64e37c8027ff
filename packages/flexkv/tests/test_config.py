# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexkv import CacheConfig, ConfigError, load_config
from flexkv.config import settings


def test_defaults_need_no_source() -> None:
    assert load_config(environ={}) == CacheConfig()


def test_precedence_is_extra_then_file_then_environment(tmp_path: Path) -> None:
    path = tmp_path / "flexkv.yaml"
    path.write_text("cpu_cache_gb: 2\nblock_tokens: 64\n")
    environ = {
        "FLEXKV_CONFIG_PATH": str(path),
        "FLEXKV_CPU_CACHE_GB": "1",
        "FLEXKV_BLOCK_TOKENS": "32",
        "FLEXKV_COPY_THREADS": "3",
    }
    config = load_config({"cpu_cache_gb": 4}, environ=environ)
    assert (config.cpu_cache_gb, config.block_tokens, config.copy_threads) == (4, 64, 3)


@pytest.mark.parametrize("name", ["flexkv.json", "flexkv.yaml", "flexkv.yml"])
def test_files_may_be_json_or_yaml(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps({"cpu_cache_gb": 0.25, "eviction_policy": "LRU"}))
    config = load_config(environ={"FLEXKV_CONFIG_PATH": str(path)})
    assert (config.cpu_cache_gb, config.eviction_policy) == (0.25, "lru")


def test_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "flexkv.yaml"
    path.write_text("# nothing yet\n")
    assert load_config(environ={"FLEXKV_CONFIG_PATH": str(path)}) == CacheConfig()


@pytest.mark.parametrize(("text", "expected"), [("0", False), ("off", False), ("TRUE", True)])
def test_enable_flexkv(text: str, expected: bool) -> None:
    assert load_config(environ={"ENABLE_FLEXKV": text}).enable is expected


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ({"cpu_cach_gb": 1}, ["cpu_cach_gb", "kv_connector_extra_config", "'cpu_cache_gb'"]),
        ({"cpu_cache_gb": -1}, ["-1", "kv_connector_extra_config", "above 0"]),
        ({"cpu_cache_gb": "lots"}, ["'lots'", "kv_connector_extra_config", "above 0"]),
        ({"cpu_cache_gb": float("nan")}, ["nan", "above 0"]),
        ({"cpu_cache_gb": True}, ["True", "above 0"]),
        ({"block_tokens": 1.5}, ["1.5", "block_tokens", "whole number"]),
        ({"copy_threads": 0}, ["0", "copy_threads", "whole number"]),
        ({"eviction_policy": "lfu"}, ["'lfu'", "eviction_policy", "lru"]),
        ({"log_level": "loud"}, ["'loud'", "log_level", "INFO"]),
        ({"runtime_dir": "relative"}, ["'relative'", "runtime_dir", "absolute"]),
        ({"enable": "maybe"}, ["'maybe'", "enable", "true"]),
    ],
)
def test_bad_values_name_value_source_and_what_is_allowed(
    extra: dict[str, object], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(extra, environ={})
    message = str(caught.value)
    assert "allowed" in message
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_misspelt_environment_variable_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"FLEXKV_CPU_CACH_GB.*did you mean 'FLEXKV_CPU_CACHE_GB'"
    ):
        load_config(environ={"FLEXKV_CPU_CACH_GB": "1"})


def test_environment_errors_name_the_variable() -> None:
    with pytest.raises(ConfigError, match="'much' from environment variable FLEXKV_CPU_CACHE_GB"):
        load_config(environ={"FLEXKV_CPU_CACHE_GB": "much"})


@pytest.mark.parametrize("content", ["[1, 2]", "a: b: c", '"text"'])
def test_malformed_file_is_one_clear_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "flexkv.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config(environ={"FLEXKV_CONFIG_PATH": str(path)})
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"/no/such/file\.yaml from FLEXKV_CONFIG_PATH"):
        load_config(environ={"FLEXKV_CONFIG_PATH": "/no/such/file.yaml"})


def test_every_setting_is_documented() -> None:
    for setting in settings():
        assert {"env", "unit", "help", "parse", "allowed"} <= set(setting.metadata)
