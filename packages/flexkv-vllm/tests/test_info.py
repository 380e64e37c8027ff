# SPDX-License-Identifier: Apache-2.0
"""Version and settings in the metrics."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from scraping import metrics, scrape

import flexkv
from flexkv import load_config
from flexkv.figures.exposition import INFO_LABELS, info_labels

_SECRET = "/mnt/customer-7"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_MIN_LOAD_TOKENS", "77")


def labels_of(**settings: object) -> dict[str, str]:
    registry = CollectorRegistry()
    metrics(registry, settings=settings)
    (found,) = (key for key in scrape(registry) if key[0] == "vllm:flexkv_info")
    return dict(found[1])


def test_settings_in_force_are_labels_whatever_their_source() -> None:
    labels = labels_of(cpu_cache_gb=2, ssd_cache_gb=0.5, ssd_cache_dir=_SECRET, always_load=True)
    assert labels.pop("engine") == "0"
    assert labels["version"] == flexkv.__version__
    assert labels["cpu_cache_gb"] == "2"
    assert labels["ssd_cache_gb"] == "0.5"
    assert labels["always_load"] == "true"
    assert labels["min_load_tokens"] == "77"
    assert labels["eviction_policy"] == "auto"
    assert set(labels) <= set(INFO_LABELS)


def test_no_path_is_shown() -> None:
    config = load_config({"ssd_cache_gb": 1, "ssd_cache_dir": _SECRET, "runtime_dir": _SECRET})
    assert _SECRET in config.ssd_cache_dir
    assert not any(_SECRET in value for value in info_labels(config))


def test_a_setting_without_a_value_is_empty() -> None:
    values = dict(zip(INFO_LABELS, info_labels(load_config({})), strict=True))
    assert values["cpu_cache_gb"] == values["copy_threads"] == ""
