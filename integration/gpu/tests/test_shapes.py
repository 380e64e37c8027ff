# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' address arithmetic and their check of copies, with the CPU's mover."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch

from flexkv.layout import KVLayout, TensorView
from flexkv.types.mover import LAYER_PARTS, Direction
from flexkv_kernels import CpuMover
from integration.gpu import both_ways, contenders, goals, one_way, smoke, submit
from integration.gpu.lab import describe_arena
from integration.gpu.rig import Copy, Rig, WrongBytesError, mover_copies
from integration.gpu.shapes import (
    BLOCK_BYTES,
    KIB,
    LAYOUTS,
    MIB,
    SHAPES,
    Order,
    Shape,
    random_order,
)
from integration.gpu.sizes import FULL, QUICK

BLOCKS = 8
ids = pytest.mark.parametrize("shape", [*SHAPES, *LAYOUTS], ids=lambda shape: shape.name)
PAGES_64 = Shape(64 * KIB)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with closing(Rig(BLOCKS, "cpu")) as made:
        yield made


def cpu_mover(rig: Rig, shape: Shape) -> CpuMover:
    arena = rig.arena
    return CpuMover(rig.planes(shape), rig.blocks(shape), arena.address, arena.spec.total_bytes, 1)


def test_all_page_sizes_of_the_goals_are_there() -> None:
    names = [shape.name for shape in SHAPES]
    pages = ["4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "2 MiB"]
    assert names == ["256 B rows", *(f"{size} pages" for size in pages)]
    wanted = [goals.ONE_WAY_SHORT, None, *[goals.ONE_WAY_LONG] * 5]
    assert [one_way.goal_of(shape) for shape in SHAPES] == wanted


@ids
def test_a_mover_passes_the_check(rig: Rig, shape: Shape) -> None:
    mover = cpu_mover(rig, shape)
    assert mover.block_bytes == shape.block_bytes
    whole = rig.order(shape)
    try:
        for order in (whole, whole.part(0, 2)):
            rig.check(shape, order, mover_copies(mover, order))
    finally:
        mover.close()


@ids
def test_copies_run_by_run_are_the_same(rig: Rig, shape: Shape) -> None:
    """Contenders copy by these addresses."""
    order = rig.order(shape).first(2 * BLOCK_BYTES)

    def copy(direction: Direction) -> Copy:
        pages, arena = rig.addresses(shape, order)
        ends = (arena, pages) if direction is Direction.LOAD else (pages, arena)

        def run() -> None:
            for source, target in zip(*(end.tolist() for end in ends), strict=True):
                ctypes.memmove(target, source, shape.run_bytes)

        return run

    rig.check(shape, order, {direction: copy(direction) for direction in Direction})


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("place", ["in", "beside"])
def test_one_wrong_byte_is_noticed(rig: Rig, direction: Direction, place: str) -> None:
    shape = Shape(16 * KIB)
    whole = rig.order(shape)
    order = whole.part(0, 4)
    mover = cpu_mover(rig, shape)
    copies = mover_copies(mover, order)
    real = copies[direction]
    block = order.blocks[0] if place == "in" else whole.blocks[5]
    offset = order.offsets[0] if place == "in" else whole.offsets[5]

    def wrong() -> None:
        real()
        at = rig.base + block * shape.run_bytes + 7
        if direction is Direction.STORE:
            at = rig.arena.address + offset + BLOCK_BYTES - 1
        byte = ctypes.c_uint8.from_address(at)
        byte.value ^= 1

    with pytest.raises(WrongBytesError, match="1 bytes are wrong"):
        rig.check(shape, order, copies | {direction: wrong})
    mover.close()


def test_a_wrong_mover_is_a_row_and_a_right_one_is_none(rig: Rig) -> None:
    shape, order = PAGES_64, rig.order(PAGES_64)
    mover = cpu_mover(rig, shape)
    right = mover_copies(mover, order)
    assert smoke.check_row(rig, shape, "FlexKV", order, right) is None
    nothing: dict[Direction, Copy] = {direction: lambda: None for direction in Direction}
    row = smoke.check_row(rig, shape, "FlexKV", order, right | nothing)
    assert row is not None
    assert not row.passed
    assert 0 < row.value <= rig.pages.numel()
    assert row.what == "64 KiB pages, FlexKV: wrong bytes"
    mover.close()


def test_random_orders_have_every_block_and_slot_once() -> None:
    order = random_order(PAGES_64, 64, 4096, seed=1)
    assert sorted(order.blocks) == list(range(64))
    assert sorted(order.offsets) == [4096 + slot * BLOCK_BYTES for slot in range(64)]
    assert order != random_order(PAGES_64, 64, 4096, seed=2)
    assert list(order.blocks) != list(range(64))


def test_blocks_of_a_slot_follow_one_another_in_each_head() -> None:
    shape = Shape(256, tokens=16, heads=2, block_bytes=64 * KIB, slot_blocks=4)
    assert shape.blocks_in(10 * 64 * KIB) == 8
    order = random_order(shape, 8, 4096, seed=1)
    slots = [4096, 4096 + shape.slot_bytes]
    wanted = [[slot + place * 32 * KIB for place in range(4)] for slot in slots]
    assert [list(order.offsets[:4]), list(order.offsets[4:])] in (wanted, wanted[::-1])
    last = shape.planes(0, 8)[-1]  # of the last head and layer
    assert last[5] == 4 * 32 * KIB + 28 * KIB


def test_parts_are_layers_and_have_each_plane_once() -> None:
    shape = next(shape for shape in LAYOUTS if shape.name == "Llama 8B, eighths of the layers")
    parts = shape.plane_parts()
    assert [len(part) for part in parts] == [32] * 8
    planes = shape.planes(0, 8)
    layer_bytes = 8 * 16 * 8 * 512
    for number, part in enumerate(parts):
        layers = {planes[plane][0] // layer_bytes for plane in part}
        assert layers == set(range(4 * number, 4 * number + 4))
    latent = LAYOUTS[-1].plane_parts()
    assert [plane for part in latent for plane in part] == list(range(61))
    assert random_order(shape, 8, 0, seed=1).parts == tuple(parts)


def of_an_engine(shape: Shape, tokens: int, row: int) -> list[tuple[int, ...]]:
    """The same pages as FlexKV divides those of an engine: [blocks, tokens, heads, row] a layer."""
    blocks, heads = 2 * shape.slot_blocks, shape.heads
    sizes = (blocks, heads, tokens, row // 2)
    strides = (tokens * heads * row // 2, row // 2, heads * row // 2, 1)
    views = [
        TensorView(str(layer), layer * blocks * tokens * heads * row, sizes, strides, 2, 1, 0)
        for layer in range(shape.layers)
    ]
    return [tuple(p) for p in KVLayout.from_tensors(views, blocks).place(shape.slot_blocks)]


@pytest.mark.parametrize("shape", LAYOUTS, ids=lambda shape: shape.name)
def test_layouts_are_those_of_engines(shape: Shape) -> None:
    rows = shape.tokens if shape.tokens > 1 else 64 if shape.run_bytes == 72 * KIB else 16
    row = shape.run_bytes if shape.tokens > 1 else shape.run_bytes // rows
    expected = of_an_engine(shape, rows, row)
    found = shape.planes(0, 2 * shape.slot_blocks)
    pages = [(p[0], p[1], p[2] * p[4], p[5]) for p in found]
    assert pages == [(p[0], p[1], p[2] * p[4], p[5]) for p in expected]
    if shape.tokens > 1:
        assert found == expected


def test_the_layouts_that_copies_find_hard_are_there() -> None:
    assert max(shape.slot_blocks for shape in LAYOUTS) == 16
    assert {shape.slot_blocks * 16 for shape in LAYOUTS} >= {64, 256}
    assert sum(shape.parts == LAYER_PARTS for shape in LAYOUTS) == 2
    assert sum(shape.block_bytes > 4 * MIB for shape in LAYOUTS) == 3
    assert any(shape.heads == 1 and shape.block_bytes == 640 * KIB for shape in LAYOUTS)
    for shape in LAYOUTS:
        assert one_way.goal_of(shape) == goals.ONE_WAY_LAYOUTS
        for sizes in (FULL, QUICK):
            moved = shape.blocks_in(sizes.blocks * BLOCK_BYTES) * shape.block_bytes
            assert 256 * MIB <= moved <= 1 << 30


def test_both_directions_at_once(rig: Rig) -> None:
    shape, order = PAGES_64, rig.order(PAGES_64)
    mover = cpu_mover(rig, shape)
    rig.slots.fill_(7)
    parts = {Direction.LOAD: order.part(0, 4), Direction.STORE: order.part(4, 8)}
    before = rig.pages.clone()
    both_ways.by_mover(mover, parts)()
    loaded = shape.slots_of(rig.pages, parts[Direction.LOAD].blocks)
    assert bool((loaded == 7).all())
    stored = shape.slots_of(before, parts[Direction.STORE].blocks)
    first = rig.arena.spec.slots_offset
    rows = torch.tensor([(o - first) // BLOCK_BYTES for o in parts[Direction.STORE].offsets])
    assert torch.equal(rig.slots.view(-1, BLOCK_BYTES)[rows], stored.view(4, -1))
    mover.close()


def test_submits_are_timed(rig: Rig) -> None:
    mover = cpu_mover(rig, PAGES_64)
    calls, works = submit.times(mover, Direction.STORE, rig.order(PAGES_64).part(0, 1), 5)
    assert len(calls) == len(works) == 5
    assert min(calls) > 0
    mover.close()


@pytest.mark.parametrize("name", list(one_way.CONTENDER_RUNS))
def test_contenders_copy_at_least_one_block_and_no_more_than_their_share(name: str) -> None:
    for shape in (*SHAPES, *LAYOUTS):
        order = random_order(shape, shape.blocks_in(480 * BLOCK_BYTES), 0, seed=0)
        part = one_way.contender_order(name, shape, order)
        assert 1 <= len(part) <= len(order)
        assert len(part) == 1 or len(part) * shape.runs <= one_way.CONTENDER_RUNS[name]


COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
)


def native_loop(
    copy: Callable[..., int], targets: array[int], sources: array[int], size: int
) -> int:
    loop = contenders.page_loop()
    ends = targets.buffer_info()[0], sources.buffer_info()[0]
    return int(loop(COPY(copy), *ends, len(targets), size, 5))


def test_the_native_loop_calls_the_driver_for_each_page() -> None:
    calls = []

    def copy(target: int, source: int, size: int, stream: int | None) -> int:
        calls.append((target, source, size, stream))
        return 700 if target == 30 else 0

    assert native_loop(copy, array("Q", [10, 20]), array("Q", [1, 2]), 4096) == 0
    assert calls == [(10, 1, 4096, 5), (20, 2, 4096, 5)]
    assert native_loop(copy, array("Q", [10, 30, 40]), array("Q", [1, 2, 3]), 8) == 700
    assert len(calls) == 4


def test_the_arena_is_described(rig: Rig) -> None:
    text = describe_arena(rig.arena, 0.5)
    assert text.startswith("arena: 18 MiB in pages of ")
    assert text.endswith("page-locked, and a mover started, in 0.50 s")
    assert "NUMA node" in text


def test_orders_are_cut_like_sequences() -> None:
    order = Order(array("Q", range(10)), array("Q", range(0, 100, 10)))
    part = order.part(3, 6)
    assert (list(part.blocks), list(part.offsets)) == ([3, 4, 5], [30, 40, 50])
    assert part.bytes == 3 * BLOCK_BYTES
