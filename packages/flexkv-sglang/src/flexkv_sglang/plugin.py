# SPDX-License-Identifier: Apache-2.0
"""The `sglang.srt.plugins` entry point: SGLang calls `register` in each of its processes.

`--enable-flexkv` then loads the external linker of this package. SGLang's own code behind that flag
finds one tenant's prefixes for another, and returns wrong tokens when three requests of a batch
hit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flexkv import CacheConfig
from flexkv.preflight.checks import check_start
from flexkv.settings.without_effect import lmcaches_variables, own_variables
from flexkv.system.uncaught import print_without_traceback
from flexkv.types.errors import FlexKVError
from flexkv_sglang.compat import check_version, sglang_version
from flexkv_sglang.settings import LINKER_MODULE, linker_config, read_settings
from flexkv_sglang.support import check_model, check_settings

logger = logging.getLogger(__name__)

_FIRST = "handle_hicache_ratio_default"
"""The first step about caches, of those in which SGLang resolves its command line. The flags are
then as the user wrote them."""
_LAST = "handle_model_capability_adjustments"
"""The step after which SGLang changes none of what FlexKV reads."""
_FACTORY = "sglang.srt.mem_cache.registry.default_radix_cache_factory"

_CONFIGURATIONS = (
    "unified_cache_external_linker_config",
    "hicache_storage_backend_extra_config",
)
"""SGLang's settings by which FlexKV is used without `--enable-flexkv`."""


def register() -> None:
    """Replace SGLang's code behind `--enable-flexkv`. If this SGLang is too old, make it refuse the
    flag with one message instead."""
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    except ImportError:
        _refuse_later()
        return
    register_resolution_hook(_FIRST)(resolve)
    register_resolution_hook(_LAST)(check_resolved)


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Turn `--enable-flexkv` into the flags of the external linker. Checks all settings before
    SGLang loads weights, and before SGLang refuses flags that the user has not written. Logs
    settings of FlexKV where SGLang does not use it. `previous` is SGLang's own function for this
    step; called last. Raises FlexKVError if a setting or SGLang's version is not allowed. If nobody
    catches it, the process prints it as one line."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    settings = resolving_view(server_args)
    if settings.enable_flexkv:
        print_without_traceback(FlexKVError)
        made = linker_config(settings.flexkv_config_file)
        config = read_settings(made["linker_extra_config"])
        chosen: dict[str, Any] = {"enable_flexkv": False}
        if config.enable:
            _check(settings, config)
            theirs = lmcaches_variables()
            if theirs:
                logger.warning("%s", theirs)
            chosen |= {
                "enable_unified_cache_external_linker": True,
                "unified_cache_external_linker_backend": "dynamic",
                "unified_cache_external_linker_config": made,
            }
        declare_resolution(server_args, "flexkv_sglang", **chosen)
    elif _is_linked(settings):
        named = settings.unified_cache_external_linker_config
        _check(settings, read_settings(named.get("linker_extra_config") or {}))
    elif not any(_names_flexkv(settings, each) for each in _CONFIGURATIONS):
        _report_unused()
    previous(server_args)


def check_resolved(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse what SGLang has chosen for the model, before it loads weights. `previous` is SGLang's
    own function for this step; called first. Raises FlexKVError if FlexKV cannot cache the model
    with these settings."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view

    previous(server_args)
    settings = resolving_view(server_args)
    if _is_linked(settings):
        check_settings(settings)
        check_model(settings, model_config_of(server_args))


def _check(settings: Any, config: CacheConfig) -> None:
    check_version(config.allow_untested_engine, sglang_version())
    check_settings(settings)
    check_start(config)


def _is_linked(settings: Any) -> bool:
    """Whether SGLang's settings name FlexKV's linker."""
    named = settings.unified_cache_external_linker_config
    return (
        bool(settings.enable_unified_cache_external_linker)
        and settings.unified_cache_external_linker_backend == "dynamic"
        and isinstance(named, dict)
        and named.get("linker_module_path") == LINKER_MODULE
    )


def _names_flexkv(settings: Any, name: str) -> bool:
    return "flexkv" in str(getattr(settings, name, "")).lower()


def _report_unused() -> None:
    ours = own_variables()
    if ours:
        logger.warning(
            "%s: set, but without effect, because SGLang does not use FlexKV; to use it: "
            "--enable-flexkv",
            ours,
        )


def _refuse_later() -> None:
    """Refuse `--enable-flexkv` when SGLang makes its prefix cache. This SGLang is too old to load
    an external linker."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def refuse(original: Callable[..., Any], context: Any) -> Any:
        if getattr(context.server_args, "enable_flexkv", False):
            check_version(False, sglang_version())
        return original(context)

    HookRegistry.register(_FACTORY, refuse, HookType.AROUND)
