# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexkv import CacheConfig, KVLayout, TensorView, open_cache
from flexkv.settings import SETTINGS
from flexkv.settings.setting import ReadBy, Setting
from flexkv.settings.without_effect import (
    engines_settings,
    own_variables,
    report_without_effect,
    without_effect,
)
from packages.conftest import PATIENCE_SECONDS

LAYOUT = KVLayout.from_tensors([TensorView.of("a", np.zeros((2, 4096), np.int8))], 2)
OTHER: dict[str, Any] = {
    "ssd_admission": "on_evict",
    "ssd_in_use": "own",
    "ssd_other_models": "remove",
    "mooncake_protocol": "rdma",
    "mooncake_admission": "on_evict",
    "mooncake_device": "mlx5_0",
    "objects_admission": "on_evict",
}
"""A value that is not the default; for all others, a number is one."""
DEPENDENT = [each for each in SETTINGS.values() if each.acts_with]
STORES = {
    "ssd_cache_gb": {"ssd_cache_gb": 1.0, "ssd_cache_dir": ("/nvme",)},
    "mooncake_master": {"mooncake_master": "h:1", "mooncake_metadata": "http://h:2/metadata"},
    "objects_url": {"objects_url": "s3://bucket"},
    "trace": {"trace": "/trace"},
}


def changed(setting: Setting, **beside: Any) -> CacheConfig:
    return CacheConfig(**{setting.name: OTHER.get(setting.name, 7)}, **beside)


@pytest.mark.parametrize("setting", DEPENDENT, ids=lambda each: each.name)
def test_a_setting_without_the_one_that_it_acts_with_is_named(setting: Setting) -> None:
    (sentence,) = without_effect(changed(setting))
    assert sentence.startswith(f"{setting.name}: set, but without effect, because ")
    assert f"{setting.acts_with} is not set" in sentence
    assert without_effect(changed(setting, **STORES[setting.acts_with])) == []


def test_every_setting_of_a_tier_acts_with_the_one_that_names_the_tier() -> None:
    for setting in SETTINGS.values():
        tier = next(
            (t for t in ("ssd_", "mooncake_", "objects_") if setting.name[: len(t)] == t), ""
        )
        assert not tier or setting.acts_with or setting.needs or setting.name == "objects_url"


def test_settings_beside_a_service_are_named_in_one_sentence() -> None:
    config = CacheConfig(
        service="/run/node", cpu_cache_gb=4.0, pin_seconds=7, min_load_tokens=3, copy_threads=2
    )
    config = dataclasses.replace(config, **STORES["ssd_cache_gb"])
    (sentence,) = without_effect(config)
    assert sentence == (
        "cpu_cache_gb, ssd_cache_gb, ssd_cache_dir, pin_seconds: set, but without effect, because "
        "the service in '/run/node' has settings of its own: set it there"
    )
    assert without_effect(dataclasses.replace(config, service=None, pin_seconds=3600)) == []


def test_every_setting_of_the_cache_has_no_effect_beside_a_service() -> None:
    cache = {each.name for each in SETTINGS.values() if each.read_by is ReadBy.CACHE}
    assert {"cpu_cache_gb", "eviction_policy", "ssd_cache_dir", "objects_url"} <= cache
    assert not cache & {"service", "enable", "runtime_dir", "load_mode", "log_level"}


def test_a_time_of_pins_is_that_of_operators_too() -> None:
    assert without_effect(CacheConfig(pin_seconds=7)) == []


def test_defaults_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    report_without_effect(CacheConfig(), engines_settings("there is none"))
    report_without_effect(CacheConfig(service="/run/node"))
    assert not caplog.records


def test_own_variables_are_those_that_are_set_and_not_the_switch() -> None:
    environ = {
        "FLEXKV_TRACE": "/t",
        "FLEXKV_CPU_CACHE_GB": "1",
        "FLEXKV_SERVICE": "",
        "ENABLE_FLEXKV": "0",
        "HOME": "/root",
    }
    assert own_variables(environ) == "FLEXKV_CPU_CACHE_GB, FLEXKV_TRACE"
    assert len(own_variables({each.variable: "x" for each in SETTINGS.values()})) < 200


def test_a_program_names_settings_of_engines_once_for_each_cache(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = {
        "cpu_cache_gb": 0.001,
        "runtime_dir": str(tmp_path / "run"),
        "load_mode": "auto",
        "ssd_admission": "on_evict",
        "copy_threads": 1,
    }
    open_cache(settings, LAYOUT).close()
    said = [each for each in caplog.messages if "without effect" in each]
    assert said == [
        "ssd_admission: set, but without effect, because ssd_cache_gb is not set or is 0",
        "load_mode: set, but without effect, because there is no engine",
    ]


def test_a_service_names_settings_of_engines(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "FLEXKV" not in name}
    environment |= {
        "FLEXKV_SERVICE": str(tmp_path / "node"),
        "FLEXKV_RUNTIME_DIR": str(tmp_path / "run"),
        "FLEXKV_CPU_CACHE_GB": "0.01",
        "FLEXKV_LOAD_MODE": "auto",
        "FLEXKV_MOONCAKE_SEGMENT_GB": "2",
    }
    command = [sys.executable, "-m", "flexkv", "serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as service:
        try:
            assert service.stdout is not None
            assert "listens in" in service.stdout.readline()
            service.send_signal(signal.SIGTERM)
            _, errors = service.communicate(timeout=PATIENCE_SECONDS)
        finally:
            service.kill()
    assert errors.count("without effect") == 2
    assert "mooncake_segment_gb: set, but without effect, because mooncake_master is not" in errors
    assert "load_mode: set, but without effect, because a service runs no engine" in errors
