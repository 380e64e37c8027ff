# SPDX-License-Identifier: Apache-2.0
"""Refuses, at start and with one message, the features of SGLang that FlexKV cannot cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flexkv.errors import ConfigError, LayoutError

_ONE = ("pp_size", "nnodes", "attn_cp_size", "dcp_size")
"""SGLang's sizes of the kinds of parallelism that FlexKV does not support. With them, the ranks
that hold a token's pages do not go in step or are on several machines."""


def check_settings(settings: Any) -> None:
    """Refuse settings of SGLang with which FlexKV cannot cache pages.

    Args:
        settings: SGLang's settings.

    Raises:
        ConfigError: a setting is not allowed. The message names it, its value and the allowed one.
    """
    for name in _ONE:
        value = getattr(settings, name, 1)
        if value not in {None, 1}:
            raise ConfigError(f"SGLang's {name} is {value}; allowed with FlexKV: 1")
    for name in ("enable_hierarchical_cache", "enable_lmcache", "disable_radix_cache"):
        if getattr(settings, name, False):
            raise ConfigError(
                f"SGLang's {name} is set; allowed with FlexKV: SGLang's prefix cache on the device"
            )
    algorithm = getattr(settings, "dllm_algorithm", None)
    if algorithm:
        raise ConfigError(
            f"SGLang's dllm_algorithm is {algorithm!r}; allowed with FlexKV: none, because "
            f"diffusion models rewrite their pages"
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
    found = [name for name in drafts if getattr(params, name, ())]
    if found:
        raise LayoutError(
            f"speculative decoding keeps a draft model's KV ({', '.join(found)}) in pages of its "
            f"own; allowed: none, or a draft without KV, such as NGRAM"
        )
