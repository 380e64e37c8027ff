# SPDX-License-Identifier: Apache-2.0
"""Which SGLang is installed, and which of its names FlexKV uses.

An entry point imports this module, so it imports nothing of SGLang before it is called.
"""

from __future__ import annotations

import importlib

from flexkv.engine.releases import Age, Releases
from flexkv.types.errors import EngineVersionError

LINKER = Releases("--enable-flexkv", (0, 5, 23), (0, 5, 23))
"""Releases with which the external linker was tested: the first and the newest."""

STORAGE = Releases("HiCache's storage backend", (0, 5, 20), None)
"""Releases whose HiCache includes the tenant in the keys of pages: 0.5.20 and all newer ones."""

RELEASES = (LINKER, STORAGE)

_USED = {
    "sglang.srt.arg_groups.resolution_hooks": ("register_resolution_hook",),
    "sglang.srt.arg_groups.overrides": ("declare_resolution", "resolving_view"),
    "sglang.srt.arg_groups.model_override_base": ("model_config_of",),
    "sglang.srt.configs.model_config": ("ModelConfig.from_server_args",),
    "sglang.srt.mem_cache.kv_cache_builder": ("uses_ssm_state",),
    "sglang.srt.speculative.spec_info": (
        "SpeculativeAlgorithm.from_string",
        "SpeculativeAlgorithm.has_draft_kv",
    ),
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker": (
        "UnifiedCacheLinker.lookup",
        "UnifiedCacheLinker.load",
        "UnifiedCacheLinker.start_layer_wise_loading",
        "UnifiedCacheLinker.finish_layer_wise_loading",
        "UnifiedCacheLinker.cancel_queued_load",
        "UnifiedCacheLinker.offload",
        "UnifiedCacheLinker.num_completed_offloads",
        "UnifiedCacheLinker.pop_completed_offload",
        "UnifiedCacheLinkerWrapper.offload_nodes",
        "UnifiedCacheLinkerWrapper._offload_node",
        "UnifiedCacheLinkerWrapper._sync_restorable_prefix",
        "UnifiedCacheLinkerWrapper.finish_loads",
        "UnifiedCacheLinkerWrapper.load_back",
        "UnifiedCacheLinkerWrapper.match",
    ),
    "sglang.srt.constrained.grammar_manager": (
        "GrammarManager.get_ready_grammar_requests",
        "GrammarManager.has_waiting_grammars",
    ),
    "sglang.srt.disaggregation.decode": (
        "SchedulerDisaggregationDecodeMixin.process_decode_queue",
    ),
    "sglang.srt.managers.io_struct": ("ClearHiCacheReqOutput",),
    "sglang.srt.managers.schedule_batch": (
        "Req.finished",
        "Req.refresh_fill_ids",
        "Req._compute_max_prefix_len",
    ),
    "sglang.srt.mem_cache.radix_cache": ("RadixKey.maybe_to_bigram_view",),
    "sglang.srt.mem_cache.utils": ("get_storage_hash_str",),
    "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface": (
        "UnifiedTreeCoreInterface.build_external_linker_offload_transfers",
        "UnifiedTreeCoreInterface.get_component_device_value",
        "UnifiedTreeCoreInterface.get_hash_values",
        "UnifiedTreeCoreInterface.get_prefix_hash_values",
        "UnifiedTreeCoreInterface.match_full_device_prefix",
        "UnifiedTreeCoreInterface.take_events",
    ),
    "sglang.srt.managers.scheduler": (
        "Scheduler._add_request_to_queue",
        "Scheduler._get_new_batch_prefill_raw",
        "Scheduler.clear_hicache_storage_wrapped",
    ),
    "sglang.srt.managers.scheduler_pp_mixin": ("SchedulerPPMixin._pp_process_batch_result",),
    "sglang.srt.mem_cache.events": ("KVCacheEventRecorder.enqueue",),
    "sglang.srt.mem_cache.unified_radix_cache": (
        "UnifiedRadixCache.check_hicache_events",
        "UnifiedRadixCache.finish_external_linker_loads",
        "UnifiedRadixCache.take_events",
    ),
    "sglang.srt.managers.scheduler_components.weight_updater": (
        "SchedulerWeightUpdaterManager.release_memory_occupation",
    ),
    "sglang.utils": ("TypeBasedDispatcher.__call__",),
}
"""Names of SGLang that FlexKV calls or replaces, by module."""


def sglang_version() -> str:
    """SGLang's own version string."""
    version: str = importlib.import_module("sglang").__version__
    return version


def check_version(allow_untested: bool, version: str) -> None:
    """Refuse an SGLang that is older than the tested releases, or newer and lacks a used name.

    Raises:
        EngineVersionError: this SGLang is refused. The message names its version, the missing
            names, the tested releases, and the setting that skips this check.
    """
    age = LINKER.age(version)
    if allow_untested or age is Age.TESTED:
        return
    missing = missing_names() if age is Age.NEWER else []
    if age is Age.NEWER and not missing:
        return
    lacks = f"; it lacks {', '.join(missing)}" if missing else ""
    raise EngineVersionError(
        f"SGLang {version} is installed; allowed with {LINKER.runs}: {LINKER}, a newer one that "
        f"has every name FlexKV uses, or with allow_untested_engine=true "
        f"(FLEXKV_ALLOW_UNTESTED_ENGINE=1) any that has an external linker{lacks}"
    )


def missing_names() -> list[str]:
    """Names that FlexKV uses and the installed SGLang lacks."""
    missing = []
    for module, names in _USED.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            missing.append(module)
            continue
        for name in names:
            holder: object = found
            for part in name.split("."):
                holder = getattr(holder, part, None)
            if holder is None:
                missing.append(f"{module}.{name}")
    return missing
