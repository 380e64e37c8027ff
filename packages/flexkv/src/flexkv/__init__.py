# SPDX-License-Identifier: Apache-2.0
"""FlexKV keeps the KV cache of an LLM engine alive past GPU memory.

This is the core: no engine, no torch. An adapter describes the engine's pages (`KVLayout`), meets
the engine's other processes (`flexkv.host.session`), and asks the `KVCache` what to load and store.
"""

from __future__ import annotations

from flexkv.admission import ADMISSIONS, Admission
from flexkv.cache import KVCache, Presence
from flexkv.changes import Change, Medium
from flexkv.config import GIB, CacheConfig, configure_logging
from flexkv.config_sources import load_config, log_ignored_variables
from flexkv.counters import Counters
from flexkv.errors import (
    ArenaError,
    ConfigError,
    DiskError,
    EngineVersionError,
    FlexKVError,
    LayoutError,
)
from flexkv.eviction import POLICIES, EvictionPolicy
from flexkv.host.arena import Arena, ArenaSpec, plan_arena
from flexkv.host.numa import node_of_device
from flexkv.host.session import Session, Shard, attach, join, lead
from flexkv.layout import (
    BlockFormat,
    KVLayout,
    PlacedPlane,
    Plane,
    Sharding,
    TensorView,
    choose_engine_blocks,
    fingerprint,
    share_of,
)
from flexkv.mover import Direction, Mover, Status
from flexkv.tiers import LowerTier
from flexkv.tiers.disk import open_disk_tier
from flexkv.tiers.job import Priority
from flexkv.transfer.copies import Transfer
from flexkv.transfer.fetch import Fetch

__version__ = "0.1.0"

__all__ = [
    "ADMISSIONS",
    "GIB",
    "POLICIES",
    "Admission",
    "Arena",
    "ArenaError",
    "ArenaSpec",
    "BlockFormat",
    "CacheConfig",
    "Change",
    "ConfigError",
    "Counters",
    "Direction",
    "DiskError",
    "EngineVersionError",
    "EvictionPolicy",
    "Fetch",
    "FlexKVError",
    "KVCache",
    "KVLayout",
    "LayoutError",
    "LowerTier",
    "Medium",
    "Mover",
    "PlacedPlane",
    "Plane",
    "Presence",
    "Priority",
    "Session",
    "Shard",
    "Sharding",
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
    "log_ignored_variables",
    "node_of_device",
    "open_disk_tier",
    "plan_arena",
    "share_of",
]
