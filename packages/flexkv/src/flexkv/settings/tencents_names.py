# SPDX-License-Identifier: Apache-2.0
"""Names of settings of Tencent's FlexKV, whose connector and some variables have the same names.

Configurations that were written for it, such as those of Dynamo's guides, start this FlexKV too. A
name that only tunes the other program is ignored. So is a switch that is off. A switch that is on
is refused with the setting that replaces it, because its user counts on what it does.
"""

from __future__ import annotations

from collections.abc import Mapping

from flexkv.settings.setting import show
from flexkv.types.errors import ConfigError

_OFF = frozenset({"0", "0.0", "false", "no", "off", "none", "null", ""})
_SHARES = "objects_url, or mooncake_master with mooncake_metadata, shares blocks between nodes"
_SWITCHES: Mapping[str, str] = {
    "enable_gds": "ssd_cache_gb and ssd_cache_dir keep blocks on disk, by way of host memory",
    "enable_nixl": "MultiConnector with NixlConnector beside FlexKVConnectorV1",
    "enable_p2p_cpu": _SHARES,
    "enable_p2p_ssd": _SHARES,
    "enable_remote": _SHARES,
    "enable_3rd_remote": _SHARES,
    "enable_kv_sharing": _SHARES,
    "use_mooncake_store_backend": "mooncake_master and mooncake_metadata",
    "mooncake_store_config_path": "mooncake_master and mooncake_metadata",
    "radix_shmem": _SHARES,
    "enable_radixshmem": _SHARES,
    "server_client_mode": "each engine has a cache of its own; ssd_in_use=own lets several use a "
    "drive",
    "enable_trace": "trace, the path of a file",
    "enable_layerwise_transfer": "load_mode=layerwise",
    "kv_cache_dtype": "the engine's own option",
    "tokens_per_block": "block_tokens",
    "remote_cache_path": _SHARES,
    "gds_cache_dir": "ssd_cache_dir",
}
"""By name what replaces a switch that is on."""
_TUNING = (
    *("server_recv_port", "server_launch_mode", "instance_id", "enable_mps", "prefetch_enabled"),
    *("cpp_metrics_port", "py_metrics_port", "enable_cpu", "enable_ssd", "hugepage_size_bytes"),
    *("cpu_layout", "ssd_layout", "remote_layout", "gds_layout", "index_accel", "mla_d2h_mode"),
    *("cpu_layout_type", "ssd_layout_type", "remote_layout_type", "gds_layout_type"),
    *("iouring_entries", "iouring_flags", "ioring_entries", "ioring_flags", "max_file_size_gb"),
    *("evict_ratio", "evict_start_threshold", "hit_reward_seconds", "slru_protected_threshold"),
    *("trace_file_path", "trace_max_file_size_mb", "trace_max_files", "trace_flush_interval_ms"),
    *("lt_pool_initial_capacity", "refresh_batch_size", "rebuild_interval_ms", "idle_sleep_ms"),
    *("lease_ttl_ms", "safety_ttl_ms", "renew_lease_ms", "node_ttl_seconds", "nvcomp_batch_size"),
    *("redis_host", "redis_port", "redis_password", "local_ip", "local_zmq_ip", "local_zmq_port"),
    *("use_hugepage_cpu_buffer", "use_hugepage_tmp_buffer", "enable_metrics", "swa_multi_group"),
    *("layerwise_notify_mode", "enable_ce_memcpy2d", "num_extra_te_channels", "shm_radix_id"),
)
_TUNING_BEGINS = ("transfer_", "use_ce_transfer_", "ce_", "radix_", "mooncake_store_")


def is_ignored(name: str, value: object, source: str) -> bool:
    """Whether `name`, in lower case and without the prefix of variables, is a setting of Tencent's
    FlexKV that changes nothing here; False if it is no name of Tencent's. Raises ConfigError if it
    is a switch that is on."""
    if name == "instance_num":
        if str(value).strip() in ("0", "1"):
            return True
        raise _refused(name, value, source, "1", "start each engine with settings of its own")
    if name in _SWITCHES:
        if str(value).strip().lower() in _OFF:
            return True
        raise _refused(name, value, source, "off", _SWITCHES[name])
    return name in _TUNING or name.startswith(_TUNING_BEGINS)


def _refused(name: str, value: object, source: str, allowed: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{name} is {show(value)} in {source}, a setting of Tencent's FlexKV that this FlexKV does "
        f"not have; allowed: {allowed}. In its place: {instead}"
    )
