# SPDX-License-Identifier: Apache-2.0
"""Loads in parts on the emulated device: each part has its own time, and the engine's stream waits
for the parts that a layer needs."""

from __future__ import annotations

import time

import pytest

from flexkv.engine.orders import StepOrders
from flexkv_kernels import CudaMode, CudaMover, Direction
from kernels.tests.fake_cuda.fake_driver import FakeCuda, FakeStream
from kernels.tests.layerwise import check_figures, end_step, layerwise, make_arena, worker_of
from kernels.tests.worlds import simple_world

MODES = list(CudaMode)[1:]
LAYERS, BLOCKS, PAGE = 6, 8, 4096
STAGES = 8
"""Segments of the ring: so many parts may be between their first and their last byte."""


@pytest.mark.parametrize("mode", MODES)
def test_parts_are_timed_from_their_own_first_byte(fake: FakeCuda, mode: CudaMode) -> None:
    fake.delay(3000)
    world = simple_world(BLOCKS, PAGE, LAYERS, BLOCKS)
    arena = make_arena(world.planes, BLOCKS)
    for slot in range(BLOCKS):
        arena.slot_view(slot)[:] = world.arena[slot * world.block_bytes :][: world.block_bytes]
    expected = world.after(
        Direction.LOAD, range(BLOCKS), range(0, world.arena.size, world.block_bytes)
    )[0]
    base = world.pages.address
    mover = CudaMover(
        [plane._replace(base=base + plane.base) for plane in world.planes],
        BLOCKS,
        arena.address,
        arena.spec.total_bytes,
        0,
        fake.options(mode=mode),
    )
    stream = FakeStream(fake)
    side = worker_of(
        arena,
        mover,
        world.planes,
        [range(layer, layer + 1) for layer in range(LAYERS)],
        lambda: stream.handle,
    )
    stream.fill(base, 0xAB, world.pages.size)  # step 1 writes all pages
    side.finished(StepOrders(step=1, has_forward=True))
    orders = layerwise(range(BLOCKS), range(BLOCKS), follows=1)
    began = time.monotonic()
    side.start_loads(orders)
    for layer in range(LAYERS):
        side.wait_for_layer(str(layer))
    stream.drain()  # it has waited for all layers
    assert world.pages[:] == expected
    counted = end_step(side, orders)
    seconds = time.monotonic() - began
    check_figures(counted, world.pages.size, seconds, STAGES if mode is CudaMode.STAGED else 1)
    mover.close()
    stream.destroy()
    arena.close()
