# SPDX-License-Identifier: Apache-2.0
"""Each published configuration is translated, or refused in one sentence.

The texts have the settings of these files, and nothing else of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flexkv.settings import CacheConfig, load_config
from packages.flexkv.tests.cli.stores import Flexkv

TRANSLATED: dict[str, tuple[str, list[CacheConfig], list[str]]] = {
    "llm-d, tiered-prefix-cache, lmcache-connector/cpu": (
        """
        spec:
          template:
            spec:
              containers:
              - name: modelserver
                args: ["--kv-transfer-config", '{"kv_connector":"LMCacheConnectorV1"}']
                env:
                - {name: LMCACHE_MAX_LOCAL_CPU_SIZE, value: "100.0"}
                - {name: PYTHONHASHSEED, value: "123"}
                - {name: PROMETHEUS_MULTIPROC_DIR, value: /tmp/lmcache_prometheus}
        """,
        [CacheConfig(cpu_cache_gb=100)],
        ["cpu_cache_gb is for all ranks"],
    ),
    "production-stack, values-05-cpu-offloading": (
        """
        servingEngineSpec:
          modelSpec:
          - name: mistral
            lmcacheConfig: {enabled: true, cpuOffloadingBufferSize: "20"}
        """,
        [CacheConfig(cpu_cache_gb=20)],
        ["lmcacheConfig of mistral"],
    ),
    "production-stack, values-06-shared-storage": (
        """
        servingEngineSpec:
          modelSpec:
          - name: mistral
            lmcacheConfig: {enabled: true, cpuOffloadingBufferSize: "20", logLevel: DEBUG}
            env: []
        cacheserverSpec: {enabled: true, replicaCount: 1, serde: naive}
        routerSpec: {routingLogic: session, sessionKey: x-user-id}
        """,
        [CacheConfig(cpu_cache_gb=20)],
        ["no equivalent: remote_url: 'lm://cacheserverSpec': objects_url", "not needed: enabled"],
    ),
    "production-stack, values-16-disagg-prefill": (
        """
        servingEngineSpec:
          modelSpec:
          - name: llama-prefill
            lmcacheConfig:
              {enabled: true, kvRole: kv_producer, localCpu: true, maxLocalCpuSize: 5,
               maxLocalDiskSize: 0, enableNixl: true, enableXpyd: true, nixlRole: sender,
               nixlProxyHost: router, nixlProxyPort: 7500, nixlBufferSize: "1073741824",
               enablePD: true, rpcPort: producer1}
          - name: llama-decode
            lmcacheConfig:
              {enabled: true, kvRole: kv_consumer, localCpu: false, maxLocalCpuSize: 0,
               enableNixl: true, nixlRole: receiver, nixlPeerHost: 0.0.0.0, nixlBackends: [UCX],
               enablePD: true, rpcPort: consumer1, skipLastNTokens: 1}
        """,
        [CacheConfig(cpu_cache_gb=5), CacheConfig()],
        [
            '"kv_role":"kv_producer"',
            '"kv_role":"kv_consumer"',
            "no equivalent: enable_pd: MultiConnector with NixlConnector",
            "local_cpu is off",
            "nixl_backends, rpc_port, skip_last_n_tokens",
        ],
    ),
    "production-stack, values-17-kv-aware": (
        """
        servingEngineSpec:
          modelSpec:
          - name: llama1
            lmcacheConfig:
              {enabled: true, cpuOffloadingBufferSize: "60", enableController: true,
               instanceId: default1, controllerPort: 9000, workerPort: 8001,
               distributedUrl: "localhost:30081"}
            env: [{name: LMCACHE_LOG_LEVEL, value: DEBUG}]
        routerSpec: {routingLogic: kvaware, lmcacheControllerPort: 9000}
        """,
        [CacheConfig(cpu_cache_gb=60)],
        ["no equivalent: enable_controller: `flexkv stat`", "not needed: log_level, enabled"],
    ),
    "Mooncake, guide for LMCache": (
        """
        local_cpu: false
        remote_url: mooncakestore://localhost:50051/
        extra_config:
          {local_hostname: localhost, metadata_server: "http://localhost:8080/metadata",
           protocol: rdma, device_name: mlx5_0, master_server_address: "localhost:50051",
           global_segment_size: 3355443200}
        """,
        [
            CacheConfig(
                mooncake_master="localhost:50051",
                mooncake_metadata="http://localhost:8080/metadata",
                mooncake_protocol="rdma",
                mooncake_device="mlx5_0",
                mooncake_segment_gb=3.125,
            )
        ],
        ["local_cpu is off: FlexKV needs host memory"],
    ),
    "LMCache, examples, centralized_sharing": (
        """
        chunk_size: 256
        local_device: cpu
        remote_url: "lm://localhost:65432"
        remote_serde: cachegen
        pipelined_backend: false
        """,
        [CacheConfig(cpu_cache_gb=5)],
        ["remote_url: 'lm://localhost:65432'", "remote_serde: 'cachegen'", "pipelined_backend"],
    ),
    "LMCache, examples, p2p_sharing": (
        """
        chunk_size: 256
        local_cpu: true
        max_local_cpu_size: 5
        enable_async_loading: true
        enable_p2p: true
        p2p_host: localhost
        transfer_channel: nixl
        enable_controller: true
        lmcache_instance_id: lmcache_instance_1
        lmcache_worker_ports: 8500
        """,
        [CacheConfig(cpu_cache_gb=5)],
        ["no equivalent: enable_p2p: transfers from engine to engine", "p2p_host"],
    ),
    "LMCache, examples, s3": (
        """
        chunk_size: 256
        local_cpu: false
        max_local_cpu_size: 10
        save_unfull_chunk: false
        remote_url: "s3://bucket.s3express-use1-az4.us-east-1.amazonaws.com"
        remote_serde: naive
        blocking_timeout_secs: 100
        extra_config: {s3_region: us-east-1, aws_access_key_id: AKIA7, aws_secret_access_key: hush}
        """,
        [CacheConfig(objects_url="s3://bucket")],
        ["AWS_... variables", "extra_config: unknown to this command (names: s3_region, aws_acc"],
    ),
    "LMCache, examples, resp": (
        """
        chunk_size: 256
        local_cpu: false
        remote_url: "resp://localhost:6379"
        extra_config: {resp_num_threads: 8, username: default, password: hush}
        """,
        [CacheConfig()],
        ["no equivalent: remote_url: 'resp://localhost:6379': objects_url"],
    ),
    "LMCache, examples, 1p1d prefiller": (
        """
        local_cpu: false
        save_unfull_chunk: true
        enable_pd: true
        transfer_channel: nixl
        pd_role: sender
        pd_proxy_host: localhost
        nixl_backends: [UCX]
        """,
        [CacheConfig()],
        ["no equivalent: enable_pd: MultiConnector", "no equivalent: save_unfull_chunk: up to"],
    ),
    "LMCache, examples, blending": (
        """
        chunk_size: 256
        enable_blending: true
        use_layerwise: true
        local_cpu: true
        max_local_cpu_size: 5
        blend_special_str: " # # "
        """,
        [CacheConfig(cpu_cache_gb=5, load_mode="layerwise")],
        ["no equivalent: enable_blending: reuse of text that is no prefix"],
    ),
    "llm-d, tiered-prefix-cache, native/cpu_plus_fs": (
        """
        args: ["--kv-transfer-config", '{"kv_connector":"OffloadingConnector","kv_role":"kv_both",
          "kv_connector_extra_config":{"spec_name":"TieringOffloadingSpec"}}']
        """,
        [CacheConfig()],
        ["not needed: spec_name"],
    ),
    "vLLM, recipes, kv-offloading-size": (
        """
        args: ["--kv-offloading-size", "64", "--kv-offloading-backend", native]
        """,
        [CacheConfig(cpu_cache_gb=64)],
        ["remove --kv-offloading-size: it replaces FlexKV's connector"],
    ),
}

REFUSED = {
    "LMCache, examples, multi_process": """
        args: ["--kv-transfer-config", '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}']
        env: [{name: PYTHONHASHSEED, value: "0"}]
        """,
    "Dynamo, flexkv_config.yml": """
        cpu_cache_gb: 32
        ssd_cache_gb: 0
        ssd_cache_dir: /data/flexkv_ssd/
        enable_gds: false
        """,
}


@pytest.mark.parametrize("name", TRANSLATED)
def test_it_is_translated(flexkv: Flexkv, tmp_path: Path, name: str) -> None:
    text, settings, said = TRANSLATED[name]
    path = tmp_path / "published.yaml"
    path.write_text(text)
    ended = flexkv("migrate", path)
    assert (ended.code, ended.err) == (0, "")
    made = [load_config(each, environ={}) for each in yaml.safe_load_all(ended.out)]
    assert made == settings
    assert [phrase for phrase in said if phrase not in ended.out] == []
    assert "hush" not in ended.out


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_sentence(flexkv: Flexkv, tmp_path: Path, name: str) -> None:
    path = tmp_path / "published.yaml"
    path.write_text(REFUSED[name])
    ended = flexkv("migrate", path)
    assert (ended.code, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert f"{path} has no setting of LMCache; allowed: " in line


def test_dynamos_file_is_a_file_of_settings() -> None:
    given = yaml.safe_load(REFUSED["Dynamo, flexkv_config.yml"])
    assert load_config(given, environ={}).cpu_cache_gb == 32
