# SPDX-License-Identifier: Apache-2.0
"""Reads FlexKV's settings and some facts of the engine from vLLM's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from flexkv import CacheConfig, ConfigError, LayoutError, load_config
from flexkv.engine.scheduler.options import ANNOUNCED, BOTH, PREFIX, OptionsReader, Role
from flexkv.engine.scheduler.spans import OtelSpans, make_spans
from flexkv.settings import configure_logging
from flexkv.settings.without_effect import report_without_effect
from flexkv_vllm.compat.core import check_version
from flexkv_vllm.compat.patches import is_made_by_another
from flexkv_vllm.spans import by_headers
from flexkv_vllm.support import (
    check_attention,
    check_late_loads,
    check_parallelism,
    check_pooling,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def load_extra(extra: Mapping[str, object] | None) -> CacheConfig:
    """FlexKV's settings of all sources.

    Args:
        extra: vLLM's `kv_connector_extra_config`; None without one.

    Raises:
        ConfigError: a setting is not allowed.
    """
    return load_config(extra, "kv_connector_extra_config")


def read_settings(vllm_config: VllmConfig, connector: type) -> CacheConfig:
    """Read and check FlexKV's settings for this engine. Configures FlexKV's logging too.

    Args:
        vllm_config: vLLM's configuration.
        connector: FlexKV's class that vLLM, or its own connector, calls.

    Raises:
        FlexKVError: a setting, vLLM's version or its parallel configuration is not allowed.
    """
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


def report_ignored(config: CacheConfig) -> None:
    """Log the settings that are set and have no effect in this engine. For its scheduler."""
    report_without_effect(config)


_ROLES = {
    "kv_both": BOTH,
    "kv_producer": Role(loads=False),
    "kv_consumer": Role(stores=False),
}


def _role_of(vllm_config: VllmConfig) -> Role:
    """What the engine does with blocks, by vLLM's `kv_role`; inside `MultiConnector`, FlexKV's own.

    Raises:
        ConfigError: `kv_role` has another value.
    """
    transfer = vllm_config.kv_transfer_config
    name = "kv_both" if transfer is None else transfer.kv_role
    if name not in _ROLES:
        raise ConfigError(
            f"kv_role of --kv-transfer-config is {name!r}; allowed: {', '.join(_ROLES)}"
        )
    return _ROLES[name]


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


def request_spans_of(vllm_config: VllmConfig) -> OtelSpans | None:
    """What makes spans of requests, if vLLM does (`--otlp-traces-endpoint`)."""
    settings = getattr(vllm_config, "observability_config", None)
    traced = getattr(settings, "otlp_traces_endpoint", None) is not None
    return make_spans(by_headers) if traced else None


def announcement_of(tokens: int) -> dict[str, object] | None:
    """What an answer says to the engine that decodes the request, if so many tokens of its prompt
    come to a shared store."""
    return {PREFIX + ANNOUNCED: tokens} if tokens else None


def options_of(config: CacheConfig, vllm_config: VllmConfig) -> OptionsReader:
    """What reads the options of this engine's requests.

    Raises:
        ConfigError: see `_role_of`.
    """
    return OptionsReader(config.request_options, role=_role_of(vllm_config))


def check_engine(config: CacheConfig, connector: type) -> None:
    """Check vLLM's version, unless FlexKV is turned off; see `check_version`."""
    if config.enable:
        check_version(config.allow_untested_engine, connector, KVConnectorBase_V1)


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
    """The engine's id, which names its session.

    Raises:
        LayoutError: vLLM's configuration has no id.
    """
    transfer = vllm_config.kv_transfer_config
    engine_id: str | None = None if transfer is None else transfer.engine_id
    if not engine_id:
        raise LayoutError("vLLM gave the connector no engine_id; allowed: any text")
    return engine_id
