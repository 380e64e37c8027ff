# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from flexkv.engine.worker.block_sizes import BlockSizes, SizedPart
from flexkv.types.mover import Direction

LOAD, STORE = Direction.LOAD, Direction.STORE
PARTS = [SizedPart(0, range(2)), SizedPart(10, range(2, 5)), SizedPart(15, range(5, 6))]
"""Ten blocks of two planes, five of three, and the rest of one."""
BYTES, STORED = [1, 2, 10, 20, 40, 300], [1, 2, 3]


def test_blocks_of_one_kind_have_all_planes() -> None:
    sizes = BlockSizes([1, 2, 4], [0, 2])
    assert sizes.of(LOAD, [7, 7, 0]) == 21
    assert sizes.of(STORE, [7, 9]) == 10
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
    sizes = BlockSizes(BYTES, STORED, PARTS)
    assert sizes.of(LOAD, blocks, planes) == loaded
    assert sizes.of(STORE, blocks, planes) == stored
