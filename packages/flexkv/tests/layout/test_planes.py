# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv import KVLayout, LayoutError, Plane, TensorView

BASE = 1 << 20


def dense(
    name: str, shape: tuple[int, ...], order: tuple[int, ...], base: int = BASE
) -> TensorView:
    """A dense tensor whose dimensions lie in memory in `order`, outermost first; 2-byte items."""
    stride, strides = 1, [0] * len(shape)
    for dim in reversed(order):
        strides[dim] = stride
        stride *= shape[dim]
    return TensorView(name, base, shape, tuple(strides), 2)


def addresses(view: TensorView, block_dim: int, blocks: range) -> set[int]:
    """Addresses of every byte of the given entries of `block_dim`, element by element."""
    found = set()
    ranges = [blocks if dim == block_dim else range(n) for dim, n in enumerate(view.shape)]
    for index in itertools.product(*ranges):
        offset = sum(i * s for i, s in zip(index, view.stride, strict=True))
        start = view.data_ptr + offset * view.itemsize
        found.update(range(start, start + view.itemsize))
    return found


def page_addresses(layout: KVLayout, block: int) -> list[int]:
    return [
        plane.base + block * plane.block_stride + byte
        for planes in layout.heads
        for plane in planes
        for row in range(plane.rows)
        for byte in range(row * plane.row_stride, row * plane.row_stride + plane.row_bytes)
    ]


@st.composite
def permuted_views(draw: st.DrawFn) -> tuple[TensorView, int, int]:
    """A dense tensor in any physical order with 7 blocks (or 7 * ratio kernel blocks)."""
    ratio = draw(st.sampled_from([1, 1, 2, 3]))
    rest = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    block_dim = draw(st.integers(0, min(1, len(rest))))
    shape = (*rest[:block_dim], 7 * ratio, *rest[block_dim:])
    order = draw(st.permutations(range(len(shape))))
    return dense("kv", shape, tuple(order)), block_dim, ratio


@given(permuted_views(), st.booleans())
def test_planes_cover_each_block_exactly_once(
    case: tuple[TensorView, int, int], by_head: bool
) -> None:
    view, block_dim, ratio = case
    if by_head and len(view.shape) > block_dim + 1:
        view = replace(view, head_dim=block_dim + 1, itemsize=16)
    try:
        layout = KVLayout.from_tensors([view], 7)
    except LayoutError:
        # Kernel blocks of one block must lie a constant distance apart and apart from others'.
        assert ratio > 1
        return
    seen: set[int] = set()
    for block in range(7):
        pages = page_addresses(layout, block)
        assert len(pages) == len(set(pages)) == layout.block_bytes
        assert set(pages) == addresses(view, block_dim, range(block * ratio, (block + 1) * ratio))
        assert seen.isdisjoint(pages)
        seen.update(pages)


@pytest.mark.parametrize(
    ("shape", "order", "planes"),
    [
        ((9, 2, 16, 64), (0, 1, 2, 3), 1),  # one page per layer
        ((2, 9, 16, 2, 32), (0, 1, 2, 3, 4), 2),  # K and V apart
        ((9, 4, 16, 64), (1, 0, 2, 3), 4),  # heads outside the blocks
        ((9, 4, 16, 64), (0, 2, 1, 3), 1),  # tokens outside the heads, still one page
    ],
)
def test_known_engine_layouts(shape: tuple[int, ...], order: tuple[int, ...], planes: int) -> None:
    layout = KVLayout.from_tensors([dense("kv", shape, order)], 9)
    assert len(layout.heads[0]) == planes
    assert layout.block_bytes == math.prod(shape) // 9 * 2


def test_layers_that_follow_one_another_within_a_block_are_one_page() -> None:
    # [block, layer, ...] in one allocation, handed out as one view per layer.
    page, layers, blocks = 256, 4, 5
    views = [
        TensorView(f"l{i}", BASE + i * page, (blocks, page // 2), (layers * page // 2, 1), 2)
        for i in range(layers)
    ]
    layout = KVLayout.from_tensors(views, blocks)
    page_bytes = layers * page
    assert layout.heads == ((Plane(BASE, page_bytes, page_bytes, 1, page_bytes),),)


def test_the_engine_decides_the_order_of_layers_not_the_addresses() -> None:
    views = [dense("l0", (3, 8), (0, 1), BASE + 4096), dense("l1", (3, 8), (0, 1), BASE)]
    layout = KVLayout.from_tensors(views, 3)
    assert [plane.base for plane in layout.heads[0]] == [BASE + 4096, BASE]


def test_a_tensor_shared_by_layers_counts_once() -> None:
    view = dense("l0", (3, 8), (0, 1))
    again = dense("l1", (3, 8), (0, 1))
    shared, alone = (KVLayout.from_tensors(views, 3) for views in ([view, again], [view]))
    assert (shared.heads, shared.geometry) == (alone.heads, alone.geometry)
    assert shared.starts == {"l0": frozenset({BASE}), "l1": frozenset({BASE})}


def test_pages_of_different_kinds_at_the_same_places_are_as_long_as_the_longest() -> None:
    """A hybrid model's block is a page of attention or a recurrent state, which may be shorter."""
    attention = TensorView("attention", BASE, (3, 2, 64), (128, 64, 1), 2, 1)
    state = TensorView("state", BASE, (3, 200), (256, 1), 1)
    for views in ([attention, state], [state, attention]):
        layout = KVLayout.from_tensors(views, 3)
        assert layout.heads == ((Plane(BASE, 256, 256, 1, 256),),)
        assert not layout.by_head
        assert len(layout.geometry) == 2


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([], "no KV cache tensors"),
        ([dense("l0", (8, 4), (0, 1))], "no dimension that counts the engine's 3 blocks"),
        ([TensorView("l0", BASE, (3, 4), (0, 1), 2)], "repeats elements"),
        ([TensorView("l0", BASE, (3, 4), (4, 0), 2)], "repeats elements"),
        ([TensorView("l0", BASE, (3, 4), (4, -1), 2)], "repeats elements"),
        ([TensorView("l0", BASE, (3, 4), (4,), 2)], "one stride for each dimension"),
        ([TensorView("l0", BASE, (3, 4), (2, 1), 2)], "overlap"),
        (
            [dense("l0", (3, 8), (0, 1)), dense("l1", (3, 8), (0, 1), BASE + 8)],
            "overlap or interleave",
        ),
        (
            [dense("l0", (3, 8), (0, 1)), dense("l1", (3, 16), (0, 1), BASE + 16)],
            "overlap or interleave",
        ),
        ([dense("l0", (70000, 3, 2), (0, 1, 2))], "scatters a block over 70000 pieces"),
    ],
)
def test_indescribable_layouts_are_refused(views: list[TensorView], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        KVLayout.from_tensors(views, 3)
