# SPDX-License-Identifier: Apache-2.0
"""The differences between vLLM versions, from 0.26 on, in `vllm.v1.kv_offload`. This module looks
up features of the installed vLLM rather than infer them from its version."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.kv_offload import base

from flexkv import LayoutError
from flexkv.types.changes import Medium
from flexkv_vllm.compat.core import hit_source
from flexkv_vllm.compat.events import MEDIA

_medium = getattr(base, "Medium", None)  # since 0.27; plain text before

EVENT_MEDIA: dict[Medium, Any] = {
    medium: name if _medium is None else _medium(name) for medium, name in MEDIA.items()
}
"""The names of media in offloading events."""


def may_load_from(req_context: base.ReqContext, medium: Medium) -> bool:
    """Whether the user allows loads from there for a request (`kv_load_tiers`)."""
    tier_filter = getattr(req_context, "load_tier_filter", None)  # since 0.27
    if tier_filter is None:
        return True
    locality = base.Locality.REMOTE if medium.is_shared else base.Locality.LOCAL
    allowed: bool = tier_filter.allows(EVENT_MEDIA[medium], locality)
    return allowed


def load_source(medium: Medium = Medium.HOST) -> Any:
    """The name of a block's source in vLLM's statistics. vLLM asks for it from 0.32 on."""
    return hit_source(medium)


def worker_config() -> VllmConfig:
    """vLLM's configuration, in a worker during its setup; vLLM does not pass it to a spec.

    Raises:
        LayoutError: vLLM does not provide it.
    """
    try:
        return get_current_vllm_config()
    except AssertionError:
        raise LayoutError(
            "vLLM sets no current configuration while it registers KV caches; allowed: a version "
            "that does (0.26 to 0.32)"
        ) from None
