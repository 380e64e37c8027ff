# SPDX-License-Identifier: Apache-2.0
"""The pools that SGLang hands to a linker, with the models that fill them."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.model_config import AttentionArch, ModelConfig

from flexkv_sglang.identity import draft_model
from flexkv_sglang.pages import NO_DRAFTS, DraftPools, Pages, describe_pages


def draft_of(server_args: Any, settings: Any, params: Any) -> Any:
    """SGLang's configuration of the draft model; None if no draft keeps KV."""
    if not _draft_pools(params):
        return None
    path, revision = draft_model(settings)
    return ModelConfig.from_server_args(
        server_args, model_path=path, model_revision=revision, is_draft_model=True
    )


def pages_of(pool: Any, params: Any, model: Any, draft: Any, ranks: int) -> Pages:
    """Describe the pages of the target's pools and of the draft's.

    Args:
        pool: of the target; recurrent states are in SGLang's pool of requests.
        ranks: number of ranks that share a page.

    Raises:
        LayoutError: FlexKV cannot cache one of the pools.
    """
    drafts = NO_DRAFTS if draft is None else DraftPools(_draft_pools(params), _heads_of(draft))
    return describe_pages(
        pool,
        params.page_size,
        heads=_heads_of(model),
        ranks=ranks,
        drafts=drafts,
        states=getattr(params.req_to_token_pool, "mamba_pool", None),
    )


def _draft_pools(params: Any) -> tuple[Any, ...]:
    return (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)


def _heads_of(model: Any) -> int:
    """KV heads of a model over all ranks; 1 with latent attention."""
    latent = model.attention_arch == AttentionArch.MLA
    return 1 if latent else int(model.get_total_num_kv_heads())
