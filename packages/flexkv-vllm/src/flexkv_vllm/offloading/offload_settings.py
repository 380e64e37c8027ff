# SPDX-License-Identifier: Apache-2.0
"""FlexKV's settings beside those of vLLM's `OffloadingConnector`, and what it refuses at start."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.config import OffloadingConfig

from flexkv import CacheConfig, ConfigError, LayoutError
from flexkv.settings import configure_logging
from flexkv_vllm.compat.core import check_version
from flexkv_vllm.compat.patches import is_made_by_another
from flexkv_vllm.offloading.manager import FlexKVOffloadingManager
from flexkv_vllm.settings import load_extra

_VLLMS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "sync_load_budget_bytes",
    }
)
"""Keys of `kv_connector_extra_config` that vLLM reads itself."""


def read_settings(config: OffloadingConfig) -> CacheConfig:
    """FlexKV's settings for this engine.

    Raises:
        FlexKVError: a setting, vLLM's version or its parallel configuration is not allowed.
    """
    settings = load_settings(config.extra_config)
    configure_logging(settings)
    check_engine(settings)
    if settings.enable:
        _check_parallelism(config)
        _check_blocks(config, settings)
        _check_alone()
    return settings


def check_engine(settings: CacheConfig) -> None:
    """Check vLLM's version, unless FlexKV is turned off; see `check_version`."""
    if settings.enable:
        check_version(settings.allow_untested_engine, FlexKVOffloadingManager, OffloadingManager)


def load_settings(extra_config: Mapping[str, object]) -> CacheConfig:
    """FlexKV's settings, some of them beside vLLM's own in `kv_connector_extra_config`.

    Raises:
        ConfigError: a setting is not allowed.
    """
    return load_extra({key: value for key, value in extra_config.items() if key not in _VLLMS})


def _check_parallelism(config: OffloadingConfig) -> None:
    parallel = config.parallel
    sizes = {
        "--pipeline-parallel-size": parallel.pp_size,
        "--decode-context-parallel-size": parallel.dcp_size,
        "--prefill-context-parallel-size": parallel.pcp_size,
    }
    for flag, size in sizes.items():
        if size != 1:
            raise LayoutError(
                f"vLLM's {flag} is {size}; allowed: 1 (--tensor-parallel-size is free)"
            )


def _check_blocks(config: OffloadingConfig, settings: CacheConfig) -> None:
    chunk = config.cache.blocks_per_chunk
    tokens = sorted({group.tokens_per_block * chunk for group in config.groups})
    if settings.block_tokens is not None and tokens != [settings.block_tokens]:
        raise ConfigError(
            f"block_tokens is {settings.block_tokens}, but the blocks of vLLM's "
            f"OffloadingConnector have {', '.join(map(str, tokens))} tokens; allowed: no "
            f"block_tokens, and block_size or blocks_per_chunk in kv_connector_extra_config"
        )
    if chunk > 1 and len(config.groups) > 1:
        # vLLM may free some of a chunk's blocks in a sliding window before it stores the others,
        # and later loads the chunk as if it were whole.
        raise ConfigError(
            f"blocks_per_chunk is {chunk} for a model with {len(config.groups)} KV cache groups; "
            f"allowed: 1"
        )


def _check_alone() -> None:
    """Beside another connector, whose loads may fail within a step, FlexKV would store what was
    computed on wrong bytes: vLLM does not report that to an offloading manager."""
    if is_made_by_another():
        raise ConfigError(
            "FlexKVOffloadingSpec is inside MultiConnector, where vLLM does not report to it which "
            "loads of other connectors failed; allowed: OffloadingConnector alone, or "
            "FlexKVConnectorV1 inside MultiConnector"
        )
