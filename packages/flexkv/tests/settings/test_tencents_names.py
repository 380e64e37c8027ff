# SPDX-License-Identifier: Apache-2.0
"""Configurations that were written for Tencent's FlexKV."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flexkv.settings import CacheConfig, config_sources, configure_logging, load_config
from flexkv.settings.settings_file import CONFIG_PATH_VARIABLE
from flexkv.types.errors import ConfigError


@pytest.fixture(autouse=True)
def _said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_sources, "_logged", set())


def test_the_file_of_dynamos_guide_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "flexkv_config.yml"
    path.write_text(
        "cpu_cache_gb: 32\nssd_cache_gb: 1024\n"
        "ssd_cache_dir: /data/flexkv_ssd/\nenable_gds: false\n"
    )
    environ = {
        CONFIG_PATH_VARIABLE: str(path),
        "FLEXKV_SERVER_RECV_PORT": "ipc:///tmp/flexkv_server_0",
        "DYNAMO_USE_FLEXKV": "1",
    }
    for _ in range(2):
        config = load_config(environ=environ)
    assert config == CacheConfig(
        cpu_cache_gb=32, ssd_cache_gb=1024, ssd_cache_dir=("/data/flexkv_ssd/",)
    )
    assert caplog.messages == [
        "ignored, because they are off or tune Tencent's FlexKV only: FLEXKV_SERVER_RECV_PORT, "
        "enable_gds"
    ]
    # It is no variable of Kubernetes, though it looks like one.
    logging.getLogger("flexkv").addHandler(logging.NullHandler())
    configure_logging(config, environ)
    assert len(caplog.messages) == 1


def test_variables_of_its_own_guides_start() -> None:
    environ = {
        "FLEXKV_CPU_CACHE_GB": "32",
        "FLEXKV_SSD_CACHE_GB": "0",
        "FLEXKV_ENABLE_GDS": "0",
        "FLEXKV_INSTANCE_NUM": "1",
        "FLEXKV_TRANSFER_SMS_H2D": "8",
        "FLEXKV_IORING_FLAGS": "1",
        "FLEXKV_ENABLE_MPS": "1",
        "FLEXKV_ENABLE_METRICS": "1",
        "FLEXKV_PY_METRICS_PORT": "8080",
    }
    assert load_config(environ=environ) == CacheConfig(cpu_cache_gb=32)


@pytest.mark.parametrize("size", [0, 0.0, "0", "0.0"])
def test_a_disk_of_0_gib_is_off(size: object) -> None:
    extra = {"ssd_cache_gb": size, "ssd_cache_dir": "/nvme"}
    assert load_config(extra, environ={}) == CacheConfig()
    assert load_config({"ssd_cache_gb": size}, environ={}) == CacheConfig()
    environ = {"FLEXKV_SSD_CACHE_GB": "64", "FLEXKV_SSD_CACHE_DIR": "/nvme"}
    assert load_config({"ssd_cache_gb": size}, environ=environ) == CacheConfig()
    with pytest.raises(ConfigError, match="ssd_cache_gb is not set"):
        load_config({"ssd_cache_dir": "/nvme"}, environ={})
    with pytest.raises(ConfigError, match="0 for none, or a number from"):
        load_config({"ssd_cache_gb": False}, environ={})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("enable_gds", True, "True in load_config.*allowed: off. In its place: ssd_cache_gb"),
        ("enable_p2p_cpu", "1", "objects_url, or mooncake_master"),
        ("use_mooncake_store_backend", "yes", "mooncake_master and mooncake_metadata"),
        ("enable_trace", 1, "trace, the path of a file"),
        ("instance_num", 2, "instance_num is 2 .*allowed: 1. In its place: start each engine"),
        ("tokens_per_block", 16, "In its place: block_tokens"),
        ("server_client_mode", 1, "each engine has a cache of its own"),
    ],
)
def test_a_switch_that_is_on_is_refused_with_what_replaces_it(
    name: str, value: object, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config({name: value}, environ={})
    variable = f"FLEXKV_{name.upper()}"
    with pytest.raises(
        ConfigError, match=f"{name} is '{value}' in environment variable {variable}"
    ):
        load_config(environ={variable: str(value)})


def test_no_secret_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    load_config({"redis_password": "hidden", "enable_kv_sharing": False}, environ={})
    assert "redis_password" in caplog.text
    assert "hidden" not in caplog.text


def test_all_other_names_are_still_errors() -> None:
    for name in ("enable_gdsx", "ENABLE_GDS", "cpu_cach_gb"):
        with pytest.raises(ConfigError, match="unknown key"):
            load_config({name: 0}, environ={})
