# SPDX-License-Identifier: Apache-2.0
"""What of SGLang cannot be cached right; refused at start, with one message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flexkv.errors import ConfigError, LayoutError

_ONE = ("pp_size", "nnodes", "attn_cp_size", "dcp_size")
"""Ways to spread a model that FlexKV does not follow: pages of a token are then on several ranks
that do not go in step, or not on one machine."""


def check_settings(settings: Any) -> None:
    """Refuse settings of SGLang under which pages cannot be cached right.

    Raises:
        ConfigError: names the setting, its value and what is allowed.
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
            f"SGLang's dllm_algorithm is {algorithm!r}; allowed with FlexKV: none, since diffusion "
            f"models rewrite their pages"
        )


def check_cache(components: Iterable[Any], params: Any) -> None:
    """Refuse a model whose state is more than the pages of one pool.

    Raises:
        LayoutError: names what there is beside full attention.
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
