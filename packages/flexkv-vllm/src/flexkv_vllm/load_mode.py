# SPDX-License-Identifier: Apache-2.0
"""Chooses how loads run beside vLLM's steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexkv import CacheConfig, ConfigError
from flexkv.engine.choice.chooser import LoadMode
from flexkv.engine.scheduler.groups import Groups
from flexkv.engine.scheduler.storing import StoreTime
from flexkv_vllm.compat.core import binds_pool
from flexkv_vllm.compat.steps import lists_used_blocks
from flexkv_vllm.settings import load_extra

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def may_load_layerwise(extra_config: Mapping[str, object]) -> bool:
    """Whether the settings allow loads to run beside the forward pass that needs them.

    Args:
        extra_config: FlexKV's settings in vLLM's configuration.

    Raises:
        ConfigError: a setting is not allowed.
    """
    return LoadMode(load_extra(extra_config).load_mode) is not LoadMode.ASYNC


def load_mode_of(
    config: CacheConfig, vllm_config: VllmConfig, groups: Groups, store_time: StoreTime
) -> LoadMode:
    """The load mode of this engine: the setting's, or ASYNC if the model allows no other.

    Args:
        config: FlexKV's settings.
        vllm_config: vLLM's configuration.
        groups: groups of the model's layers.
        store_time: when this engine stores.

    Raises:
        ConfigError: the setting is not allowed in this engine.
    """
    mode = LoadMode(config.load_mode)
    if mode is LoadMode.ASYNC or not groups.plain:
        return LoadMode.ASYNC
    if vllm_config.scheduler_config.async_scheduling:
        # If a load fails, vLLM cannot discard what a step computed on it once the next step runs.
        raise ConfigError(
            f"load_mode is {config.load_mode!r}, but vLLM schedules steps before the last one has "
            f"ended; allowed: async, or with vLLM's --no-async-scheduling also layerwise and auto"
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        # As above: the first stage has begun the next step by then.
        raise ConfigError(
            f"load_mode is {config.load_mode!r}, but vLLM's --pipeline-parallel-size is {stages}: "
            f"steps begin before the last one has ended; allowed: async, or one stage"
        )
    if not binds_pool():
        raise ConfigError(
            f"load_mode is {config.load_mode!r}, but this vLLM does not let a connector discard "
            f"blocks after a failed load; allowed: async (with vLLM 0.22 or newer all modes)"
        )
    if store_time is StoreTime.FINISH:
        raise ConfigError(
            f"load_mode is {config.load_mode!r}, but vLLM's own connector, behind which FlexKV "
            f"runs, lets CUDA graphs skip its layers; allowed: async, or any mode with the plugin "
            f"'flexkv' (see VLLM_PLUGINS)"
        )
    return mode


def lists_all_blocks(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's description of a step lists all blocks that the step uses. Loads into other
    blocks need not follow the step."""
    # A draft model computes after the step, perhaps on blocks that vLLM does not list.
    return lists_used_blocks() and not vllm_config.speculative_config


def steps_behind(vllm_config: VllmConfig) -> int:
    """The number of steps before vLLM schedules a request whose asynchronous load was ordered.

    The worker reports the load with the step that ordered it. By then vLLM has begun the next step
    if it schedules ahead, and one step per stage if the model has several stages.
    """
    ahead = 2 if vllm_config.scheduler_config.async_scheduling else 1
    return max(ahead, int(vllm_config.parallel_config.pipeline_parallel_size))
