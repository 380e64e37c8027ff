# SPDX-License-Identifier: Apache-2.0
"""The layout of SGLang's KV pools, and the part of a page that each rank holds.

The pools of a draft model have the page numbers of the target's pool, so their tensors are further
tensors of the same pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flexkv.layout import KVLayout, Sharding, TensorView
from flexkv.types.errors import LayoutError
from flexkv_sglang.windows import NO_WINDOWS, Windows

_INDEXER = "index_k_with_scale_buffer"
"""Attribute of SGLang's pools for sparse attention (DSA): the indexer's keys, one row a page."""
_WINDOWED = "SWAKVPool"
"""SGLang's class of a pool of full attention beside one of sliding windows."""
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
        windows: where the pages of sliding windows are, which SGLang numbers apart; empty if there
            are none. A page has a part in each layout.
    """

    layout: KVLayout
    sharding: Sharding
    tensors: Mapping[str, torch.Tensor]
    traits: tuple[str, ...]
    windows: tuple[KVLayout, ...] = ()

    def window_blocks(self, reach: int) -> Windows:
        """The blocks of windows of `reach` pages."""
        if not self.windows:
            return NO_WINDOWS
        first, pages = self.layout.num_blocks, self.windows[0].num_blocks
        return Windows(len(self.windows), first, pages, reach)

    @property
    def layers(self) -> int:
        """The number of the model's layers."""
        return len(frozenset().union(*(each.starts for each in (self.layout, *self.windows))))


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
    full, window = _full_and_window(pool)
    pages = full.size // page_size + 1  # page 0 is padding
    first = int(getattr(pool, "start_layer", 0) or 0)
    described = [
        _Described(layer - first, *rest)
        for layer, *rest in _tensors(full, _infos(full), pages, page_size)
    ]
    last = max(each.layer for each in described)
    for number, draft in enumerate(drafts.pools):
        if (draft.size, draft.page_size) != (pool.size, page_size):
            raise LayoutError(
                f"the draft's KV pool has {draft.size} tokens in pages of {draft.page_size}; "
                f"allowed: {pool.size} in pages of {page_size}, as in the target's pool"
            )
        for _, name, *rest in _tensors(draft, _infos(draft), pages, page_size):
            described.append(_Described(last, f"draft {number} {name}", *rest))
    apart: list[_Described] = []
    window_pages = 0
    if window is not None:
        window_pages = window.size // page_size + 1
        found = _tensors(window, _infos(window), window_pages, page_size)
        apart = [_Described(layer - first, f"window {name}", *rest) for layer, name, *rest in found]
    # Ranks hold other parts of a draft, or of windows, that have another number of heads.
    is_even = not drafts.pools or drafts.heads == heads
    sharding = Sharding.by_head(heads, ranks) if is_even else None
    local = None if sharding is None else heads // sharding.parts
    if not all(each.has_heads(local) for each in apart):
        local = None
    layout = _layout_of(described, pages, local)
    if sharding is None or not layout.by_head:
        sharding = Sharding(ranks)
    parts = _cut(apart, layout.block_bytes, window_pages)
    tensors = {each.name: each.tensor for each in (*described, *apart)}
    traits = tuple(sorted({str(tensor.dtype) for tensor in tensors.values()}))
    own = [str(getattr(each, "dtype", "")) for each in (pool, *drafts.pools)]
    windows = tuple(_layout_of(part, window_pages, local) for part in parts)
    return Pages(layout, sharding, tensors, (*traits, *own), windows)


class _Described(NamedTuple):
    """A tensor of a pool: its layer and name, and the dimension of its KV heads. Dimension 0 counts
    pages."""

    layer: int
    name: str
    tensor: torch.Tensor
    head_dim: int | None

    def has_heads(self, local: int | None) -> bool:
        """Whether the tensor has `local` KV heads."""
        return self.head_dim is not None and self.tensor.shape[self.head_dim] == local


def _full_and_window(pool: Any) -> tuple[Any, Any]:
    """The pools of full attention and of sliding windows; None in place of the latter if all layers
    have full attention.

    Raises:
        LayoutError: SGLang does not keep windows in pages of a pool of their own.
    """
    window = getattr(pool, "swa_kv_pool", None)
    if window is None:
        return pool, None
    kind = type(pool).__name__
    if kind != _WINDOWED or getattr(pool, "swa_req_ring_size", None) is not None:
        raise LayoutError(
            f"the KV pool {kind} keeps sliding windows in a way of its own; allowed: {_WINDOWED} "
            f"with pages of windows"
        )
    if not (pool.full_layer_nums and pool.swa_layer_nums):
        raise LayoutError(
            f"the KV pool {kind} has {pool.full_layer_nums} layers of full attention and "
            f"{pool.swa_layer_nums} with a window; allowed: 1 or more of both"
        )
    return pool.full_kv_pool, window


def _cut(apart: Sequence[_Described], most: int, pages: int) -> list[list[_Described]]:
    """Cut the layers of windows so that a page of each part is not larger than `most` bytes, unless
    it is of one layer."""
    parts: list[list[_Described]] = []
    size = 0
    for _, layer in itertools.groupby(apart, key=lambda each: each.layer):
        tensors = list(layer)
        its = sum(each.tensor.nbytes // pages for each in tensors)
        if not parts or size + its > most:
            parts.append([])
            size = 0
        parts[-1] += tensors
        size += its
    return parts


def _layout_of(described: Sequence[_Described], pages: int, local: int | None) -> KVLayout:
    """`local`: KV heads of this rank; None if heads are not divided."""
    views = [
        TensorView(
            str(each.layer),
            each.tensor.data_ptr(),
            tuple(each.tensor.shape),
            tuple(each.tensor.stride()),
            each.tensor.element_size(),
            each.head_dim if each.has_heads(local) else None,
        )
        for each in described
    ]
    return KVLayout.from_tensors(views, pages)


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
