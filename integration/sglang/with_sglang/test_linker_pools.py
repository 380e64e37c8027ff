# SPDX-License-Identifier: Apache-2.0
"""SGLang's own KV pools, as it describes them, under FlexKV's linker; without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang_world import Rank, hashes_of, same  # type: ignore[import-not-found]

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


def slots(pages: list[int], page: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * each, page * (each + 1)) for each in pages])


def test_sglang_has_all_that_flexkv_uses() -> None:
    assert missing_names() == []


def test_the_linker_has_all_that_sglang_calls() -> None:
    from flexkv_sglang.linker import FlexKVLinker

    assert issubclass(FlexKVLinker, UnifiedCacheLinker)
    assert not FlexKVLinker.__abstractmethods__
