# SPDX-License-Identifier: Apache-2.0
"""FlexKV keeps the KV cache of an LLM engine alive past GPU memory.

This is the core: no engine, no torch. These are the names for its users; adapters import what else
they need from its module.
"""

from __future__ import annotations

from flexkv.cache import KVCache
from flexkv.layout import KVLayout, TensorView
from flexkv.library.open_cache import open_cache
from flexkv.library.page_cache import PageCache
from flexkv.library.page_copies import PageCopy
from flexkv.settings import CacheConfig, load_config
from flexkv.types.errors import (
    ArenaError,
    ConfigError,
    DiskError,
    EngineVersionError,
    FlexKVError,
    LayoutError,
)
from flexkv.types.mover import Mover
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
