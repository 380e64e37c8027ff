# SPDX-License-Identifier: Apache-2.0
"""The CUDA mover on a real GPU: byte-exact copies, and their order with the engine's streams."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from flexkv_kernels import (  # noqa: E402
    CudaMode,
    CudaMover,
    Direction,
    Status,
    calibrated,
    cuda_device,
)
from kernels.tests.gpu.gpu_world import DEVICE, LAYOUTS, GpuWorld, gpu_world  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
KINDS = ["NHD", "HND", "opaque", "odd", "large"]
LEGACY_STREAM = 1
PAUSE = 50_000_000
"""Cycles that a stream sleeps: some 25 ms."""


@pytest.fixture(params=[*CudaMode], ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest) -> CudaMode:
    chosen: CudaMode = request.param
    if chosen is CudaMode.TMA and cuda_device(DEVICE).capability < (9, 0):
        pytest.skip("this device has no bulk copies")
    return chosen


def done(mover: CudaMover, ticket: int) -> None:
    assert mover.wait(ticket, 60) is Status.DONE, mover.error()


def some(count: int, of: int) -> list[int]:
    return random.Random(of).sample(range(of), count)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_byte_exact_and_touch_nothing_else(kind: str, mode: CudaMode) -> None:
    world = gpu_world(kind, num_blocks=24, slots=20)
    mover = world.mover(mode)
    for count in (1, 7, 20):
        for direction in Direction:
            world.fill()
            blocks, slots = some(count, 24), some(count, 20)
            expected = world.after(direction, blocks, slots)
            done(mover, mover.submit(direction, blocks, world.offsets(slots)))
            assert world.same(expected)
    mover.close()


@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_layouts_of_models_are_copied_whole_and_by_layers(kind: str, mode: CudaMode) -> None:
    world = gpu_world(kind, num_blocks=40, slots=32)
    mover = world.mover(mode)
    blocks, places = some(32, 40), some(32, 32)
    offsets = world.offsets(places)
    for direction in Direction:
        for parts in ([None], world.eighths()):
            world.fill()
            expected = world.after(direction, blocks, places)
            for ticket in [mover.submit(direction, blocks, offsets, planes=p) for p in parts]:
                done(mover, ticket)
            assert world.same(expected)
    if mode is CudaMode.STAGED:
        assert {way for way, size in mover.bytes_by_mode().items() if size} == {mode}
    mover.close()


@pytest.mark.parametrize("thread_blocks", [1, 3, 64])
def test_any_number_of_thread_blocks_copies_everything(mode: CudaMode, thread_blocks: int) -> None:
    world = gpu_world("NHD", num_blocks=600, slots=600)  # more blocks than one launch takes
    mover = world.mover(mode, thread_blocks)
    for direction in Direction:
        world.fill()
        blocks, slots = some(600, 600), list(range(600))
        expected = world.after(direction, blocks, slots)
        done(mover, mover.submit(direction, blocks, world.offsets(slots)))
        assert world.same(expected)
    mover.close()


@pytest.mark.parametrize("kind", ["NHD", "HND", "opaque", "odd"])
def test_each_layer_for_itself(mode: CudaMode, kind: str) -> None:
    world = gpu_world(kind, num_blocks=300, slots=300)  # more blocks than one launch takes
    mover = world.mover(mode)
    for direction in Direction:
        world.fill()
        blocks, slots = some(300, 300), list(range(300))
        for layer in reversed(world.layers()):
            expected = world.after(direction, blocks, slots, layer)
            done(mover, mover.submit(direction, blocks, world.offsets(slots), planes=layer))
            assert world.same(expected)
    mover.close()


def test_layers_at_once_make_a_whole_load(mode: CudaMode) -> None:
    world = gpu_world("NHD", num_blocks=64, slots=64)
    mover = world.mover(mode)
    blocks, slots = some(64, 64), list(range(64))
    for _ in range(10):
        world.fill()
        expected = world.after(Direction.LOAD, blocks, slots)
        single = [range(number, number + 1) for number in range(len(world.planes))]
        tickets = [
            mover.submit(Direction.LOAD, blocks, world.offsets(slots), planes=part)
            for part in single
        ]
        for ticket in tickets:
            done(mover, ticket)
        assert world.same(expected)
    mover.close()


@pytest.mark.parametrize("own_stream", [True, False])
def test_a_stream_uses_each_layer_when_it_is_there(mode: CudaMode, own_stream: bool) -> None:
    world = gpu_world("HND", num_blocks=512, slots=512)
    mover = world.mover(mode)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    handle = stream.cuda_stream if own_stream else LEGACY_STREAM
    blocks, slots = some(512, 512), list(range(512))
    for _ in range(5):
        world.fill()
        expected = world.after(Direction.LOAD, blocks, slots)[0]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(PAUSE)  # until then nothing is loaded
        tickets = [
            mover.submit(Direction.LOAD, blocks, world.offsets(slots), after=handle, planes=layer)
            for layer in world.layers()
        ]
        used = []
        for ticket, layer in zip(tickets, world.layers(), strict=True):
            assert mover.hold(ticket, handle) in {Status.PENDING, Status.DONE}
            first = world.planes[layer[0]]
            pages = slice(first.base, first.base + 512 * first.block_stride)
            with torch.cuda.stream(stream):
                used.append((pages, world.pages[pages].clone()))
        stream.synchronize()
        for pages, seen in used:
            assert torch.equal(seen, expected[pages])
        for ticket in tickets:
            done(mover, ticket)
            assert mover.hold(ticket, handle) is Status.DONE
    mover.close()


def test_slots_at_odd_offsets(mode: CudaMode) -> None:
    world = gpu_world("HND", num_blocks=8, slots=8)
    mover = world.mover(mode)
    before = world.arena.clone()
    done(mover, mover.submit(Direction.STORE, [3], [12_345]))
    done(mover, mover.submit(Direction.LOAD, [5], [12_345]))
    expected = world.after(Direction.STORE, [3], [0])[1][: world.block_bytes]
    end = 12_345 + world.block_bytes
    assert torch.equal(world.arena[12_345:end], expected)
    assert torch.equal(world.arena[:12_345], before[:12_345])
    assert torch.equal(world.arena[end:], before[end:])
    assert torch.equal(world.after(Direction.STORE, [5], [0])[1][: world.block_bytes], expected)
    mover.close()


@pytest.mark.parametrize("own_stream", [True, False])
def test_a_store_follows_the_forward(mode: CudaMode, own_stream: bool) -> None:
    world = gpu_world("NHD", num_blocks=32, slots=32)
    mover = world.mover(mode)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    blocks = some(32, 32)
    for value in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(PAUSE)
            world.pages.fill_(value)
        after = stream.cuda_stream if own_stream else LEGACY_STREAM
        ticket = mover.submit(Direction.STORE, blocks, world.offsets(range(32)), after=after)
        done(mover, ticket)
        assert bool((world.arena[: 32 * world.block_bytes] == value).all())
    mover.close()


def test_a_load_follows_what_still_reads_the_pages(mode: CudaMode) -> None:
    world = gpu_world("HND", num_blocks=32, slots=32)
    mover = world.mover(mode)
    stream = torch.cuda.Stream()
    for _ in range(5):
        world.fill()
        blocks, slots = some(32, 32), list(range(32))
        expected = world.after(Direction.LOAD, blocks, slots)
        before = world.pages.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(PAUSE)
            seen = world.pages.clone()
        ticket = mover.submit(
            Direction.LOAD, blocks, world.offsets(slots), after=stream.cuda_stream
        )
        done(mover, ticket)
        stream.synchronize()
        assert torch.equal(seen, before)
        assert world.same(expected)
    mover.close()


def test_the_flag_in_the_arena_rises_after_the_last_byte(mode: CudaMode) -> None:
    world = gpu_world("opaque", num_blocks=16, slots=16)
    mover = world.mover(mode)
    flag = world.memory.word(world.flag_offset)
    for _ in range(20):
        world.fill()
        blocks, slots = some(16, 16), list(range(16))
        flag.value = Status.PENDING
        expected = world.after(Direction.STORE, blocks, slots)[1][: 16 * world.block_bytes]
        ticket = mover.submit(
            Direction.STORE, blocks, world.offsets(slots), flag_address=world.flag_address
        )
        while flag.value == Status.PENDING:
            pass
        assert torch.equal(world.arena[: 16 * world.block_bytes], expected)
        assert flag.value == Status.DONE
        done(mover, ticket)
    mover.close()


def test_loads_stores_and_compute_race(mode: CudaMode) -> None:
    """Half of the blocks is loaded and then used, while the other half is computed and stored."""
    world = gpu_world("NHD", num_blocks=64, slots=64)
    mover = world.mover(mode)
    stream = torch.cuda.Stream()
    lower, upper = list(range(32)), list(range(32, 64))
    for round_number in range(30):
        world.fill()
        loaded = world.after(Direction.LOAD, lower, lower)
        load = mover.submit(Direction.LOAD, lower, world.offsets(lower), after=stream.cuda_stream)
        with torch.cuda.stream(stream):
            for plane in world.planes:
                paged = world.pages.as_strided(
                    (64, plane.rows, plane.row_bytes),
                    (plane.block_stride, plane.row_stride, 1),
                    plane.base,
                )
                paged[32:].fill_(round_number + 1)
        store = mover.submit(Direction.STORE, upper, world.offsets(upper), after=stream.cuda_stream)
        done(mover, load)
        with torch.cuda.stream(stream):  # the engine computes on what was loaded
            used = world.pages.clone()
        done(mover, store)
        stream.synchronize()
        half = 32 * world.block_bytes
        assert bool((world.arena[half : 2 * half] == round_number + 1).all())
        for plane in world.planes:
            shape = (64, plane.rows, plane.row_bytes)
            strides = (plane.block_stride, plane.row_stride, 1)
            got = used.as_strided(shape, strides, plane.base)[:32]
            assert torch.equal(got, loaded[0].as_strided(shape, strides, plane.base)[:32])
    mover.close()


def test_both_directions_at_once(mode: CudaMode) -> None:
    world = gpu_world("HND", num_blocks=2048, slots=2048)
    mover = world.mover(mode)
    lower, upper = list(range(1024)), list(range(1024, 2048))
    for _ in range(3):
        world.fill()
        pages = world.after(Direction.LOAD, lower, lower)[0]
        arena = world.after(Direction.STORE, upper, upper)[1]
        tickets = [
            mover.submit(Direction.STORE, upper, world.offsets(upper)),
            mover.submit(Direction.LOAD, lower, world.offsets(lower)),
        ]
        for ticket in tickets:
            done(mover, ticket)
        assert world.same((pages, arena))
    mover.close()


def test_closing_with_copies_queued_and_running(mode: CudaMode) -> None:
    world = gpu_world("opaque", num_blocks=64, slots=64)
    mover = world.mover(mode)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE)
    many = some(64, 64) * 40
    tickets = [
        mover.submit(
            Direction.STORE, many, world.offsets([0] * len(many)), after=stream.cuda_stream
        )
        for _ in range(5)
    ]
    mover.close()
    assert {mover.poll(ticket) for ticket in tickets} <= {Status.DONE, Status.FAILED}
    assert mover.poll(tickets[-1]) is Status.FAILED
    after = world.arena.clone()
    torch.cuda.synchronize()
    assert torch.equal(world.arena, after)
    again = world.mover(mode)  # the arena can be registered once more
    done(again, again.submit(Direction.STORE, [1], [0]))
    again.close()


def test_the_device_is_measured(tmp_path: Path) -> None:
    world = gpu_world("NHD", num_blocks=8, slots=8)
    planes = world.placed_planes
    first = calibrated(DEVICE, planes, range(len(planes)), cache_dir=tmp_path)
    print(f"{cuda_device(DEVICE)}: {first}\n{first.samples}")
    assert calibrated(DEVICE, planes, range(len(planes)), cache_dir=tmp_path) == first
    assert len(list(tmp_path.iterdir())) == 1


FAULT = """
import torch
from flexkv_kernels import CudaMode, Direction
from kernels.tests.gpu.gpu_world import gpu_world

world = gpu_world("HND", num_blocks=16, slots=16)
mover = world.mover(CudaMode.DMA)
stream = torch.cuda.Stream()
many = list(range(16)) * 100
pages, outside = torch.zeros(4, device="cuda"), torch.tensor([1 << 20], device="cuda")
torch.cuda.synchronize()  # nothing below waits for the device before the copies are queued
with torch.cuda.stream(stream):
    torch.cuda._sleep(50_000_000)
    pages[outside]  # asserts on the device
tickets = [
    mover.submit(Direction.STORE, many, world.offsets([0] * len(many)), after=stream.cuda_stream)
    for _ in range(4)
]
print([mover.wait(ticket, 60).name for ticket in tickets])
print("error:", mover.error())
mover.close()
print("closed", flush=True)
import os
os._exit(0)
"""


def test_a_fault_of_the_engine_fails_the_copies_and_hangs_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FAULT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "FAILED" in run.stdout, run.stdout + run.stderr
    assert "error: CUDA_ERROR" in run.stdout
    assert run.stdout.rstrip().endswith("closed")


def test_worlds_notice_a_byte_that_differs() -> None:
    world: GpuWorld = gpu_world("odd", num_blocks=4, slots=4)
    expected = world.after(Direction.STORE, [1], [2])
    assert not world.same(expected)
    world.arena.copy_(expected[1])
    assert world.same(expected)
    world.pages[world.planes[0].base] ^= 1
    assert not world.same(expected)
