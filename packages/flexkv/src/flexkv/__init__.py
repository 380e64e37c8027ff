# SPDX-License-Identifier: Apache-2.0
"""FlexKV keeps the KV cache of an LLM engine alive past GPU memory.

This is the core: no engine, no torch. An adapter describes the engine's pages (`KVLayout`), meets
the engine's other processes (`flexkv.session`), and asks the `KVCache` what to load and store.
"""

from __future__ import annotations

from flexkv.arena import Arena, ArenaSpec, plan_arena
from flexkv.cache import KVCache, Transfer
from flexkv.config import CacheConfig, configure_logging, load_config
from flexkv.counters import Counters
from flexkv.errors import (
    ArenaError,
    ConfigError,
    EngineVersionError,
    FlexKVError,
    LayoutError,
)
from flexkv.eviction import POLICIES, EvictionPolicy
from flexkv.layout import (
    BlockFormat,
    KVLayout,
    Plane,
    TensorView,
    choose_engine_blocks,
    fingerprint,
)
from flexkv.session import Session, Shard, attach, join, lead
from flexkv.transfer import Direction, Mover, Status

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "Arena",
    "ArenaError",
    "ArenaSpec",
    "BlockFormat",
    "CacheConfig",
    "ConfigError",
    "Counters",
    "Direction",
    "EngineVersionError",
    "EvictionPolicy",
    "FlexKVError",
    "KVCache",
    "KVLayout",
    "LayoutError",
    "Mover",
    "Plane",
    "Session",
    "Shard",
    "Status",
    "TensorView",
    "Transfer",
    "attach",
    "choose_engine_blocks",
    "configure_logging",
    "fingerprint",
    "join",
    "lead",
    "load_config",
    "plan_arena",
]
