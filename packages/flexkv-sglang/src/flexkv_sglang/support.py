# SPDX-License-Identifier: Apache-2.0
"""Refuses, at start and with one message, the features of SGLang that FlexKV cannot cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flexkv import CacheConfig
from flexkv.types.errors import ConfigError, LayoutError

_ONE = {
    "pp_size": "--pp-size (--pipeline-parallel-size)",
    "nnodes": "--nnodes",
    "attn_cp_size": "--attn-cp-size (--attention-context-parallel-size)",
    "dcp_size": "--dcp-size (--decode-context-parallel-size)",
}
"""SGLang's sizes of the kinds of parallelism that FlexKV does not support, by their names in
SGLang's settings: the flags. With them, the ranks that hold a token's pages do not go in step or
are on several machines."""

_OTHER_CACHES = {
    "enable_hierarchical_cache": "--enable-hierarchical-cache (--enable-hicache)",
    "enable_lmcache": "--enable-lmcache",
}
"""SGLang's settings for other caches behind its own, and their flags."""


def check_settings(settings: Any) -> None:
    """Refuse settings of SGLang with which FlexKV cannot cache pages.

    Args:
        settings: SGLang's settings.

    Raises:
        ConfigError: a setting is not allowed. The message names it, its value and the allowed one.
    """
    for name, flag in _ONE.items():
        value = getattr(settings, name, 1)
        if value not in {None, 1}:
            raise ConfigError(f"SGLang's {flag} is {value}; allowed with FlexKV: 1")
    _check_decode(settings)
    for name, flag in _OTHER_CACHES.items():
        if getattr(settings, name, False):
            raise ConfigError(
                f"SGLang's {flag} is set; allowed with FlexKV: SGLang's prefix cache on the device"
            )
    if getattr(settings, "disable_radix_cache", False):
        raise ConfigError(
            "SGLang's prefix cache is off, by --disable-radix-cache or by SGLang's choice for this "
            "model; allowed with FlexKV: SGLang's prefix cache on the device"
        )
    algorithm = getattr(settings, "dllm_algorithm", None)
    if algorithm:
        raise ConfigError(
            f"SGLang's --dllm-algorithm is {algorithm!r}; allowed with FlexKV: none, because "
            f"diffusion models rewrite their pages"
        )


def check_disk(settings: Any, config: CacheConfig) -> None:
    """Refuse data parallelism with a disk of which only the first engine could use the directory.

    Args:
        settings: SGLang's settings.
        config: FlexKV's settings.

    Raises:
        ConfigError: see above.
    """
    engines = getattr(settings, "dp_size", 1) or 1
    if engines > 1 and config.ssd_cache_gb and config.ssd_in_use == "error":
        raise ConfigError(
            f"SGLang's --dp-size (--data-parallel-size) is {engines} and ssd_in_use is 'error'; "
            f"allowed with a disk: ssd_in_use=own (FLEXKV_SSD_IN_USE), with which each of the "
            f"engines has a cache of ssd_cache_gb of its own"
        )


def _check_decode(settings: Any) -> None:
    """Refuse a decode server (PD disaggregation) that does without the linker: SGLang would start
    it, and nothing would be cached.

    Raises:
        ConfigError: see above.
    """
    if getattr(settings, "disaggregation_mode", "null") != "decode":
        return
    if not getattr(settings, "disaggregation_decode_enable_radix_cache", False):
        raise ConfigError(
            "SGLang's --disaggregation-mode is decode, which turns its prefix cache off; allowed "
            "with FlexKV: also --disaggregation-decode-enable-radix-cache"
        )
    if getattr(settings, "disaggregation_decode_retraction_backup", None) == "host_pool":
        raise ConfigError(
            "SGLang's --disaggregation-decode-retraction-backup is host_pool, which HiCache keeps; "
            "allowed with FlexKV: cpu_tensor, none"
        )


def check_cache(components: Iterable[Any], params: Any) -> None:
    """Refuse a model that keeps state outside the pages of one pool.

    Args:
        components: SGLang's components of the prefix cache, one for each kind of state.
        params: SGLang's parameters of the prefix cache.

    Raises:
        LayoutError: there is other state than that of full attention. The message names it.
    """
    others = sorted(each.name for each in components if each.name != "FULL")
    if others:
        windows = ", or --disable-hybrid-swa-memory of SGLang" if others == ["SWA"] else ""
        raise LayoutError(
            f"the model keeps {', '.join(others)} beside full attention; allowed: full attention "
            f"(MHA, MLA, DSA) in all layers{windows}"
        )
    drafts = ("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools")
    if any(getattr(params, name, ()) for name in drafts):
        raise LayoutError(
            "speculative decoding (--speculative-algorithm) keeps a draft model's KV in pages of "
            "its own; allowed: none, or a draft without KV, such as NGRAM"
        )
