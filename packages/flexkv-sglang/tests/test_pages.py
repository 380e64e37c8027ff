# SPDX-License-Identifier: Apache-2.0
"""Every kind of pool gives back what was stored, and what cannot be described is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_world import DIM, HEADS, LAYERS, Name, Rank, hashes_of, make_pool, same

from flexkv import LayoutError
from flexkv_sglang.pages import describe_pages


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("mha", torch.float32),
        ("mha", torch.uint8),
        ("hnd", torch.bfloat16),
        ("mla", torch.bfloat16),
        ("dsa", torch.uint8),
    ],
)
def test_pages_come_back_into_other_pages(
    make_rank: Callable[..., Rank], kind: str, dtype: torch.dtype, page_size: int
) -> None:
    rank = make_rank(kind, dtype=dtype, page_size=page_size)
    hashes, source, target = hashes_of("a", 3), [5, 2, 7], [9, 1, 4]
    stored = rank.fill(source, seed=1)
    others = [page for page in range(13) if page not in target]
    assert rank.store(hashes, source)
    rank.fill(target, seed=2)
    untouched = rank.read(others)
    assert rank.load("r", hashes, target)
    assert same(rank.read(target), stored)
    assert same(rank.read(others), untouched)


def test_a_page_is_every_layer_of_its_tokens() -> None:
    pages = describe_pages(make_pool(page_size=4), 4, heads=HEADS, ranks=1)
    assert pages.layout.block_bytes == 2 * LAYERS * 4 * HEADS * DIM * 4
    assert pages.layout.num_blocks == 13
    assert sorted(pages.layout.starts) == ["0", "1", "2"]


def test_a_page_has_its_index() -> None:
    pages = describe_pages(make_pool("dsa", page_size=4), 4, heads=1, ranks=1)
    assert pages.layout.block_bytes == LAYERS * (4 * (DIM + 8) * 4 + 72)


def test_ranks_of_one_head_each_share_a_block_by_head() -> None:
    pages = describe_pages(make_pool(heads=1), 4, heads=2, ranks=2)
    assert (pages.layout.by_head, pages.sharding.parts, pages.sharding.replicas) == (True, 2, 1)


def test_ranks_that_hold_the_same_head_are_replicas() -> None:
    pages = describe_pages(make_pool(heads=1), 4, heads=2, ranks=4)
    assert (pages.sharding.parts, pages.sharding.replicas) == (2, 2)


def test_ranks_with_latent_attention_all_hold_the_same() -> None:
    pages = describe_pages(make_pool("dsa"), 4, heads=1, ranks=4)
    assert (pages.layout.by_head, pages.sharding.replicas) == (True, 4)


def test_the_first_layer_of_a_stage_is_layer_0() -> None:
    pool = make_pool()
    pool.start_layer = 5
    info = SimpleNamespace(layer_ids=(5, 6, 7), buffer_info=pool.info)
    pool.get_device_pool_infos = lambda: (info,)
    assert sorted(describe_pages(pool, 4, heads=HEADS, ranks=1).layout.starts) == ["0", "1", "2"]


def undescribed(pool: Any) -> None:
    def refuse() -> None:
        raise NotImplementedError

    pool.get_device_pool_infos = refuse


def scaled(pool: Any) -> None:
    pool.info.scales = object()


def moving(pool: Any) -> None:
    pool.info.transfer_buffers = object()


def hybrid(pool: Any) -> None:
    pool.host_pool_decls = lambda: [
        SimpleNamespace(pool_name=Name.KV),
        SimpleNamespace(pool_name=Name.MAMBA),
    ]


def indexed(pool: Any) -> None:
    pool.index_k_with_scale_buffer = [torch.zeros(13, 72)] * LAYERS


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (undescribed, "does not describe its KV pool SimpleNamespace"),
        (scaled, "keeps scales beside its pages"),
        (moving, "moves its pages"),
        (hybrid, r"has parts \['mamba'\]"),
        (indexed, r"has parts \['indexer'\]"),
    ],
)
def test_a_pool_that_cannot_be_cached_right_is_refused(
    break_it: Callable[[Any], None], said: str
) -> None:
    pool = make_pool()
    break_it(pool)
    with pytest.raises(LayoutError, match=f"{said}.*; allowed: one pool of MHA, MLA or DSA"):
        describe_pages(pool, 4, heads=HEADS, ranks=1)
