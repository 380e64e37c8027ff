# SPDX-License-Identifier: Apache-2.0
"""A server with SGLang's own host tier, and a storage backend below it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration.harness.checkpoint import ModelSpec
from integration.sglang.server import ServerConfig

PAGE_TOKENS = 16
BACKEND: dict[str, Any] = {
    "backend_name": "flexkv",
    "module_path": "flexkv_sglang.hicache.storage",
    "class_name": "FlexKVStorage",
    "interface_v1": 1,
    # Of SGLang: shorter prompts are not looked for in storage.
    "prefetch_threshold": 2 * PAGE_TOKENS,
}


def hicache_config(
    model: Path, spec: ModelSpec, settings: Mapping[str, Any], **flags: Any
) -> ServerConfig:
    """A server whose HiCache keeps pages by FlexKV.

    Args:
        settings: FlexKV's.
        flags: further arguments of SGLang, which win.
    """
    hicache = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        # The only ones that the shims have on CPUs.
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": BACKEND | dict(settings),
        "hicache_storage_prefetch_policy": "wait_complete",
        "enable_metrics": True,
        "enable_cache_report": True,
    }
    return ServerConfig(model, spec, page_size=PAGE_TOKENS, flags=hicache | flags)
