# SPDX-License-Identifier: Apache-2.0
"""The worlds of the GPU tests, on the emulated device: those tests must know what is right."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from flexkv.layout import KVLayout, TensorView  # noqa: E402
from flexkv_kernels import CudaMode, Direction, Status  # noqa: E402
from kernels.tests.fake_cuda.fake_driver import FakeCuda  # noqa: E402
from kernels.tests.gpu.gpu_world import (  # noqa: E402
    KIB,
    LAYOUTS,
    GpuWorld,
    ModelLayout,
    gpu_world,
)

FORCED = [mode for mode in CudaMode if mode is not CudaMode.AUTO]
KINDS = ["NHD", "HND", "opaque", "odd", *LAYOUTS]


def emulated(kind: str, fake: FakeCuda) -> GpuWorld:
    """As small as it can be: places in two slots of the largest kind, or few large blocks."""
    large = kind in {"5MiB", "MLA"}
    return gpu_world(kind, 3 if large else 18, 2 if large else 17, "cpu", fake.path)


def copy(
    world: GpuWorld, mode: CudaMode, direction: Direction, parts: Sequence[range | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy blocks to places in another order; returns what the world must be."""
    places = [0, 1] if world.slots < 5 else [16, 5, 0, 3, 1]
    blocks = list(range(len(places), 0, -1))
    expected = world.after(direction, blocks, places)
    with closing(world.mover(mode)) as mover:
        offsets = world.offsets(places)
        for ticket in [mover.submit(direction, blocks, offsets, planes=part) for part in parts]:
            assert mover.wait(ticket, 60) is Status.DONE, mover.error()
        if mode is CudaMode.STAGED:
            assert {way for way, size in mover.bytes_by_mode().items() if size} == {mode}
    return expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", FORCED, ids=lambda mode: mode.name)
def test_copies_leave_what_worlds_expect(kind: str, mode: CudaMode, fake: FakeCuda) -> None:
    world = emulated(kind, fake)
    for direction in Direction:
        for parts in ([None], world.eighths()):
            world.fill()
            assert world.same(copy(world, mode, direction, parts))


def test_a_part_that_was_not_copied_is_noticed(fake: FakeCuda) -> None:
    world = emulated("slot64", fake)
    assert not world.same(copy(world, CudaMode.KERNEL, Direction.LOAD, world.eighths()[1:]))


def views(layout: ModelLayout, blocks: int) -> list[TensorView]:
    """The tensors of an engine: [blocks, tokens, heads, row] in bf16, one a layer."""
    tokens = layout.tokens if layout.tokens > 1 else 16
    row = layout.row * layout.tokens // tokens // 2
    shape = (blocks, layout.heads, tokens, row)
    strides = (layout.heads * tokens * row, row, layout.heads * row, 1)
    size = 2 * strides[0] * blocks
    return [TensorView(str(n), n * size, shape, strides, 2, 1, 0) for n in range(layout.layers)]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_layouts_are_those_of_engines(kind: str) -> None:
    """As FlexKV divides the pages: alike but for rows that follow one another."""
    layout = LAYOUTS[kind]
    blocks = 2 * layout.slot_blocks
    placed = KVLayout.from_tensors(views(layout, blocks), blocks).place(layout.slot_blocks)
    found = layout.planes(blocks)
    assert [(p.base, p.block_stride, p.page_bytes, p.slot_offset) for p in found] == [
        (p.base, p.block_stride, p.page_bytes, p.slot_offset) for p in placed
    ]
    if layout.tokens > 1:
        assert [tuple(p) for p in found] == [tuple(p) for p in placed]
    assert sum(p.page_bytes for p in found) in {512 * KIB, 640 * KIB, 5 << 20, 61 * 72 * KIB}
