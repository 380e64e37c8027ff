# SPDX-License-Identifier: Apache-2.0
"""Published configurations of LMCache become settings of FlexKV that load."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flexkv.settings import CacheConfig, load_config
from packages.flexkv.tests.cli.stores import Flexkv

CPU_AND_DISK = """
chunk_size: 256
local_cpu: True
max_local_cpu_size: 20
local_disk: "file:///nvme/kv"
max_local_disk_size: 100
remote_serde: "naive"
use_layerwise: true
enable_blending: False
"""
SHARED = """
chunk_size: 256
local_cpu: false
remote_url: "lm://localhost:65432"
remote_serde: "cachegen"
enable_controller: True
controller_url: "localhost:9001"
extra_config: {a: 1}
"""
MOONCAKE = """
local_cpu: true
max_local_cpu_size: 4.5
remote_url: "mooncakestore://10.0.0.1:50051/"
"""
CHART = """
servingEngineSpec:
  modelSpec:
  - name: "llama"
    lmcacheConfig:
      enabled: true
      cpuOffloadingBufferSize: "30"
      diskOffloadingBufferSize: "60"
      enablePD: true
      kvRole: "kv_producer"
  - name: "mistral"
    lmcacheConfig:
      cpuOffloadingBufferSize: "8"
"""
MANIFEST = """
apiVersion: v1
kind: Service
---
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
      - name: vllm
        env:
        - {name: LMCACHE_MAX_LOCAL_CPU_SIZE, value: "100.0"}
        - {name: LMCACHE_LOCAL_CPU, value: "True"}
        - {name: PYTHONHASHSEED, value: "123"}
        - {name: TOKEN, valueFrom: {secretKeyRef: {name: a, key: b}}}
"""


@pytest.mark.parametrize(
    ("text", "arguments", "settings", "said"),
    [
        (
            CPU_AND_DISK,
            ["--ranks", "2"],
            [
                CacheConfig(
                    cpu_cache_gb=40,
                    ssd_cache_gb=200,
                    ssd_cache_dir=("/nvme/kv",),
                    load_mode="layerwise",
                )
            ],
            ["# not needed: chunk_size"],
        ),
        (
            SHARED,
            [],
            [CacheConfig()],
            [
                "# check: local_cpu is off",
                "# no equivalent: remote_url: 'lm://localhost:65432': objects_url",
                "# no equivalent: remote_serde: 'cachegen': blocks are not compressed",
                "# no equivalent: enable_controller: ",
                "# no equivalent: extra_config: unknown to this command ({'a': 1})",
                "# not needed: chunk_size, controller_url",
            ],
        ),
        (
            CHART,
            [],
            [
                CacheConfig(cpu_cache_gb=30, ssd_cache_gb=60, ssd_cache_dir=("/PATH",)),
                CacheConfig(cpu_cache_gb=8),
            ],
            [
                "lmcacheConfig of llama",
                '"kv_role":"kv_producer"',
                "# no equivalent: enable_pd: MultiConnector with NixlConnector",
                "# check: ssd_cache_dir must be an absolute path",
                "lmcacheConfig of mistral",
            ],
        ),
        (
            MANIFEST,
            ["--ranks", "2"],
            [CacheConfig(cpu_cache_gb=200)],
            ["variables; use by FLEXKV_CONFIG_PATH"],
        ),
    ],
)
def test_a_file_becomes_settings_that_load(
    flexkv: Flexkv,
    tmp_path: Path,
    *,
    text: str,
    arguments: list[str],
    settings: list[CacheConfig],
    said: list[str],
) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(text)
    ended = flexkv("migrate", path, *arguments)
    assert (ended.code, ended.err) == (0, "")
    made = list(yaml.safe_load_all(ended.out))
    assert [load_config(each, environ={}) for each in made] == settings
    assert [phrase for phrase in said if phrase not in ended.out] == []


def test_a_mooncake_store_keeps_its_master(flexkv: Flexkv, tmp_path: Path) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text(MOONCAKE)
    ended = flexkv("migrate", path)
    assert yaml.safe_load(ended.out) == {
        "cpu_cache_gb": 4.5,
        "mooncake_master": "10.0.0.1:50051",
        "mooncake_metadata": "http://HOST:8080/metadata",
    }
    assert "# check: mooncake_metadata, " in ended.out


@pytest.mark.parametrize(
    ("url", "ours"),
    [
        ("s3://bucket.s3.us-east-1.amazonaws.com", "s3://bucket"),
        ("fs://host:0/mnt/shared/kv/", "file:///mnt/shared/kv"),
        ("file:///mnt/kv", "file:///mnt/kv"),
    ],
)
def test_stores_that_have_an_equivalent(
    flexkv: Flexkv, tmp_path: Path, url: str, ours: str
) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text(f"remote_url: {url}\n")
    made = load_config(yaml.safe_load(flexkv("migrate", path).out), environ={})
    assert made.objects_url == ours
    assert made.cpu_cache_gb == 5


def test_variables_of_the_shell(
    flexkv: Flexkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "12")
    ended = flexkv("migrate", "env")
    assert yaml.safe_load(ended.out) == {"cpu_cache_gb": 12}
    path = tmp_path / "lmcache.json"
    path.write_text('{"max_local_cpu_size": 3}')
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    assert yaml.safe_load(flexkv("migrate", "env").out) == {"cpu_cache_gb": 3}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["env"], "env has no setting of LMCache; allowed: LMCache's file"),
        (["missing.yaml"], "cannot read missing.yaml: "),
        (["/dev/null", "--ranks", "0"], "--ranks is '0'"),
        (["/proc/self/environ"], "cannot read"),
    ],
)
def test_bad_use_is_one_clear_error(flexkv: Flexkv, arguments: list[str], said: str) -> None:
    ended = flexkv("migrate", *arguments)
    assert ended.code == 2
    assert said in ended.err
