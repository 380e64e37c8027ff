# SPDX-License-Identifier: Apache-2.0
"""The ways to give an engine a KV connector, as ``--kv-transfer-config`` dicts and environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULE_PATH = "flexkv_vllm.connector"
CONNECTOR = "FlexKVConnectorV1"


@dataclass(frozen=True, slots=True)
class Connector:
    """A KV connector of an engine.

    ``transfer_config`` is vLLM's KV transfer config, None for an engine without a connector.
    ``env`` is added to the environment of the engine. ``holds_blocks``: vLLM counts blocks that are
    being stored as in use.
    """

    name: str
    transfer_config: dict[str, Any] | None = None
    env: dict[str, str] = field(default_factory=dict)
    holds_blocks: bool = True


NONE = Connector("none")


def plugin(
    *,
    engine_id: str | None = None,
    recompute: bool = False,
    role: str = "kv_both",
    **extra: Any,
) -> Connector:
    """FlexKV as users start it: the plugin registers the connector under its name.

    ``extra`` becomes ``kv_connector_extra_config``; without an ``engine_id`` vLLM draws one.
    ``recompute`` has vLLM compute what a failed load did not bring, instead of failing the request.
    """
    config = _flexkv(extra) | {"kv_role": role}
    if recompute:
        config["kv_load_failure_policy"] = "recompute"
    if engine_id is not None:
        config["engine_id"] = engine_id
    return Connector("plugin", config)


def in_tree_shim(**extra: Any) -> Connector:
    """The same config with vLLM's plugins off: vLLM's own shim imports FlexKV."""
    return Connector("shim", _flexkv(extra), {"VLLM_PLUGINS": ""})


def module_path(**extra: Any) -> Connector:
    """FlexKV named by its module, plugins off so that nothing else can have registered it."""
    config = _flexkv(extra) | {"kv_connector_module_path": MODULE_PATH}
    return Connector("module_path", config, {"VLLM_PLUGINS": ""})


def slow_disk(
    read_mbps: float = 1e6, write_mbps: float = 1e6, held: Path | None = None, **extra: Any
) -> Connector:
    """FlexKV over a disk that reads and writes no faster than that, in megabytes per second, and
    writes nothing while the file ``held`` exists."""
    config = _flexkv(extra) | {"kv_connector_module_path": "integration.harness.slow_disk"}
    env = {
        "VLLM_PLUGINS": "",
        "SLOW_DISK_MBPS": str(read_mbps),
        "SLOW_DISK_WRITE_MBPS": str(write_mbps),
    }
    if held is not None:
        env["SLOW_DISK_HELD"] = str(held)
    return Connector("slow_disk", config, env)


def offloading(*, blocks_per_chunk: int, **extra: Any) -> Connector:
    """FlexKV's cache under vLLM's own OffloadingConnector, answers included."""
    return Connector(
        "offloading",
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "FlexKVOffloadingSpec",
                "spec_module_path": "flexkv_vllm.offloading",
                "blocks_per_chunk": blocks_per_chunk,
                "offload_prompt_only": False,
                **extra,
            },
        },
        holds_blocks=False,
    )


def native_offloading(gigabytes: float) -> Connector:
    """vLLM's OffloadingConnector with vLLM's own cache in so many GiB of host memory."""
    return Connector(
        "native_offloading",
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": int(gigabytes * (1 << 30))},
        },
        holds_blocks=False,
    )


def simple_offloading(gigabytes: float) -> Connector:
    """vLLM's SimpleCPUOffloadConnector with so many GiB of host memory."""
    return Connector(
        "simple_offloading",
        {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": int(gigabytes * (1 << 30))},
        },
        holds_blocks=False,
    )


def lmcache_server(port: int) -> Connector:
    """LMCache's server at a port of this machine."""
    return Connector(
        "lmcache_server",
        {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.port": port},
        },
        holds_blocks=False,
    )


def lmcache(gigabytes: float) -> Connector:
    """LMCache in the engine's processes, with so many GiB of host memory and no disk."""
    return Connector(
        "lmcache",
        {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{gigabytes:.3f}"},
        holds_blocks=False,
    )


def example(storage: Path, role: str = "kv_both") -> Connector:
    """vLLM's ExampleConnector, which keeps safetensors files under ``storage``.

    ``role`` is kv_producer or kv_consumer where one engine prefills for another.
    """
    return Connector(
        "example",
        {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(storage)},
        },
    )


def multi(*connectors: Connector, recompute: bool = False) -> Connector:
    """vLLM's MultiConnector: loads from the first of `connectors` that has a prefix, stores with
    all. The failure policy is vLLM's own, whatever theirs say."""
    config: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [each.transfer_config for each in connectors],
        },
    }
    if recompute:
        config["kv_load_failure_policy"] = "recompute"
    env = {name: value for each in connectors for name, value in each.env.items()}
    return Connector("+".join(each.name for each in connectors), config, env)


def _flexkv(extra: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
    if extra:
        config["kv_connector_extra_config"] = extra
    return config
