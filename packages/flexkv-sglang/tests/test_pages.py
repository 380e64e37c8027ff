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
from flexkv_sglang.pages import DraftPools, describe_pages


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


def test_a_layer_that_shares_anothers_index_has_none() -> None:
    pool = make_pool("dsa", page_size=4)
    pool.index_k_with_scale_buffer[1] = torch.zeros((0, 72), dtype=torch.uint8)
    pages = describe_pages(pool, 4, heads=1, ranks=1)
    assert pages.layout.block_bytes == LAYERS * 4 * (DIM + 8) * 4 + (LAYERS - 1) * 72


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


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("kind", ["mha", "mla", "dsa"])
def test_the_pages_of_drafts_come_back(
    make_rank: Callable[..., Rank], kind: str, page_size: int
) -> None:
    pools = [make_pool(kind, page_size=page_size) for _ in range(2)]
    heads = HEADS if kind == "mha" else 1
    rank = make_rank(kind, page_size=page_size, drafts=DraftPools(pools, heads))
    for number, pool in enumerate(pools):
        for tensor in pool.tensors:
            tensor.copy_(torch.randint(1, 100, tensor.shape) + number)
    wanted = rank.read([5, 2])
    hashes = hashes_of("a", 2)
    assert rank.store(hashes, [5, 2])
    rank.fill([9, 1], seed=2)
    assert rank.load("r", hashes, [9, 1])
    assert same(rank.read([9, 1]), wanted)
    for pool in pools:
        for tensor in pool.tensors:
            rows = tensor.shape[0] // 13
            assert torch.equal(tensor[9 * rows : 10 * rows], tensor[5 * rows : 6 * rows])


def test_a_draft_belongs_to_the_last_layer() -> None:
    alone = describe_pages(make_pool(), 4, heads=HEADS, ranks=1).layout
    drafts = DraftPools([make_pool()], HEADS)
    both = describe_pages(make_pool(), 4, heads=HEADS, ranks=1, drafts=drafts).layout
    assert both.block_bytes == 2 * alone.block_bytes
    assert both.geometry != alone.geometry
    grown = {name: len(both.starts[name]) - len(alone.starts[name]) for name in both.starts}
    assert grown == {"0": 0, "1": 0, "2": LAYERS * len(alone.starts["2"])}


def test_ranks_are_no_replicas_when_a_draft_has_other_heads() -> None:
    # Each rank has one head of the target, shared with its neighbour, and one of the draft.
    drafts = DraftPools([make_pool(heads=1)], 4)
    pages = describe_pages(make_pool(heads=1), 4, heads=2, ranks=4, drafts=drafts)
    assert (pages.layout.by_head, pages.sharding.parts, pages.sharding.replicas) == (False, 4, 1)


def test_latent_drafts_keep_the_ranks_replicas() -> None:
    drafts = DraftPools([make_pool("dsa")], 1)
    pages = describe_pages(make_pool("dsa"), 4, heads=1, ranks=4, drafts=drafts)
    assert (pages.layout.by_head, pages.sharding.replicas) == (True, 4)


def test_a_draft_with_pages_of_its_own_is_refused() -> None:
    drafts = DraftPools([make_pool(pages=11)], HEADS)
    with pytest.raises(LayoutError, match="has 44 tokens in pages of 4; allowed: 48 in pages of 4"):
        describe_pages(make_pool(), 4, heads=HEADS, ranks=1, drafts=drafts)


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
