# SPDX-License-Identifier: Apache-2.0
"""Published configurations of LMCache become settings of FlexKV that load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from flexkv.settings import CacheConfig, load_config
from flexkv.types.errors import ConfigError
from packages.flexkv.tests.cli import command
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
MOONCAKE_STORE = """
extra_config:
  local_hostname: "10.0.0.2"
  metadata_server: "P2PHANDSHAKE"
  protocol: "rdma"
  device_name: "mlx5_0"
  master_server_address: "10.0.0.1:50051"
  global_segment_size: 21474836480
"""
CHART = """
servingEngineSpec:
  modelSpec:
  - name: "llama"
    lmcacheConfig:
      enabled: true
      cpuOffloadingBufferSize: "30"
      diskOffloadingBufferSize: "0"
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
OFFLOADING_TO_A_FOLDER = """
kind: Deployment
spec:
  template:
    spec:
      containers:
      - name: modelserver
        command: ["/bin/bash", "-c"]
        args:
        - |
          exec vllm serve MODEL --tensor-parallel-size=2 --kv-transfer-config '{
            "kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{
            "spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":214748364800,"block_size":256,
            "secondary_tiers":[{"type":"fs_python","root_dir":"/mnt/files","n_read_threads":16}]}}'
"""
OFFLOADING = """
args:
- MODEL
- --kv-transfer-config
- '{"kv_connector":"OffloadingConnector",
  "kv_connector_extra_config":{"cpu_bytes_to_use":1610612736}}'
"""
SEVERAL = """
args:
- --kv-transfer-config
- '{"kv_connector":"MultiConnector","kv_role":"kv_producer",
  "kv_connector_extra_config":{"connectors":[
  {"kv_connector":"NixlConnector","kv_role":"kv_both"},
  {"kv_connector":"OffloadingConnector",
   "kv_connector_extra_config":{"num_cpu_blocks":9,"other":1}},
  {"kv_connector":"OffloadingConnector","kv_connector_extra_config":{
   "spec_name":"SharedStorageOffloadingSpec","shared_storage_path":"/mnt/kv/","threads_per_gpu":64}}]}}'
"""
SIZE = """
servingEngineSpec:
  modelSpec:
  - vllmConfig: {extraArgs: ["--kv-offloading-size", "12", "--kv-offloading-backend", "native"]}
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
                "# no equivalent: extra_config: unknown to this command (names: a)",
                "# not needed: chunk_size, controller_url",
            ],
        ),
        (
            CHART,
            [],
            [
                CacheConfig(cpu_cache_gb=30),
                CacheConfig(cpu_cache_gb=8),
            ],
            [
                "lmcacheConfig of llama",
                '"kv_role":"kv_producer"',
                "# no equivalent: enable_pd: MultiConnector with NixlConnector",
                "lmcacheConfig of mistral",
            ],
        ),
        (
            MANIFEST,
            ["--ranks", "2"],
            [CacheConfig(cpu_cache_gb=200)],
            ["variables; use by FLEXKV_CONFIG_PATH"],
        ),
        (
            OFFLOADING_TO_A_FOLDER,
            [],
            [CacheConfig(cpu_cache_gb=200, objects_url="file:///mnt/files")],
            ["vLLM's arguments", '"kv_role":"kv_both"', "# not needed: spec_name, block_size"],
        ),
        (OFFLOADING, ["--ranks", "4"], [CacheConfig(cpu_cache_gb=1.5)], []),
        (
            SEVERAL,
            [],
            [CacheConfig(objects_url="file:///mnt/kv/")],
            [
                '"kv_role":"kv_producer"',
                "# no equivalent: kv_connector: 'NixlConnector': MultiConnector with it beside",
                "# check: add cpu_cache_gb: num_cpu_blocks (9) counts blocks",
                "# no equivalent: other: unknown to this command (1)",
            ],
        ),
        (
            SIZE,
            [],
            [CacheConfig(cpu_cache_gb=12)],
            ["# check: remove --kv-offloading-size: it replaces FlexKV's connector"],
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


def test_a_file_that_the_environment_names_is_a_regular_one(
    flexkv: Flexkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", "/dev/zero")
    ended = flexkv("migrate", "env")
    assert ended.code == 2
    assert "cannot read /dev/zero: not a regular file; allowed: a YAML or JSON file" in ended.err


def test_standard_input_is_read_as_a_file_is(flexkv: Flexkv, tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(CHART)
    piped = command.run("migrate", "-", stdin=path.read_bytes())
    assert piped.code == 0
    of_file = flexkv("migrate", path).out
    assert of_file
    assert piped.out == of_file.replace(str(path), "standard input")


def test_a_mooncake_store_is_the_same_store(flexkv: Flexkv, tmp_path: Path) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text(MOONCAKE + MOONCAKE_STORE)
    ended = flexkv("migrate", path)
    assert load_config(yaml.safe_load(ended.out), environ={}) == CacheConfig(
        cpu_cache_gb=4.5,
        mooncake_master="10.0.0.1:50051",
        mooncake_metadata="P2PHANDSHAKE",
        mooncake_protocol="rdma",
        mooncake_device="mlx5_0",
        mooncake_segment_gb=20,
    )
    assert "extra_config" not in ended.out


def test_a_mooncake_store_of_a_file_of_its_own(
    flexkv: Flexkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text('{"metadata_server": "http://h:8080/metadata", "global_segment_size": "3GB"}')
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "mooncakestore://h:50051")
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    made = load_config(yaml.safe_load(flexkv("migrate", "env").out), environ={})
    assert (made.mooncake_master, made.mooncake_metadata) == ("h:50051", "http://h:8080/metadata")
    assert made.mooncake_segment_gb == 3


@pytest.mark.parametrize(
    ("text", "missing", "refusal"),
    [
        (MOONCAKE, "add mooncake_metadata", "mooncake_metadata is not set"),
        ("max_local_disk_size: 60", "add ssd_cache_dir", "ssd_cache_dir is not set"),
        ("local_disk: file://kv\nmax_local_disk_size: 1", "add ssd_cache_dir", "is not set"),
    ],
)
def test_what_is_missing_stops_the_start_and_is_no_made_up_place(
    flexkv: Flexkv, tmp_path: Path, *, text: str, missing: str, refusal: str
) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text("chunk_size: 256\n" + text)
    ended = flexkv("migrate", path)
    assert f"# check: {missing}" in ended.out
    with pytest.raises(ConfigError, match=refusal):
        load_config(yaml.safe_load(ended.out), environ={})


def test_each_engine_of_a_file_passes_the_checks_of_settings(
    flexkv: Flexkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As users run them: the printed text is the file of the settings."""
    path, made = tmp_path / "values.yaml", tmp_path / "flexkv.yaml"
    monkeypatch.setenv("FLEXKV_CONFIG_PATH", str(made))
    path.write_text(CHART)
    both = flexkv("migrate", path)
    assert "# Engine 2 of 2. For a file with this one: --only 2" in both.out
    texts = [CPU_AND_DISK, SHARED, MOONCAKE + MOONCAKE_STORE, MANIFEST]
    texts += [OFFLOADING_TO_A_FOLDER, OFFLOADING, SEVERAL, SIZE]
    for text, only in [
        *((text, 1) for text in texts),
        (path.read_text(), 1),
        (path.read_text(), 2),
    ]:
        path.write_text(text)
        ended = flexkv("migrate", path, "--only", only)
        assert "--only" not in ended.out
        made.write_text(ended.out)
        found = json.loads(flexkv("doctor", "--json", "--seconds", 0).out)
        (settings,) = [each for each in found if each["check"] == "settings"]
        assert settings["level"] == "ok", settings


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


def test_no_secret_is_printed(
    flexkv: Flexkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = '{"aws_secret_access_key": "hush"}'
    monkeypatch.setenv("LMCACHE_EXTRA_CONFIG", secret)
    path = tmp_path / "lmcache.yaml"
    path.write_text(f"local_cpu: true\nextra_config: {secret}\n")
    for source in ("env", path):
        ended = flexkv("migrate", source)
        assert ended.code == 0
        assert "no equivalent: extra_config: " in ended.out
        assert "hush" not in ended.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["env"], "env has no setting of LMCache; allowed: LMCache's file"),
        (["missing.yaml"], "cannot read missing.yaml: "),
        (["/dev/null", "--ranks", "0"], "--ranks is '0'"),
        (
            ["CHART", "--only", "3"],
            "--only is '3' on the command line; allowed: a whole number",
        ),
        (["/proc/self/environ"], "cannot read"),
        (["/dev/zero"], "cannot read /dev/zero: larger than 1048576 bytes; allowed: a YAML"),
    ],
)
def test_bad_use_is_one_clear_error(
    flexkv: Flexkv, tmp_path: Path, arguments: list[str], said: str
) -> None:
    chart = tmp_path / "values.yaml"
    chart.write_text(CHART)
    ended = flexkv("migrate", *(str(chart) if each == "CHART" else each for each in arguments))
    assert ended.code == 2
    assert said in ended.err
