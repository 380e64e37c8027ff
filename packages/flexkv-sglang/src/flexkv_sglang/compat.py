# SPDX-License-Identifier: Apache-2.0
"""Which SGLang is installed, and which of its names FlexKV uses.

An entry point imports this module, so it imports nothing of SGLang before it is called.
"""

from __future__ import annotations

import importlib
import pkgutil

from flexkv.engine.releases import Age, Releases
from flexkv.types.errors import EngineVersionError

LINKER = Releases("--enable-flexkv", (0, 5, 23), (0, 5, 23))
"""Releases with which the external linker was tested: the first and the newest."""

STORAGE = Releases("HiCache's storage backend", (0, 5, 20), None)
"""Releases whose HiCache includes the tenant in the keys of pages: 0.5.20 and all newer ones."""

RELEASES = (LINKER, STORAGE)

_CACHE = "sglang.srt.mem_cache"
_USED = {
    "sglang.srt.arg_groups.resolution_hooks": "register_resolution_hook",
    "sglang.srt.arg_groups.overrides": "declare_resolution resolving_view",
    "sglang.srt.arg_groups.model_override_base": "model_config_of",
    "sglang.srt.configs.model_config.ModelConfig": "from_server_args",
    "sglang.srt.constrained.grammar_manager.GrammarManager": """
        get_ready_grammar_requests has_waiting_grammars
    """,
    "sglang.srt.managers.io_struct": "ClearHiCacheReqOutput",
    "sglang.srt.managers.schedule_batch.Req": """
        _compute_max_prefix_len finished refresh_fill_ids
    """,
    "sglang.srt.managers.scheduler.Scheduler": "_add_request_to_queue",
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm": "from_string has_draft_kv",
    f"{_CACHE}.events.KVCacheEventRecorder": "enqueue",
    f"{_CACHE}.kv_cache_builder": "uses_ssm_state",
    f"{_CACHE}.radix_cache.RadixKey": "maybe_to_bigram_view",
    f"{_CACHE}.unified_cache.unified_cache_linker.UnifiedCacheLinker": """
        cancel_queued_load finish_layer_wise_loading load lookup num_completed_offloads offload
        pop_completed_offload start_layer_wise_loading
    """,
    f"{_CACHE}.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface": """
        build_external_linker_offload_transfers collect_path_info get_component_device_value
        get_hash_values get_last_hash_value get_prefix_hash_values match_full_device_prefix
        prefetch_anchor_info take_events
    """,
    f"{_CACHE}.unified_radix_cache.UnifiedRadixCache": "finish_external_linker_loads",
    f"{_CACHE}.utils": "get_storage_hash_str",
}
"""Names of SGLang that FlexKV calls, by module or class; `HOOKS` has those that it replaces."""


def sglang_version() -> str:
    """SGLang's own version string."""
    version: str = importlib.import_module("sglang").__version__
    return version


def check_version(allow_untested: bool, version: str) -> None:
    """Refuse an SGLang that is older than the tested releases, or newer and lacks a used name.
    Raises EngineVersionError if this SGLang is refused. The message names its version, the missing
    names, the tested releases, and the setting that skips this check."""
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
    """Names that FlexKV uses or replaces and the installed SGLang lacks."""
    from flexkv_sglang.hooks import HOOKS

    used = [f"{module}.{name}" for module, names in _USED.items() for name in names.split()]
    return [name for name in (*used, *HOOKS) if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError):
        return False
