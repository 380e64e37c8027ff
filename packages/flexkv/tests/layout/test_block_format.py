# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv import KVLayout, LayoutError, TensorView
from flexkv.layout import (
    SLOT_ALIGNMENT,
    BlockFormat,
    Sharding,
    block_format,
    block_identity,
    choose_engine_blocks,
    fingerprint,
)


def layout_of(heads: int, *, base: int = 1 << 20, nhd: bool = True, content: int = 32) -> KVLayout:
    """Two layers of (3 blocks, heads, 4 tokens, content), 2-byte items."""
    strides = (content, heads * content) if nhd else (4 * content, content)
    views = [
        TensorView(
            f"l{i}",
            base + i * 65536,
            (3, heads, 4, content),
            (heads * 4 * content, *strides, 1),
            2,
            head_dim=1,
        )
        for i in range(2)
    ]
    return KVLayout.from_tensors(views, 3)


def opaque(layout_heads: int, *, nhd: bool) -> KVLayout:
    content = 32
    strides = (content, layout_heads * content) if nhd else (4 * content, content)
    view = TensorView(
        "l0", 4096, (3, layout_heads, 4, content), (4 * layout_heads * content, *strides, 1), 2
    )
    return KVLayout.from_tensors([view], 3)


@given(st.integers(1, 8), st.lists(st.integers(1, 100_000), min_size=1, max_size=8))
def test_shards_do_not_overlap_and_fit_the_slot(engine_blocks: int, sizes: list[int]) -> None:
    fmt = BlockFormat(engine_blocks, tuple(sizes))
    end = 0
    for offset, size in zip(fmt.shard_offsets, sizes, strict=True):
        assert offset >= end
        assert offset % 64 == 0
        end = offset + size
    assert end <= fmt.slot_bytes < end + SLOT_ALIGNMENT
    assert fmt.slot_bytes % SLOT_ALIGNMENT == 0


@pytest.mark.parametrize(
    ("tokens", "block_bytes", "setting", "expected"),
    [
        (16, 2 << 20, None, 1),  # Llama-3.1-8B: 2 MiB already
        (16, 192 << 10, None, 8),  # small model: 128 tokens at most
        (16, 512 << 10, None, 4),
        (128, 64 << 10, None, 1),
        (1024, 64 << 10, None, 1),  # never less than an engine block
        (16, 1, 64, 4),
    ],
)
def test_block_size(tokens: int, block_bytes: int, setting: int | None, expected: int) -> None:
    assert choose_engine_blocks(tokens, block_bytes, setting) == expected


def test_block_tokens_must_be_a_multiple() -> None:
    with pytest.raises(LayoutError, match=r"block_tokens is 100.*multiple of 16"):
        choose_engine_blocks(16, 1 << 20, 100)


@pytest.mark.parametrize(
    ("heads", "ranks", "parts", "replicas"),
    [(8, 1, 1, 1), (8, 4, 4, 1), (8, 8, 8, 1), (2, 8, 2, 4), (1, 4, 1, 4)],
)
def test_heads_are_shared_out_evenly(heads: int, ranks: int, parts: int, replicas: int) -> None:
    sharding = Sharding.by_head(heads, ranks)
    assert sharding == Sharding(ranks, heads, replicas)
    assert sharding.parts == parts


@pytest.mark.parametrize(("heads", "ranks"), [(6, 4), (3, 2), (4, 6)])
def test_heads_that_do_not_come_out_even_are_not(heads: int, ranks: int) -> None:
    assert Sharding.by_head(heads, ranks) is None


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5))
def test_slots_are_the_same_for_every_number_of_ranks(
    heads: int, ranks: int, engine_blocks: int
) -> None:
    def slot(ranks: int) -> tuple[int, str]:
        sharding = Sharding.by_head(heads, ranks)
        assert sharding is not None
        layout = layout_of(max(1, heads // ranks), nhd=ranks % 2 == 0)
        sizes = (layout.shard_bytes(engine_blocks),) * sharding.parts
        made = BlockFormat(engine_blocks, sizes, sharding.replicas)
        assert made.ranks == ranks
        name = fingerprint(block_identity(["m"], layout, engine_blocks, sharding))
        return made.slot_bytes, name

    assert slot(ranks) == slot(1)


def test_fingerprint_follows_all_that_changes_bytes_but_not_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout, one = layout_of(2), Sharding(1, 2)
    names = {
        fingerprint(block_identity(["a", "b"], layout, 1, one)),
        fingerprint(block_identity(["ab", ""], layout, 1, one)),
        fingerprint(block_identity(["a", "b"], layout, 2, one)),
        fingerprint(block_identity(["a", "b"], layout_of(2, content=64), 1, one)),
        fingerprint(block_identity(["a", "b"], layout, 1, Sharding(2, 4))),
        fingerprint(block_identity(["a", "b"], opaque(2, nhd=True), 1, Sharding(1))),
        fingerprint(block_identity(["a", "b"], opaque(2, nhd=True), 1, Sharding(2))),
        fingerprint(block_identity(["a", "b"], opaque(2, nhd=False), 1, Sharding(1))),
    }
    assert len(names) == 8
    monkeypatch.setattr(block_format, "FORMAT_VERSION", block_format.FORMAT_VERSION + 1)
    assert fingerprint(block_identity(["a", "b"], layout, 1, one)) not in names
    monkeypatch.undo()
    moved = layout_of(2, base=1 << 30, nhd=False)
    same = block_identity(["a", "b"], moved, 1, one)
    assert fingerprint(same) == fingerprint(block_identity(["a", "b"], layout, 1, one))
