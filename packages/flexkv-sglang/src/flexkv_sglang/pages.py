# SPDX-License-Identifier: Apache-2.0
"""The layout of SGLang's KV pools, and the part of a page that each rank holds.

The pools of a draft model have the page numbers of the target's pool, so their tensors are further
tensors of the same pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexkv.layout import KVLayout, Sharding, TensorView
from flexkv.types.errors import LayoutError

_INDEXER = "index_k_with_scale_buffer"
"""Attribute of SGLang's pools for sparse attention (DSA): the indexer's keys, one row a page."""
_TOKEN_ROWS = "nhd"
_HEAD_DIM = {"nhd": 2, "paged_nhd": 2, "hnd": 1}
"""The dimension of KV heads, by SGLang's name of the order. Dimension 0 counts pages."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of one rank.

    Attributes:
        layout: where the pages are; its layers have SGLang's numbers on this rank, from 0.
        sharding: how ranks share a block.
        tensors: SGLang's tensors by name, dimension 0 counting pages; SGLang keeps them alive.
        traits: dtypes, which the layout's geometry leaves out.
    """

    layout: KVLayout
    sharding: Sharding
    tensors: Mapping[str, torch.Tensor]
    traits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DraftPools:
    """The KV pools of a draft model.

    Attributes:
        pools: SGLang's pools, one for each layer of a packed MTP, in SGLang's order; borrowed.
        heads: KV heads of the draft over all ranks; 1 with latent attention.
    """

    pools: Sequence[Any] = ()
    heads: int = 0


NO_DRAFTS = DraftPools()


def describe_pages(
    pool: Any, page_size: int, *, heads: int, ranks: int, drafts: DraftPools = NO_DRAFTS
) -> Pages:
    """Describe the pages of SGLang's KV pool, split by head if possible.

    Args:
        pool: the pool whose slots SGLang's allocator gives out; borrowed.
        page_size: tokens of a page.
        heads: KV heads of the model over all ranks; 1 with latent attention (MLA), where every
            rank holds the same bytes.
        ranks: number of ranks that share a page.
        drafts: pools of the draft model, whose tensors belong to the last layer: the draft runs
            after SGLang has waited for that layer.

    Raises:
        LayoutError: FlexKV cannot cache one of the pools.
    """
    pages = pool.size // page_size + 1  # page 0 is padding
    first = int(getattr(pool, "start_layer", 0) or 0)
    described = [
        (layer - first, *rest) for layer, *rest in _tensors(pool, _infos(pool), pages, page_size)
    ]
    last = max(layer for layer, *_ in described)
    for number, draft in enumerate(drafts.pools):
        if (draft.size, draft.page_size) != (pool.size, page_size):
            raise LayoutError(
                f"the draft's KV pool has {draft.size} tokens in pages of {draft.page_size}; "
                f"allowed: {pool.size} in pages of {page_size}, as in the target's pool"
            )
        for _, name, *rest in _tensors(draft, _infos(draft), pages, page_size):
            described.append((last, f"draft {number} {name}", *rest))
    # Ranks hold other parts of a draft that has another number of heads.
    is_even = not drafts.pools or drafts.heads == heads
    sharding = Sharding.by_head(heads, ranks) if is_even else None
    local = None if sharding is None else heads // sharding.parts
    tensors: dict[str, torch.Tensor] = {}
    views: list[TensorView] = []
    for layer, name, tensor, head_dim in described:
        tensors[name] = tensor
        by_head = head_dim is not None and tensor.shape[head_dim] == local
        views.append(
            TensorView(
                str(layer),
                tensor.data_ptr(),
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.element_size(),
                head_dim if by_head else None,
            )
        )
    layout = KVLayout.from_tensors(views, pages)
    if sharding is None or not layout.by_head:
        sharding = Sharding(ranks)
    traits = tuple(sorted({str(tensor.dtype) for tensor in tensors.values()}))
    own = [str(getattr(each, "dtype", "")) for each in (pool, *drafts.pools)]
    return Pages(layout, sharding, tensors, (*traits, *own))


def _infos(pool: Any) -> list[Any]:
    """SGLang's description of a pool, which has exactly one part.

    Raises:
        LayoutError: the pool has other parts or no description.
    """
    kind = type(pool).__name__
    allowed = "allowed: one pool of MHA, MLA or DSA without scales"
    try:
        infos = list(pool.get_device_pool_infos())
        declared = {str(each.pool_name.value) for each in pool.host_pool_decls()}
    except (AttributeError, NotImplementedError):
        raise LayoutError(f"SGLang does not describe its KV pool {kind}; {allowed}") from None
    unknown = declared - {"kv", "indexer"}
    if hasattr(pool, _INDEXER) != ("indexer" in declared):
        unknown.add("indexer")
    if unknown or len(infos) != 1:
        raise LayoutError(f"the KV pool {kind} has parts {sorted(unknown)}; {allowed}")
    info = infos[0].buffer_info
    if getattr(info, "scales", None) is not None:
        raise LayoutError(f"the KV pool {kind} keeps scales beside its pages; {allowed}")
    if getattr(info, "transfer_buffers", None) is not None:
        raise LayoutError(f"the KV pool {kind} moves its pages while it runs; {allowed}")
    return infos


def _tensors(
    pool: Any, infos: list[Any], pages: int, page_size: int
) -> Iterator[tuple[int, str, torch.Tensor, int | None]]:
    """The tensors of a pool in the order of the layers: layer, name, tensor whose dimension 0
    counts pages, and dimension of its KV heads."""
    (info,) = infos
    buffers = info.buffer_info.buffers
    for number, layer in enumerate(info.layer_ids):
        if isinstance(buffers, tuple):
            paged = _by_page(buffers[number], pages, page_size)
            yield layer, f"{layer} kv", paged, 2
            if hasattr(pool, _INDEXER):
                index = getattr(pool, _INDEXER)[number][:pages]
                yield layer, f"{layer} index", index.reshape(pages, 1, -1), 1
            continue
        order = getattr(buffers, "layout", None)
        if order is None:
            raise LayoutError(f"the KV pool {type(pool).__name__} splits its pages; allowed: MLA")
        for part in ("k", "v"):
            tensor = getattr(buffers, part)[number]
            if order.value == _TOKEN_ROWS:
                tensor = _by_page(tensor, pages, page_size)
            yield layer, f"{layer} {part}", tensor[:pages], _HEAD_DIM.get(order.value)


def _by_page(tensor: torch.Tensor, pages: int, page_size: int) -> torch.Tensor:
    """A view of a tensor (tokens, ...) as (pages, page_size, ...)."""
    return tensor[: pages * page_size].unflatten(0, (pages, page_size))
