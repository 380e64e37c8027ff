# SPDX-License-Identifier: Apache-2.0
"""What `vllm.v1.kv_offload` calls FlexKV's media, and what it says of a request."""

from __future__ import annotations

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.kv_offload import base

from flexkv import LayoutError
from flexkv.types.changes import Medium
from flexkv_vllm.compat.events import MEDIA

EVENT_MEDIA = {medium: base.Medium(name) for medium, name in MEDIA.items()}
"""The names of media in offloading events."""


def may_load_from(context: base.ReqContext, medium: Medium) -> bool:
    """Whether the user allows loads from there for a request (`kv_load_tiers`)."""
    locality = base.Locality.REMOTE if medium.is_shared else base.Locality.LOCAL
    allowed: bool = context.load_tier_filter.allows(EVENT_MEDIA[medium], locality)
    return allowed


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
            "that does (0.31 to 0.33)"
        ) from None
