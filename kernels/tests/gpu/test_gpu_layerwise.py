# SPDX-License-Identifier: Apache-2.0
"""On a real GPU: loads in parts beside the forward pass, and loads beside later steps."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from flexkv.engine.orders import StepOrders  # noqa: E402
from flexkv_kernels import CudaMode, CudaMover, CudaOptions, Direction  # noqa: E402
from kernels.tests.gpu.gpu_world import DEVICE, gpu_world  # noqa: E402
from kernels.tests.gpu.test_gpu_copies import PAUSE, done, mode, some  # noqa: E402
from kernels.tests.layerwise import (  # noqa: E402
    check_figures,
    end_step,
    layerwise,
    make_arena,
    worker_of,
)

__all__ = ["mode"]  # the fixture

STAGES = 8
"""Segments of the ring: so many parts may be between their first and their last byte."""


def test_a_forward_finds_each_layer_that_it_waited_for(mode: CudaMode) -> None:
    count = 256
    world = gpu_world("HND", num_blocks=count, slots=count)
    blocks, slots = some(count, count), list(range(count))
    expected = world.after(Direction.LOAD, blocks, slots)[0]
    arena = make_arena(world.planes, count)
    size = world.block_bytes
    for slot in slots:
        arena.slot_view(slot)[:size] = world.memory[slot * size : (slot + 1) * size]
    mover = CudaMover(
        world.placed_planes,
        count,
        arena.address,
        arena.spec.total_bytes,
        DEVICE,
        CudaOptions(mode=mode),
    )
    stream = torch.cuda.Stream()
    side = worker_of(arena, mover, world.planes, world.layers(), lambda: int(stream.cuda_stream))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE)
        world.pages.fill_(0xAB)  # step 1 writes all pages
    side.finished(StepOrders(step=1, has_forward=True))
    orders = layerwise(blocks, slots, follows=1)
    began = time.monotonic()
    side.start_loads(orders)
    used = []
    for number, layer in enumerate(world.layers()):
        side.wait_for_layer(str(number))
        first = world.planes[layer[0]]
        pages = slice(first.base, first.base + count * first.block_stride)
        with torch.cuda.stream(stream):
            used.append((pages, world.pages[pages].clone()))
    stream.synchronize()
    for pages, seen in used:
        assert torch.equal(seen, expected[pages])
    counted = end_step(side, orders)
    overlap = STAGES if mode in {CudaMode.AUTO, CudaMode.STAGED} else 1
    check_figures(counted, count * size, time.monotonic() - began, overlap)
    mover.close()
    arena.close()


def test_a_load_runs_beside_the_steps_behind_its_mark(mode: CudaMode) -> None:
    world = gpu_world("NHD", num_blocks=32, slots=32)
    mover = world.mover(mode)
    blocks, slots = some(32, 32), list(range(32))
    stream, ended = torch.cuda.Stream(), torch.cuda.Event()
    done(mover, mover.submit(Direction.LOAD, blocks, world.offsets(slots)))  # all is warm
    world.fill()
    expected = world.after(Direction.LOAD, blocks, slots)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE)
        world.pages.fill_(0xAB)
    handle = stream.cuda_stream
    mark = mover.mark(handle)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(40 * PAUSE)  # about a second
        ended.record()
    load = mover.submit(Direction.LOAD, blocks, world.offsets(slots), handle, mark=mark)
    done(mover, load)
    assert not ended.query()
    stream.synchronize()
    # Had the load gone before the marked work, that would have overwritten it.
    for plane in world.planes:
        shape, strides = (
            (32, plane.rows, plane.row_bytes),
            (plane.block_stride, plane.row_stride, 1),
        )
        got = world.pages.as_strided(shape, strides, plane.base)[blocks]
        assert torch.equal(got, expected[0].as_strided(shape, strides, plane.base)[blocks])
    mover.close()
