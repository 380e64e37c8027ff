# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv import KVLayout, LayoutError, TensorView
from flexkv.layout import Plane
from flexkv.layout.kv_layout import SHARD_ALIGNMENT

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
        ((18, 16, 64), (0, 1, 2), 1),  # two blocks of the kernels are one of the engine
    ],
)
def test_known_engine_layouts(shape: tuple[int, ...], order: tuple[int, ...], planes: int) -> None:
    layout = KVLayout.from_tensors([dense("kv", shape, order)], 9)
    assert len(layout.heads[0]) == planes
    assert layout.block_bytes == math.prod(shape) // 9 * 2
    blocks = [set(page_addresses(layout, block)) for block in range(9)]
    assert len(set.union(*blocks)) == 9 * layout.block_bytes


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


def test_layers_with_a_gap_between_them_are_two_pages() -> None:
    views = [TensorView(f"l{i}", BASE + i * 512, (5, 128), (512, 1), 2) for i in range(2)]
    layout = KVLayout.from_tensors(views, 5)
    assert [plane.base for plane in layout.heads[0]] == [BASE, BASE + 512]


def test_the_stride_of_a_single_head_means_nothing() -> None:
    layouts = [
        KVLayout.from_tensors([TensorView("l0", BASE, (3, 1, 64), (64, stride, 1), 2, 1)], 3)
        for stride in (0, 64)
    ]
    assert layouts[0].by_head
    assert layouts[0].heads == layouts[1].heads


def test_a_page_never_reaches_into_the_next_block() -> None:
    """Tensors of one block may follow one another, but not within a block."""
    views = [dense(f"l{i}", (1, 64), (0, 1), BASE + i * 128) for i in range(2)]
    layout = KVLayout.from_tensors(views, 1)
    assert all(plane.row_bytes <= plane.block_stride for plane in layout.heads[0])


@given(st.integers(1, 5), st.integers(1, 4), st.integers(8, 40), st.integers(1, 4))
def test_the_places_of_a_shard_are_disjoint_and_its_heads_are_aligned(
    layers: int, heads: int, content: int, engine_blocks: int
) -> None:
    strides = (content, heads * content, 1)
    views = [
        TensorView(
            f"l{i}", BASE + i * 65536, (3, heads, 4, content), (4 * heads * content, *strides), 2, 1
        )
        for i in range(layers)
    ]
    layout = KVLayout.from_tensors(views, 3)
    assert layout.by_head
    placed = layout.place(engine_blocks)
    # In the order of the tensors, of each first all heads.
    assert [plane.base for plane in placed] == sorted(plane.base for plane in placed)
    for head in range(heads):
        own = [plane for number, plane in enumerate(placed) if number % heads == head]
        assert own[0].slot_offset % SHARD_ALIGNMENT == 0
        assert own[0].slot_offset == head * layout.head_stride(engine_blocks)
    taken = sorted(
        (plane.slot_offset + block * layout.head_bytes, plane.page_bytes)
        for plane in placed
        for block in range(engine_blocks)
    )
    ends = [start + size for start, size in taken]
    assert all(end <= start for end, (start, _) in zip(ends, taken[1:], strict=False))
    assert ends[-1] <= layout.shard_bytes(engine_blocks)


def test_heads_that_cannot_be_told_apart_are_opaque() -> None:
    # Of two bytes each, one beside the other.
    short = TensorView("l0", BASE, (3, 4, 8), (32, 1, 4), 2, head_dim=1)
    # Fewer heads than another layer's.
    few, many = (
        TensorView(f"h{heads}", base, (3, heads, 64), (heads * 64, 64, 1), 2, head_dim=1)
        for heads, base in ((2, BASE), (4, BASE + 4096))
    )
    for views in ([short], [few, many], [many, few]):
        layout = KVLayout.from_tensors(views, 3)
        assert not layout.by_head
        assert layout.block_bytes == sum(math.prod(view.shape) // 3 * 2 for view in views)


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
    smaller = TensorView("smaller", BASE, (3, 2, 32), (128, 32, 1), 2, 1)
    for views in ([attention, state], [state, attention], [attention, smaller]):
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
        ([dense("l0", (5, 4, 6), (0, 1, 2))], "no dimension that counts the engine's 3 blocks"),
        ([TensorView("l0", BASE, (3, 4, 64), (64, 0, 1), 2, head_dim=1)], "repeats elements"),
        (
            [
                TensorView("l0", BASE, (3, 8), (32, 1), 2),
                TensorView("l1", BASE + 16, (3, 4), (16, 1), 2),
            ],
            "interleave at different strides",
        ),
    ],
)
def test_indescribable_layouts_are_refused(views: list[TensorView], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        KVLayout.from_tensors(views, 3)


@pytest.mark.parametrize(
    ("shape", "blocks", "fits"),
    [
        ((16, 16, 64), 16, "0 and 1"),
        ((2, 2, 8), 2, "0 and 1"),
        ((4, 16, 16, 16), 16, "1 and 2 and 3"),
        ((64, 2, 16), 16, "0 and 2"),  # smaller blocks of the kernels, or the tokens of a block
        ((2, 32, 16), 16, "1 and 2"),
        ((4, 6, 8), 2, "0 and 1"),
    ],
)
def test_of_two_dimensions_that_may_count_pages_none_is_guessed(
    shape: tuple[int, ...], blocks: int, fits: str
) -> None:
    view = dense("l0", shape, tuple(range(len(shape))))
    with pytest.raises(LayoutError, match=f"dimensions {fits} that may count .*; allowed: .*page_"):
        KVLayout.from_tensors([view], blocks)
    for dim in map(int, fits.split(" and ")):
        layout = KVLayout.from_tensors([replace(view, page_dim=dim)], blocks)
        ratio = shape[dim] // blocks
        for block in range(blocks):
            own = range(block * ratio, (block + 1) * ratio)
            assert set(page_addresses(layout, block)) == addresses(view, dim, own)


def test_the_dimension_of_heads_counts_no_pages() -> None:
    view = replace(dense("l0", (8, 8, 16), (0, 1, 2)), head_dim=0)
    layout = KVLayout.from_tensors([view], 8)
    assert layout.by_head
    assert set(page_addresses(layout, 3)) == addresses(view, 1, range(3, 4))


@pytest.mark.parametrize("page_dim", [-1, 1, 2, 3, 4])
def test_a_page_dim_that_counts_no_pages_is_refused(page_dim: int) -> None:
    view = replace(dense("l0", (3, 4, 0, 3), (0, 1, 2, 3)), head_dim=3, page_dim=page_dim)
    with pytest.raises(LayoutError, match=f"no dimension .*, or page_dim={page_dim} is none; allo"):
        KVLayout.from_tensors([view], 3)


@pytest.mark.parametrize("blocks", [0, -1])
def test_an_engine_has_blocks(blocks: int) -> None:
    with pytest.raises(LayoutError, match=f"reports {blocks} KV blocks"):
        KVLayout.from_tensors([dense("l0", (3, 8), (0, 1))], blocks)


def test_the_geometry_of_heads_names_the_order_of_dimensions() -> None:
    """Of two tensors with the same extents, the other dimensions lie in another order."""
    shape = (4, 2, 8, 8, 32)  # blocks, heads, and what lies within a head's page

    def by_head(*order: int) -> KVLayout:
        view = replace(dense("layer", shape, order), head_dim=1)
        return KVLayout.from_tensors([view], num_blocks=4)

    one, other = by_head(0, 1, 2, 3, 4), by_head(0, 1, 3, 2, 4)
    assert one.by_head
    assert other.by_head
    assert one.geometry != other.geometry


def test_where_heads_lie_makes_no_other_geometry() -> None:
    """Tokens before heads, and heads before tokens: each head's bytes are the same."""
    shape = (4, 2, 16, 64)
    layouts = [
        KVLayout.from_tensors([replace(dense("layer", shape, order), head_dim=1)], num_blocks=4)
        for order in ((0, 1, 2, 3), (0, 2, 1, 3))
    ]
    assert [layout.by_head for layout in layouts] == [True, True]
    assert layouts[0].geometry == layouts[1].geometry


def test_an_arrays_view_has_its_address_strides_and_owner() -> None:
    array = np.zeros((6, 4, 8), np.float16).transpose(1, 0, 2)
    view = TensorView.of("kv", array, head_dim=2, page_dim=1)
    assert view == TensorView("kv", array.ctypes.data, (4, 6, 8), (8, 32, 1), 2, 2, 1)
    assert view.owner is array
    dense = TensorView.of("kv", np.zeros((3, 5), np.uint32))
    assert (dense.stride, dense.itemsize) == ((5, 1), 4)


def test_a_layout_keeps_the_owners_of_its_tensors() -> None:
    arrays = [np.zeros((2, 64), np.uint8) for _ in range(2)]
    views = [TensorView.of(str(number), array) for number, array in enumerate(arrays)]
    for head_dim in (None, 1):
        layout = KVLayout.from_tensors((replace(view, head_dim=head_dim) for view in views), 2)
        assert [owner is array for owner, array in zip(layout.owners, arrays, strict=True)] == [
            True,
            True,
        ]


READ_ONLY = np.zeros(4, np.uint8)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("array", "said"),
    [
        ([1, 2], "tensor 'kv' is a list; allowed: a numpy array, or what has __array_interface__"),
        (READ_ONLY, "tensor 'kv' has elements of type |u1 and is read-only; allowed: a writable"),
        (np.array([{}]), "tensor 'kv' has elements of type |O; allowed: a writable array of num"),
        (
            np.zeros(4, [("a", "u2"), ("b", "u1")])["a"],
            "tensor 'kv' has strides of (3,) bytes; allowed: multiples of the 2 bytes of an elem",
        ),
    ],
)
def test_what_is_no_array_of_numbers_has_no_view(array: object, said: str) -> None:
    with pytest.raises(LayoutError) as raised:
        TensorView.of("kv", array)
    assert said in str(raised.value)
