# SPDX-License-Identifier: Apache-2.0
"""Which SGLang this is, and what FlexKV uses of it. Imports nothing of SGLang by itself: it is an
entry point."""

from __future__ import annotations

import importlib

from flexkv.adapter.releases import Age, Releases
from flexkv.errors import EngineVersionError

LINKER = Releases("--enable-flexkv", (0, 5, 23), (0, 5, 23))
"""Releases with which the external linker has run."""

STORAGE = Releases("HiCache's storage backend", (0, 5, 20), None)
"""Releases whose HiCache names the tenant in the keys of pages."""

RELEASES = (LINKER, STORAGE)

_USED = {
    "sglang.srt.arg_groups.resolution_hooks": ("register_resolution_hook",),
    "sglang.srt.arg_groups.overrides": ("declare_resolution", "resolving_view"),
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker": (
        "UnifiedCacheLinker.lookup",
        "UnifiedCacheLinker.load",
        "UnifiedCacheLinker.start_layer_wise_loading",
        "UnifiedCacheLinker.finish_layer_wise_loading",
        "UnifiedCacheLinker.cancel_queued_load",
        "UnifiedCacheLinker.offload",
        "UnifiedCacheLinker.num_completed_offloads",
        "UnifiedCacheLinker.pop_completed_offload",
        "UnifiedCacheLinkerWrapper._offload_node",
    ),
    "sglang.srt.managers.scheduler": ("Scheduler._get_new_batch_prefill_raw",),
    "sglang.srt.mem_cache.events": ("KVCacheEventRecorder.enqueue",),
    "sglang.srt.mem_cache.unified_radix_cache": ("UnifiedRadixCache.take_events",),
}
"""Names that FlexKV calls or replaces, by module."""


def sglang_version() -> str:
    """SGLang's own version string."""
    version: str = importlib.import_module("sglang").__version__
    return version


def check_version(allow_untested: bool, version: str) -> None:
    """Refuse an SGLang that is older than the supported range, or newer and lacks what FlexKV uses.

    Args:
        allow_untested: the setting `allow_untested_engine`.
        version: SGLang's own.

    Raises:
        EngineVersionError: names the version, what is missing, the range, and how to override.
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
        f"has all that FlexKV uses, or with allow_untested_engine=true "
        f"(FLEXKV_ALLOW_UNTESTED_ENGINE=1) any that has an external linker{lacks}"
    )


def missing_names() -> list[str]:
    """Names of SGLang that FlexKV uses and this one lacks."""
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
