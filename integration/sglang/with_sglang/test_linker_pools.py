# SPDX-License-Identifier: Apache-2.0
"""SGLang's own KV pools, as it describes them, under FlexKV's linker; without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang_world import (  # type: ignore[import-not-found]
    Rank,
    hashes_of,
    make_with_states,
    same,
)

from flexkv_sglang.compat import missing_names
from flexkv_sglang.pages import NO_DRAFTS, DraftPools

HEADS, LAYERS = 2, 3


def mha(dtype: torch.dtype, page: int) -> Any:
    return MHATokenToKVPool(16 * page, page, dtype, HEADS, 16, LAYERS, "cpu", False)


def mla(dtype: torch.dtype, page: int) -> Any:
    return MLATokenToKVPool(16 * page, page, dtype, 16, 8, LAYERS, "cpu", False)


def asymmetric(dtype: torch.dtype, page: int) -> Any:
    return MHATokenToKVPool(16 * page, page, dtype, HEADS, 16, LAYERS, "cpu", False, v_head_dim=32)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(pool: Any, heads: int, drafts: DraftPools = NO_DRAFTS) -> Rank:
        made.append(Rank(tmp_path, pool=pool, heads=heads, drafts=drafts))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("page", [1, 4, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2], ids=["half", "fp8"])
@pytest.mark.parametrize("kind", [mha, mla, asymmetric])
def test_pages_of_sglangs_pools_come_back(
    rank: Callable[..., Rank], kind: Callable[..., Any], dtype: torch.dtype, page: int
) -> None:
    pool = kind(dtype, page)
    buffers = pool.kv_buffer if kind is mla else [*pool.k_buffer, *pool.v_buffer]
    assert buffers[0].dtype == (torch.uint8 if dtype is torch.float8_e5m2 else dtype)
    one = rank(pool, 1 if kind is mla else HEADS)
    assert one.pages.layout.by_head
    assert one.pages.layout.block_bytes == sum(each[0].nbytes for each in buffers) * page
    assert len(one.pages.layout.starts) == LAYERS
    # Written and read by token slots, as SGLang does it.
    source, target = slots([5, 2, 7], page), slots([9, 1, 4], page)
    for number, buffer in enumerate(buffers):
        buffer[source] = torch.randint(0, 100, buffer[source].shape).to(buffer.dtype) + number
    wanted = [buffer[source].clone() for buffer in buffers]
    hashes = hashes_of("a", 3)
    assert one.store(hashes, [5, 2, 7])
    assert one.load("r", hashes, [9, 1, 4])
    assert same([buffer[target] for buffer in buffers], wanted)


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("kind", [mha, mla])
@pytest.mark.parametrize("draft", [mha, mla])
def test_pages_of_a_drafts_pools_come_back_with_the_targets(
    rank: Callable[..., Rank], kind: Callable[..., Any], draft: Callable[..., Any], page: int
) -> None:
    pools = [kind(torch.float16, page), draft(torch.float16, page), draft(torch.float16, page)]
    heads, draft_heads = (1 if each is mla else HEADS for each in (kind, draft))
    one = rank(pools[0], heads, DraftPools(pools[1:], draft_heads))
    assert len(one.pages.layout.starts) == LAYERS
    buffers = [
        buffer
        for pool in pools
        for buffer in (
            pool.kv_buffer
            if isinstance(pool, MLATokenToKVPool)
            else [*pool.k_buffer, *pool.v_buffer]
        )
    ]
    assert one.pages.layout.block_bytes == sum(each[0].nbytes for each in buffers) * page
    source, target = slots([5, 2, 7], page), slots([9, 1, 4], page)
    for number, buffer in enumerate(buffers):
        buffer[source] = torch.randint(0, 100, buffer[source].shape).to(buffer.dtype) + number
    wanted = [buffer[source].clone() for buffer in buffers]
    hashes = hashes_of("a", 3)
    assert one.store(hashes, [5, 2, 7])
    assert one.load("r", hashes, [9, 1, 4])
    assert same([buffer[target] for buffer in buffers], wanted)


DSA_PAGE = 64
"""Tokens of a page, as SGLang requires with sparse attention."""


def dsa(shared: tuple[int, ...] = ()) -> Any:
    """A pool of sparse attention. The layers `shared` take their choice of tokens from another one,
    and have no indexer's keys."""
    size = 16 * DSA_PAGE
    return DSATokenToKVPool(
        size,
        DSA_PAGE,
        kv_lora_rank=16,
        dtype=torch.bfloat16,
        qk_rope_head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=24,
        index_buf_size=size,
        skip_topk_layers=[layer in shared for layer in range(LAYERS)],
    )


def beside_states(full: Any) -> Any:
    """A model's pool whose layers have a state, each followed by one of `full`."""
    made = make_with_states()
    pool = HybridLinearKVPool(
        full.size,
        full.dtype,
        full.page_size,
        1,
        full.kv_cache_dim,
        [*made.full_attention_layer_id_mapping],
        "cpu",
        made.states,
        use_mla=True,
        use_dsa=True,
        full_kv_pool=full,
    )
    pool.states, pool.info = made.states, made.info
    return pool


def rows_of(pool: Any) -> list[torch.Tensor]:
    """The tensors of a pool of sparse attention, a row a page."""
    keys = [each.unflatten(0, (-1, DSA_PAGE)) for each in pool.kv_buffer]
    return [*keys, *(each for each in pool.index_k_with_scale_buffer if len(each))]


@pytest.mark.parametrize("shared", [(), (1,), (1, 2)])
@pytest.mark.parametrize(("states", "drafts"), [(False, 0), (False, 2), (True, 0)])
def test_pages_of_sparse_attention_come_back_with_drafts_or_states(
    rank: Callable[..., Rank], states: bool, drafts: int, shared: tuple[int, ...]
) -> None:
    full, packed = dsa(shared), [dsa() for _ in range(drafts)]
    one = rank(beside_states(full) if states else full, 1, DraftPools(packed, 1))
    rows = [row for pool in (full, *packed) for row in rows_of(pool)]
    assert len(rows) == 2 * LAYERS * (1 + drafts) - len(shared)
    generator = torch.Generator().manual_seed(1)
    for row in rows:
        row[[5, 2, 7]] = torch.randint(0, 100, row[:3].shape, generator=generator).to(row.dtype)
    wanted = [row[[5, 2, 7]].clone() for row in rows]
    state = one.fill_states([3], seed=2) if states else []
    hashes = hashes_of("a", 3)
    assert one.store(hashes, [5, 2, 7], states=[3] if states else [])
    for row in rows:
        row[:] = 0
    if states:
        one.fill_states(range(5), seed=3)
    assert one.load("r", hashes, [9, 1, 4], states=[1] if states else [])
    assert same([row[[9, 1, 4]] for row in rows], wanted)
    assert same(one.read_states([1]), state)


def slots(pages: list[int], page: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * each, page * (each + 1)) for each in pages])


def test_sglang_has_all_that_flexkv_uses() -> None:
    assert missing_names() == []


def test_the_linker_has_all_that_sglang_calls() -> None:
    from flexkv_sglang.linker import FlexKVLinker

    assert issubclass(FlexKVLinker, UnifiedCacheLinker)
    assert not FlexKVLinker.__abstractmethods__
