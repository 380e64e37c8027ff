# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from flexkv.engine.worker.pages import PlacedPages
from flexkv.engine.worker.rank_copies import BlockSizes
from flexkv.layout import KVLayout, TensorView
from flexkv.types.mover import Direction

LOAD, STORE = Direction.LOAD, Direction.STORE


def placed(sizes: list[int], stored: range, first: int = 0, before: int = 0) -> PlacedPages:
    """Pages of planes of these sizes; `before` planes and `first` blocks come before them."""
    views = [
        TensorView(f"layer{i}", 4096 * (1 + i), (1, size), (size, 1), 1)
        for i, size in enumerate(sizes)
    ]
    layout = KVLayout.from_tensors(views, 1)
    planes = layout.place(1)
    assert [plane.page_bytes for plane in planes] == sizes
    return PlacedPages(layout, planes, stored, first, range(before, before + len(sizes)))


PARTS = [
    placed([1, 2], range(1, 2)),
    placed([10, 20, 40], range(2), 10, 2),
    placed([300], range(0), 15, 5),
]
"""Ten blocks of two planes, five of three, and the rest of one."""


def test_blocks_of_one_kind_have_all_planes() -> None:
    sizes = BlockSizes([placed([1, 2, 4], range(1, 3))])
    assert sizes.of(LOAD, [7, 7, 0]) == 21
    assert sizes.of(STORE, [7, 9]) == 12
    assert sizes.of(LOAD, [7, 9], range(1, 3)) == 12
    assert sizes.of(LOAD, []) == 0


@pytest.mark.parametrize(
    ("blocks", "planes", "loaded", "stored"),
    [
        ([0, 9, 3], None, 9, 6),
        ([10, 14], None, 140, 60),
        ([15, 99], None, 600, 0),
        ([9, 10, 15], None, 373, 32),
        ([9, 10, 15], range(1, 4), 32, 32),
        ([9, 10, 15], range(2), 3, 2),
        ([9], range(2, 6), 0, 0),
        ([], None, 0, 0),
    ],
)
def test_blocks_of_several_parts(
    blocks: list[int], planes: range | None, loaded: int, stored: int
) -> None:
    sizes = BlockSizes(PARTS)
    assert sizes.of(LOAD, blocks, planes) == loaded
    assert sizes.of(STORE, blocks, planes) == stored
