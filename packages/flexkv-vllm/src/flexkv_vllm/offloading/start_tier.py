# SPDX-License-Identifier: Apache-2.0
"""Start of a tier below vLLM's own CPU memory. All checks run here and raise."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_offload.config import OffloadingConfig

from flexkv import CacheConfig, ConfigError, LayoutError, load_config
from flexkv.host.arena import ArenaSpec
from flexkv.layout import SLOT_ALIGNMENT, BlockFormat, fingerprint
from flexkv.open_tiers import open_tiers, policy_maker
from flexkv.session.wire import SessionInfo
from flexkv.settings import configure_logging
from flexkv.settings.without_effect import engines_settings, report_without_effect
from flexkv.tiers.base import AnyTier, QueriedTier
from flexkv_vllm.compat.core import check_version, warn_if_newer
from flexkv_vllm.compat.patches import config_of_maker
from flexkv_vllm.identity import model_identity, shares_blocks
from flexkv_vllm.offloading.start import is_durable

_NAME = "secondary_tiers"
_VLLMS = "vLLM keeps the blocks in host memory, and decides what is loaded"
_IGNORED = engines_settings(_VLLMS, but=("allow_untested_engine",)) | dict.fromkeys(
    (
        "cpu_cache_gb",
        "memory_grows",
        "mooncake_admission",
        "objects_admission",
        "pin_seconds",
        "service",
        "ssd_admission",
        "tenant_shares",
    ),
    _VLLMS,
)


def open_below(
    config: OffloadingConfig, settings: dict[str, Any], view: memoryview, tier: type
) -> list[AnyTier]:
    """Open the tiers that the settings name, for blocks of the size of vLLM's in its memory. Raises
    FlexKVError if a setting, vLLM's version or the model is not allowed; DiskError if a cache
    directory cannot be used.

    Args:
        settings: FlexKV's settings, as they stand in `secondary_tiers`.
        view: vLLM's memory, a row for each block; registered with the tiers.
        tier: FlexKV's class that vLLM calls.
    """
    ours = load_config(settings, _NAME)
    configure_logging(ours)
    check_version(ours.allow_untested_engine, tier)
    warn_if_newer()
    if not ours.enable:
        return []
    if not ours.names_lower_tier:
        raise ConfigError(
            f"FlexKVTier in {_NAME} has neither ssd_cache_gb nor mooncake_master nor objects_url; "
            f"allowed: at least one of them"
        )
    if ours.max_age_seconds is not None:
        raise ConfigError(
            f"max_age_seconds is {ours.max_age_seconds}, and vLLM keeps the blocks above "
            "FlexKVTier, of any age; allowed: without this setting, or FlexKVConnectorV1"
        )
    report_without_effect(ours, _IGNORED)
    parts, ours = _identity(config, ours, view)
    size = view.shape[1] if view.shape else 0
    if size % SLOT_ALIGNMENT:
        raise LayoutError(f"vLLM's blocks have {size} bytes; allowed: multiples of 4096")
    spec = ArenaSpec(BlockFormat(1, (size,)), len(view))
    tiers = open_tiers(
        ours,
        SessionInfo(fingerprint(parts), spec, True, tuple(parts)),
        policy_maker(ours, follows_requests=False),
    )
    memory = np.asarray(view)
    for each in tiers:
        if isinstance(each.tier, QueriedTier):
            each.tier.register(memory.ctypes.data, memory.nbytes)
    return [each.tier for each in tiers]


def _identity(
    config: OffloadingConfig, settings: CacheConfig, view: memoryview
) -> tuple[list[str], CacheConfig]:
    """All that the bytes of a block depend on but its key; and the settings, without shared stores
    if other engines have other keys. Raises LayoutError if the next process could not use the
    blocks."""
    vllm_config = config_of_maker()
    if vllm_config is None or not is_durable(vllm_config):
        raise LayoutError(
            "FlexKVTier cannot keep blocks of this engine for another process (see the warning "
            "above); allowed: weights in files, and no LoRA adapters"
        )
    if settings.names_shared_store and not shares_blocks(vllm_config):
        settings = settings.without_shared_stores()
    groups = [(each.tokens_per_block, each.layer_names) for each in config.groups]
    parts = [
        "connector: FlexKVTier",
        *model_identity(vllm_config),
        f"layout: {config.kv_cache_layout}, canonical {config.canonical_layout}",
        f"one copy of all ranks: {config.replicated_layout}",
        f"ranks: {config.parallel.world_size}, {config.parallel.tp_size} tensor-parallel",
        f"groups: {groups}",
        f"cache: {config.cache}",
        f"bytes: {view.strides}",
    ]
    return parts, settings
