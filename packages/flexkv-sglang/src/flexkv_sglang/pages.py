# SPDX-License-Identifier: Apache-2.0
"""The layout of SGLang's KV pools, and the part of a page that each rank holds.

The pools of a draft model have the page numbers of the target's pool, so their tensors are further
tensors of the same pages. Sliding windows and recurrent states have numbers of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flexkv.engine.worker.pages import ApartPages
from flexkv.layout import KVLayout, Sharding, TensorView
from flexkv.types.errors import LayoutError
from flexkv_sglang.identity import draft_model
from flexkv_sglang.states import CutStates, describe_states
from flexkv_sglang.trailing import STATES, WINDOWS, TrailingPages, TrailingPool

_INDEXER = "index_k_with_scale_buffer"
"""Attribute of SGLang's pools for sparse attention (DSA): the indexer's keys, one row a page."""
_WINDOWED = "SWAKVPool"
"""SGLang's class of a pool of full attention beside one of sliding windows."""
_WITH_STATES = "HybridLinearKVPool"
"""SGLang's class of a pool of full attention beside one of recurrent states."""
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
        windows: where the pages of sliding windows are; empty if there are none. A page has a part
            in each.
        states: where recurrent states are; empty if there are none. A state has parts in each.
        first_layer: the model's number of this rank's first layer; not 0 on the later stages of a
            pipeline.
    """

    layout: KVLayout
    sharding: Sharding
    tensors: Mapping[str, torch.Tensor]
    traits: tuple[str, ...]
    windows: tuple[KVLayout, ...] = ()
    states: tuple[CutStates, ...] = ()
    first_layer: int = 0

    @property
    def apart(self) -> tuple[ApartPages, ...]:
        """The pages with numbers of their own."""
        share = 1 / max(1, len(self.windows))
        windows = [ApartPages(each, i * share, share) for i, each in enumerate(self.windows)]
        return (*windows, *(ApartPages(each.layout, is_own=True) for each in self.states))

    def trailing(self, reach: int) -> TrailingPages:
        """The same pages, of which a hit needs the last. `reach`: pages of a window."""
        pools: list[TrailingPool] = []
        first, number = self.layout.num_blocks, 1
        if self.windows:
            pages, parts = self.windows[0].num_blocks, len(self.windows)
            pools.append(TrailingPool(WINDOWS, pages, parts, first, number, reach))
            first, number = first + parts * pages, number + parts
        for each in self.states:
            count, parts = each.layout.num_blocks, each.parts
            states = TrailingPool(STATES, count // parts, parts, first, number, 1, are_states=True)
            pools.append(states)
            first, number = first + count, number + parts
        return TrailingPages(pools)

    @property
    def layers(self) -> int:
        """The number of the model's layers on this rank."""
        layouts = (self.layout, *(each.layout for each in self.apart))
        return len(frozenset().union(*(each.starts for each in layouts)))


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
    pool: Any,
    page_size: int,
    *,
    heads: int,
    ranks: int,
    drafts: DraftPools = NO_DRAFTS,
    states: Any = None,
) -> Pages:
    """Describe the pages of SGLang's KV pool, split by head if possible. Raises LayoutError if
    FlexKV cannot cache one of the pools.

    Args:
        pool: the pool whose slots SGLang's allocator gives out; borrowed.
        page_size: tokens of a page.
        heads: KV heads of the model over all ranks; 1 with latent attention (MLA), where every
            rank holds the same bytes.
        ranks: number of ranks that share a page.
        drafts: pools of the draft model, whose tensors belong to the last layer: the draft runs
            after SGLang has waited for that layer.
        states: the pool of recurrent states, which ranks never hold in common; None without one.
    """
    full, window = _full_and_window(pool, states)
    pages = full.size // page_size + 1  # page 0 is padding
    first = int(getattr(pool, "start_layer", 0) or 0)
    numbers = _numbers_of(pool, states)
    described = [
        _Described(numbers.get(layer, layer) - first, name, tensor, head_dim)
        for layer, name, tensor, head_dim in _tensors(full, _infos(full), pages, page_size)
    ]
    last = max(each.layer for each in described)
    for number, draft in enumerate(drafts.pools):
        if (draft.size, draft.page_size) != (pool.size, page_size):
            raise LayoutError(
                f"the draft's KV pool has {draft.size} tokens in pages of {draft.page_size}; "
                f"allowed: {pool.size} in pages of {page_size}, as in the target's pool"
            )
        for _, name, tensor, head_dim in _tensors(draft, _infos(draft), pages, page_size):
            described.append(_Described(last, f"draft {number} {name}", tensor, head_dim))
    apart: list[_Described] = []
    window_pages = 0
    if window is not None:
        window_pages = window.size // page_size + 1
        apart = [
            _Described(layer - first, f"window {name}", tensor, head_dim)
            for layer, name, tensor, head_dim in _tensors(
                window, _infos(window), window_pages, page_size
            )
        ]
    even = Sharding.by_head(heads, ranks)
    # Ranks hold other parts of a draft, or of windows, that have another number of heads.
    by_head = even if not drafts.pools or drafts.heads == heads else None
    local = None if by_head is None or states is not None else heads // by_head.parts
    if not all(each.has_heads(local) for each in apart):
        local = None
    layout = _layout_of(described, pages, local)
    sharding = by_head or Sharding(ranks)
    if not layout.by_head:
        # A state belongs to a number of ranks, so their pages need no common form.
        sharding = Sharding(ranks, None, even.replicas if even and states is not None else 1)
    parts = _cut(apart, layout.block_bytes, window_pages)
    cut = describe_states(states, first, layout.block_bytes // sharding.replicas) if states else []
    tensors = {each.name: each.tensor for each in (*described, *apart)}
    traits = sorted({str(tensor.dtype) for tensor in tensors.values()})
    traits += [str(getattr(each, "dtype", "")) for each in (pool, *drafts.pools)]
    traits += [each.trait for each in cut]
    for each in cut:
        tensors |= each.tensors
    windows = tuple(_layout_of(part, window_pages, local) for part in parts)
    return Pages(layout, sharding, tensors, tuple(traits), windows, tuple(cut), first)


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


def _full_and_window(pool: Any, states: Any) -> tuple[Any, Any]:
    """The pools of full attention and of sliding windows; None in place of the latter if no layer
    has a window. `states`: see `describe_pages`."""
    window = getattr(pool, "swa_kv_pool", None)
    kind = type(pool).__name__
    if window is None:
        if (states is not None) != (kind == _WITH_STATES):
            raise LayoutError(
                f"the KV pool {kind} of a model with{'' if states else 'out'} recurrent states is "
                f"unknown; allowed: {_WITH_STATES} with states and no other pool"
            )
        return getattr(pool, "full_kv_pool", pool), None
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


def _numbers_of(pool: Any, states: Any) -> Mapping[int, int]:
    """The numbers of the model's layers by those that the pool of full attention gives them, as far
    as they differ."""
    if states is None:
        return {}
    mapping: Mapping[int, int] = getattr(pool, "full_attention_layer_id_mapping", {})
    named = {layer for info in _infos(pool.full_kv_pool) for layer in info.layer_ids}
    return {} if named == set(mapping) else {own: layer for layer, own in mapping.items()}


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
            page_dim=0,
        )
        for each in described
    ]
    return KVLayout.from_tensors(views, pages)


def _infos(pool: Any) -> list[Any]:
    """SGLang's description of a pool, which has exactly one part."""
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
            # A layer that shares another one's choice of tokens may have an index without rows.
            if hasattr(pool, _INDEXER) and len(getattr(pool, _INDEXER)[number]):
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


def draft_of(server_args: Any, settings: Any, params: Any) -> Any:
    """SGLang's configuration of the draft model; None if no draft keeps KV."""
    from sglang.srt.configs.model_config import ModelConfig

    if not _draft_pools(params):
        return None
    path, revision = draft_model(settings)
    return ModelConfig.from_server_args(
        server_args, model_path=path, model_revision=revision, is_draft_model=True
    )


def pages_of(pool: Any, params: Any, model: Any, draft: Any, ranks: int) -> Pages:
    """Describe the pages of the target's pool `pool`, of recurrent states, and of the draft's
    pools, as SGLang hands them to a linker. See `describe_pages`."""
    return describe_pages(
        pool,
        params.page_size,
        heads=_heads_of(model),
        ranks=ranks,
        drafts=NO_DRAFTS if draft is None else DraftPools(_draft_pools(params), _heads_of(draft)),
        states=getattr(params.req_to_token_pool, "mamba_pool", None),
    )


def _draft_pools(params: Any) -> tuple[Any, ...]:
    return (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)


def _heads_of(model: Any) -> int:
    """KV heads of a model over all ranks; 1 with latent attention."""
    from sglang.srt.configs.model_config import AttentionArch

    latent = model.attention_arch == AttentionArch.MLA
    return 1 if latent else int(model.get_total_num_kv_heads())
