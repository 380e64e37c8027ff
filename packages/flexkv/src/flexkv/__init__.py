# SPDX-License-Identifier: Apache-2.0
"""FlexKV keeps the KV cache of an LLM engine alive past GPU memory.

This is the core: no engine, no torch. These are the names for its users; adapters import what else
they need from its module.
"""

from __future__ import annotations

from flexkv.cache import KVCache
from flexkv.errors import (
    ArenaError,
    ConfigError,
    DiskError,
    EngineVersionError,
    FlexKVError,
    LayoutError,
)
from flexkv.layout import KVLayout, TensorView
from flexkv.mover import Mover
from flexkv.page_cache import PageCache
from flexkv.page_copies import PageCopy
from flexkv.settings import CacheConfig, load_config
from flexkv.standalone import open_cache
from flexkv.version import __version__

__all__ = [
    "ArenaError",
    "CacheConfig",
    "ConfigError",
    "DiskError",
    "EngineVersionError",
    "FlexKVError",
    "KVCache",
    "KVLayout",
    "LayoutError",
    "Mover",
    "PageCache",
    "PageCopy",
    "TensorView",
    "__version__",
    "load_config",
    "open_cache",
]
