# SPDX-License-Identifier: Apache-2.0
"""Reads FlexKV's settings and some facts of the engine from vLLM's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flexkv import CacheConfig, ConfigError, LayoutError, load_config
from flexkv.engine.choice.chooser import LoadMode
from flexkv.engine.scheduler.groups import Groups
from flexkv.engine.scheduler.options import ANNOUNCED, BOTH, PREFIX, OptionsReader, Role
from flexkv.engine.scheduler.spans import ContextOf, OtelSpans, make_spans
from flexkv.settings import configure_logging
from flexkv_vllm.compat.core import binds_pool, check_version
from flexkv_vllm.compat.patches import is_made_by_another
from flexkv_vllm.compat.steps import lists_used_blocks
from flexkv_vllm.support import (
    check_attention,
    check_late_loads,
    check_parallelism,
    check_pooling,
)

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from flexkv.engine.scheduler.engine import EngineRequest


def load_extra(extra: Mapping[str, object] | None) -> CacheConfig:
    """FlexKV's settings of all sources. `extra`: vLLM's `kv_connector_extra_config`. Raises
    ConfigError if a setting is not allowed."""
    return load_config(extra, "kv_connector_extra_config")


def read_settings(vllm_config: VllmConfig, connector: type) -> CacheConfig:
    """Read and check FlexKV's settings for this engine. Configures FlexKV's logging too.
    `connector`: FlexKV's class that vLLM, or its own connector, calls. Raises FlexKVError if a
    setting, vLLM's version or its parallel configuration is not allowed."""
    transfer = vllm_config.kv_transfer_config
    config = load_extra(transfer.kv_connector_extra_config if transfer else None)
    configure_logging(config)
    check_engine(config, connector)
    if config.enable:
        _role_of(vllm_config)
        check_parallelism(vllm_config)
        check_attention(vllm_config)
        check_pooling(vllm_config)
        check_late_loads(vllm_config)
    return config


def check_engine(config: CacheConfig, ours: type) -> None:
    """Check vLLM's version for FlexKV's class that vLLM calls, unless FlexKV is turned off."""
    if config.enable:
        check_version(config.allow_untested_engine, ours)


# How the engine loads.


def may_load_layerwise(extra_config: Mapping[str, object]) -> bool:
    """Whether the settings allow loads to run beside the forward pass that needs them. Raises
    ConfigError if a setting is not allowed."""
    return LoadMode(load_extra(extra_config).load_mode) is not LoadMode.ASYNC


def load_mode_of(
    config: CacheConfig, vllm_config: VllmConfig, groups: Groups, *, behind_shim: bool = False
) -> LoadMode:
    """The load mode of this engine: the setting's, or ASYNC if the model allows no other.
    `behind_shim`: whether vLLM's own connector calls FlexKV's. Raises ConfigError if the setting is
    not allowed in this engine."""
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
    if behind_shim:
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


def flush_seconds(vllm_config: VllmConfig) -> float:
    """Seconds for which waiting blocks are still written when the engine ends: half of vLLM's
    shutdown timeout. Running requests and the workers need the other half."""
    timeout: float = getattr(vllm_config, "shutdown_timeout", 0)
    return timeout / 2


def emits_events(vllm_config: VllmConfig) -> bool:
    """Whether the user has turned on KV events in vLLM."""
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def engine_id_of(vllm_config: VllmConfig) -> str:
    """The engine's id, which names its session. Raises LayoutError if vLLM's configuration has no
    id."""
    transfer = vllm_config.kv_transfer_config
    engine_id: str | None = None if transfer is None else transfer.engine_id
    if not engine_id:
        raise LayoutError("vLLM gave the connector no engine_id; allowed: any text")
    return engine_id


# What requests may, and what is said of them.


_ROLES = {
    "kv_both": BOTH,
    "kv_producer": Role(loads=False),
    "kv_consumer": Role(stores=False),
}


def _role_of(vllm_config: VllmConfig) -> Role:
    """What the engine does with blocks, by vLLM's `kv_role`; inside `MultiConnector`, FlexKV's own.
    Raises ConfigError if `kv_role` has another value."""
    transfer = vllm_config.kv_transfer_config
    name = "kv_both" if transfer is None else transfer.kv_role
    if name not in _ROLES:
        raise ConfigError(
            f"kv_role of --kv-transfer-config is {name!r}; allowed: {', '.join(_ROLES)}"
        )
    return _ROLES[name]


def options_of(config: CacheConfig, vllm_config: VllmConfig) -> OptionsReader:
    """What reads the options of this engine's requests."""
    return OptionsReader(config.request_options, role=_role_of(vllm_config))


def announces_prompts(vllm_config: VllmConfig) -> Callable[[Request], bool]:
    """Which requests compute a prompt for another engine: all of a `kv_producer`, and those that a
    router marks as vLLM's own P/D connectors want it. Their answers can say what is stored of it.

    None of them inside `MultiConnector`: vLLM ends if two connectors answer.
    """
    if is_made_by_another():
        return lambda _: False
    if not _role_of(vllm_config).loads:
        return lambda _: True

    def is_marked(request: Request) -> bool:
        params = getattr(request, "kv_transfer_params", None)
        return isinstance(params, Mapping) and params.get("do_remote_decode") is True

    return is_marked


def announcement_of(tokens: int) -> dict[str, object] | None:
    """What an answer says to the engine that decodes the request, if so many tokens of its prompt
    come to a shared store."""
    return {PREFIX + ANNOUNCED: tokens} if tokens else None


def request_spans_of(vllm_config: VllmConfig) -> OtelSpans | None:
    """What makes spans of requests, if vLLM does (`--otlp-traces-endpoint`)."""
    settings = getattr(vllm_config, "observability_config", None)
    traced = getattr(settings, "otlp_traces_endpoint", None) is not None
    return make_spans(by_headers) if traced else None


def by_headers() -> ContextOf:
    """See `ContextOf`: the trace that the request's headers name. Raises ImportError without
    OpenTelemetry."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()

    def context_of(request: EngineRequest) -> Context:
        headers = getattr(request, "trace_headers", None)
        return Context() if headers is None else propagator.extract(headers)

    return context_of
