# SPDX-License-Identifier: Apache-2.0
"""FlexKV's settings beside those of vLLM's `OffloadingConnector`."""

from __future__ import annotations

from collections.abc import Mapping

import vllm
from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.config import OffloadingConfig

from flexkv import CacheConfig, ConfigError, LayoutError
from flexkv.settings import configure_logging
from flexkv_vllm.compat.core import check_version, fails_by_request
from flexkv_vllm.settings import load_extra

_VLLMS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
    }
)
"""Keys of `kv_connector_extra_config` that vLLM reads itself."""


def read_settings(config: OffloadingConfig, manager: type) -> CacheConfig:
    """FlexKV's settings for this engine.

    Args:
        config: of the engine.
        manager: FlexKV's class that vLLM's connector calls.

    Raises:
        FlexKVError: a setting, vLLM's version or its parallel configuration is not allowed.
    """
    settings = load_settings(config.extra_config)
    configure_logging(settings)
    check_engine(settings, manager)
    if settings.enable:
        _check_parallelism(config)
        _check_groups(config)
        _check_blocks(config, settings)
    return settings


def check_engine(settings: CacheConfig, manager: type) -> None:
    """Check vLLM's version, unless FlexKV is turned off; see `check_version`."""
    if settings.enable:
        check_version(settings.allow_untested_engine, manager, OffloadingManager)


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


def _check_groups(config: OffloadingConfig) -> None:
    if len(config.groups) > 1 and not fails_by_request():
        # vLLM looks for the blocks of a failed load in the only group, and ends if there are more.
        raise LayoutError(
            f"the model has {len(config.groups)} KV cache groups, and vLLM {vllm.__version__} "
            f"cannot handle a failed load of several; allowed: 1 "
            f"(--disable-hybrid-kv-cache-manager, if the model supports it), or vLLM 0.30 or newer"
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
