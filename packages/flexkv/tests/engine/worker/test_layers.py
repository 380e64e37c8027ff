# SPDX-License-Identifier: Apache-2.0
"""Parts of a block: together they are all of it, and no layer begins before its part."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flexkv import KVLayout, TensorView
from flexkv.engine.worker.layers import layers_of, split_layers
from flexkv.engine.worker.pages import PlacedPages
from flexkv.layout import share_of

BLOCKS = 4


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    """Layers of some heads, each in memory of its own or all in one block; some share theirs."""
    layers, heads = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    page = heads * 64
    by_head, merged = draw(st.booleans()), draw(st.booleans())
    stride = page * layers if merged else page
    views = []
    for layer in range(layers):
        base = 4096 + (layer * page if merged else layer * page * BLOCKS)
        view = TensorView(
            f"layer{layer}",
            base,
            (BLOCKS, heads, 64),
            (stride, 64, 1),
            1,
            1 if by_head else None,
            page_dim=0,
        )
        views.append(view)
        if draw(st.booleans()):
            views.append(replace(view, name=f"twin{layer}"))
    return KVLayout.from_tensors(views, BLOCKS)


@given(layouts(), st.integers(1, 3), st.integers(1, 9))
def test_no_byte_of_a_layer_lies_behind_its_part(
    layout: KVLayout, replicas: int, parts: int
) -> None:
    if len(layout.heads) > 1:
        replicas = 1  # ranks that hold the same hold one head
    planes, _ = share_of(layout.place(1), 0, replicas)
    split = split_layers(planes, layout.starts, parts)
    assert [i for part in split.planes for i in part] == list(range(len(planes)))
    assert 1 <= len(split.planes) <= parts
    assert split.last.keys() == layout.starts.keys()
    page = sum(plane.page_bytes for plane in planes) // len(
        {min(bases) for bases in layout.starts.values()}
    )
    for layer, bases in layout.starts.items():
        stop = split.planes[split.last[layer]].stop
        covered = {
            address
            for plane in planes[:stop]
            for address in range(plane.base, plane.base + plane.row_bytes, 16)
        }
        begin = min(bases)
        assert set(range(begin, begin + page, 16)) <= covered


def test_layers_are_spread_evenly() -> None:
    views = [TensorView(f"l{i}", 4096 + i * 256, (BLOCKS, 64), (64, 1), 1) for i in range(20)]
    layout = KVLayout.from_tensors(views, BLOCKS)
    split = split_layers(layout.place(1), layout.starts)
    assert [len(part) for part in split.planes] == [2, 3, 2, 3, 2, 3, 2, 3]
    assert split.last["l0"] == 0
    assert split.last["l19"] == 7


def test_a_layer_of_two_tensors_has_all_when_the_second_is_there() -> None:
    def tensor(layer: int, base: int) -> TensorView:
        return TensorView(f"layer{layer}", base, (BLOCKS, 64), (64, 1), 1)

    views = [
        tensor(layer, 4096 * (1 + 2 * layer + part)) for layer in range(3) for part in range(2)
    ]
    layout = KVLayout.from_tensors(views, BLOCKS)
    split = split_layers(layout.place(1), layout.starts)
    assert split.planes == (range(2), range(2, 4), range(4, 6))
    assert split.last == {"layer0": 0, "layer1": 1, "layer2": 2}


def test_parts_of_several_layouts_come_in_the_order_of_the_layers() -> None:
    def pages(names: str, begin: float, share: float, numbers: range) -> PlacedPages:
        """Layers whose pages take so many planes together."""
        views = [
            TensorView(f"{name}", 4096 * (1 + i), (BLOCKS, 64), (64, 1), 1)
            for name in names
            for i in range(len(numbers))
            if i * len(names) // len(numbers) == names.index(name)
        ]
        layout = KVLayout.from_tensors(views, BLOCKS)
        planes = layout.place(1)
        assert len(planes) == len(numbers)
        return PlacedPages(layout, planes, numbers, 0, numbers, begin, share)

    merged = layers_of(
        [
            pages("13", 0.0, 1.0, range(4)),
            pages("0", 0.0, 0.5, range(4, 7)),
            pages("2", 0.5, 0.5, range(7, 12)),
        ]
    )
    assert merged.planes == (range(2), range(4, 7), range(2, 4), range(7, 12))
    assert merged.last == {"1": 0, "0": 1, "3": 2, "2": 3}
