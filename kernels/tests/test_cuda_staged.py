# SPDX-License-Identifier: Apache-2.0
"""The staged way: which transfers it takes, how it cuts them, and what it asks of the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import pytest

from flexkv.layout import KVLayout, TensorView, choose_engine_blocks
from flexkv.types.mover import LAYER_PARTS
from flexkv_kernels import CudaMode, CudaMover, Direction, Status
from kernels.tests.conftest import MakeFake
from kernels.tests.fake_cuda.fake_driver import FakeCuda, FakeStream
from kernels.tests.test_cuda_ways import HIGHEST, LOWEST, copy
from kernels.tests.worlds import Memory, Plane, World, simple_world, until

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("direction", Direction)
def test_neighbours_in_the_arena_are_one_copy_into_the_ring(
    make_fake: MakeFake, direction: Direction
) -> None:
    """Whatever the pages are: 16 rows of 256 bytes for each of 2 heads side by side."""
    fake = make_fake(version=12040, batches=False)
    planes = [Plane(head * 256, 8192, 16, 512, 256, head * 4096) for head in range(2)]
    world = World(planes, 40, Memory(40 * 8192, seed=1), Memory(40 * 8192, seed=2))
    with closing(world.cuda_mover(fake.options(mode=CudaMode.STAGED))) as mover:
        blocks = [*range(39, 9, -1), 5]
        offsets = [*range(0, 30 * 8192, 8192), 35 * 8192]
        copy(mover, world, direction, [0])  # takes the tiles to the device
        before = fake.calls("cuMemcpyAsync"), fake.calls("cuLaunchKernel")
        expected = world.after(direction, blocks, offsets)
        assert mover.wait(mover.submit(direction, blocks, offsets), 60) is Status.DONE
        assert world.now() == expected
        copies = fake.calls("cuMemcpyAsync") - before[0]
        launches = fake.calls("cuLaunchKernel") - before[1]
    assert (copies, launches) == (2, 1)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("alias", [0, 1 << 40])
def test_a_ring_is_used_again_and_again(
    make_fake: MakeFake, direction: Direction, alias: int
) -> None:
    """With delays, so that a segment that is filled before it is drained has wrong bytes."""
    fake = make_fake(alias=alias)
    fake.delay(300)
    world = simple_world(num_blocks=100, page_bytes=1024, n_planes=4, slots=100)
    options = fake.options(mode=CudaMode.STAGED, ring_bytes=8 * 2 * world.block_bytes)
    with closing(world.cuda_mover(options)) as mover:
        for _ in range(3):
            copy(mover, world, direction, range(100))


def test_both_directions_at_once_have_rings_of_their_own(fake: FakeCuda) -> None:
    fake.delay(200)
    world = simple_world(num_blocks=64, page_bytes=1024, n_planes=4, slots=64)
    size = world.block_bytes
    options = fake.options(mode=CudaMode.STAGED, ring_bytes=8 * 2 * size)
    loads, stores = range(32), range(32, 64)
    with closing(world.cuda_mover(options)) as mover:
        for _ in range(3):
            load_offsets, store_offsets = (
                [block * size for block in blocks] for blocks in (loads, stores)
            )
            pages = world.after(Direction.LOAD, loads, load_offsets)[0]
            arena = world.after(Direction.STORE, stores, store_offsets)[1]
            tickets = [
                mover.submit(Direction.STORE, stores, store_offsets),
                mover.submit(Direction.LOAD, loads, load_offsets),
            ]
            assert [mover.wait(ticket, 60) for ticket in tickets] == [Status.DONE] * 2
            assert world.now() == (pages, arena)


def test_both_stages_have_the_priority_of_their_direction(fake: FakeCuda) -> None:
    world = simple_world(num_blocks=8, page_bytes=1024, n_planes=4, slots=8)
    with closing(world.cuda_mover(fake.options(mode=CudaMode.STAGED))) as mover:
        for direction, priority in ((Direction.LOAD, HIGHEST), (Direction.STORE, LOWEST)):
            names = [f"copies@{priority}", f"kernels@{priority}"]
            before = [fake.calls(name) for name in names]
            ticket = mover.submit(direction, [3], [0])
            assert mover.wait(ticket, 60) is Status.DONE
            assert [fake.calls(name) for name in names] == [count + 1 for count in before]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", ["cuMemcpyBatchAsync", "cuLaunchKernel", "cuEventRecord"])
def test_a_refused_stage_ends_with_what_was_begun(
    fake: FakeCuda, direction: Direction, name: str
) -> None:
    """No byte is copied after the transfer has failed, and the next one is whole."""
    fake.delay(2000)
    world = simple_world(num_blocks=8, page_bytes=1024, n_planes=4, slots=8)
    options = fake.options(mode=CudaMode.STAGED, ring_bytes=8 * 2 * world.block_bytes)
    with closing(world.cuda_mover(options)) as mover:
        copy(mover, world, direction, range(8))
        fake.fail(name, 1, skip=1)
        ticket = mover.submit(direction, range(8), range(0, 8 * world.span, world.span))
        assert mover.wait(ticket, 60) is Status.FAILED
        now = world.now()
        copy(mover, world, direction, [])
        assert world.now() == now
        copy(mover, world, direction, range(8))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("name", "before"), [("cuEventRecord", 2), ("cuStreamWaitEvent", 1)])
def test_a_transfer_has_not_failed_while_its_first_stage_may_run(
    fake: FakeCuda, direction: Direction, name: str, before: int
) -> None:
    """Whoever knows that it has failed may unmap what the first stage reads."""
    world = simple_world(num_blocks=8, page_bytes=1024, n_planes=4, slots=8)
    options = fake.options(mode=CudaMode.STAGED, ring_bytes=8 * 2 * world.block_bytes)
    held = FakeStream(fake)
    with closing(world.cuda_mover(options)) as mover:
        fake.fail(name, 1, skip=before)  # the call that puts the second stage behind the first
        held.fill(world.pages.address, 0, 0)
        ticket = mover.submit(direction, [1], [0], after=held.handle)
        assert mover.wait(ticket, 0.3) is Status.PENDING
        held.release()
        assert mover.wait(ticket, 60) is Status.FAILED
    held.destroy()


@dataclass(frozen=True)
class Model:
    """What one rank has of a model: tensors [blocks, heads, tokens, numbers], in memory with heads
    behind tokens if ``nhd``; of a latent cache [blocks, tokens, numbers]."""

    layers: int
    heads: int
    numbers: int
    tokens: int = 16
    size: int = 2
    nhd: bool = True
    latent: bool = False
    ranks: int = 1

    def view(self, base: int, blocks: int) -> TensorView:
        tokens, heads, numbers = self.tokens, self.heads, self.numbers
        if self.latent:
            strides = (tokens * numbers, numbers, 1)
            return TensorView("", base, (blocks, tokens, numbers), strides, self.size, None, 0)
        inner = (numbers, heads * numbers) if self.nhd else (tokens * numbers, numbers)
        strides = (heads * tokens * numbers, *inner, 1)
        return TensorView("", base, (blocks, heads, tokens, numbers), strides, self.size, 1, 0)

    def world(self, blocks: int, block_tokens: int | None) -> tuple[World, list[int]]:
        """Pages of so many blocks, and where each has its place: those of a slot side by side."""
        layer = blocks * self.tokens * self.heads * self.numbers * self.size
        views = [self.view(number * layer, blocks) for number in range(self.layers)]
        layout = KVLayout.from_tensors(views, blocks)
        count = choose_engine_blocks(self.tokens, layout.block_bytes * self.ranks, block_tokens)
        planes = [Plane(*plane) for plane in layout.place(count)]
        slot = count * layout.block_bytes
        places = [i // count * slot + i % count * layout.head_bytes for i in range(blocks)]
        arena = Memory(max(places) + max(plane.slot_end for plane in planes), seed=2)
        return World(planes, blocks, Memory(self.layers * layer, seed=1), arena), places


MODELS = {
    "Llama 8B": Model(32, 8, 256),
    "Llama 8B, heads apart": Model(32, 8, 256, nhd=False),
    "Llama 8B, FP8": Model(32, 8, 256, size=1),
    "Llama 70B": Model(80, 8, 256),
    "Llama 70B, TP 4": Model(80, 2, 256, ranks=4),
    "Llama 70B, TP 8": Model(80, 1, 256, ranks=8),
    "Llama 1B": Model(16, 8, 128),
    "Qwen2.5 0.5B": Model(24, 2, 128),
    "Qwen2.5 7B": Model(28, 4, 256),
    "Qwen3 30B A3B": Model(48, 4, 256),
    "MHA 7B": Model(32, 32, 256),
    "MLA": Model(61, 1, 576, tokens=64, latent=True),
}


@pytest.mark.parametrize("block_tokens", [None, 64, 256])
@pytest.mark.parametrize("model", MODELS)
def test_whole_blocks_and_layers_of_models_are_staged(
    fake: FakeCuda, model: str, block_tokens: int | None
) -> None:
    """In rings of the default, and in some that are smaller than a block."""
    world, places = MODELS[model].world(3, block_tokens)
    step = -(-len(world.planes) // LAYER_PARTS)
    for part, direction, ring in (
        (range(len(world.planes)), Direction.LOAD, 0),
        (range(step, 2 * step), Direction.LOAD, 4 * MIB),
        (range(len(world.planes)), Direction.STORE, 2 * MIB),
    ):
        options = fake.options(mode=CudaMode.STAGED, ring_bytes=ring)
        with closing(world.cuda_mover(options)) as mover:
            blocks = [2, 0, 1]
            expected = world.after(direction, blocks, places, part)
            ticket = mover.submit(direction, blocks, places, planes=part)
            assert mover.wait(ticket, 60) is Status.DONE, mover.error()
            assert world.now() == expected
            sizes = {mode: size for mode, size in mover.bytes_by_mode().items() if size}
            assert sizes == {CudaMode.STAGED: 3 * sum(world.planes[i].page_bytes for i in part)}


@pytest.mark.parametrize("direction", Direction)
def test_a_block_larger_than_its_ring_goes_through_it_in_parts(
    fake: FakeCuda, direction: Direction
) -> None:
    """Also one whose only plane is, and with rows of odd lengths."""
    for planes in (
        [Plane(0, 3 * MIB, 1, 3 * MIB - 4, 3 * MIB - 4, 8)],
        [Plane(i * 999, 3 * MIB, 1024, 2997, 999, (2 - i) * 1024 * 999 + 7) for i in range(3)],
    ):
        world = World(planes, 2, Memory(6 * MIB, seed=1), Memory(7 * MIB, seed=2))
        options = fake.options(mode=CudaMode.STAGED, ring_bytes=64 * KIB)
        with closing(world.cuda_mover(options)) as mover:
            expected = world.after(direction, [1, 0], [0, 3 * MIB + 5])
            ticket = mover.submit(direction, [1, 0], [0, 3 * MIB + 5])
            assert mover.wait(ticket, 60) is Status.DONE, mover.error()
            assert world.now() == expected
            assert mover.bytes_by_mode()[CudaMode.AUTO] == 0


def test_rings_are_smaller_where_memory_is_short(make_fake: MakeFake) -> None:
    world = simple_world(num_blocks=8, page_bytes=4 * KIB, n_planes=4, slots=8)
    for memory, ring in ((1 << 30, 64 * MIB), (40 * MIB, 16 * MIB), (300 * KIB, 128 * KIB)):
        fake = make_fake()
        fake.memory(memory)
        with closing(world.cuda_mover(fake.options(mode=CudaMode.STAGED))) as mover:
            assert mover.ring_bytes == ring
            copy(mover, world, Direction.LOAD, range(8))
            assert mover.bytes_by_mode()[CudaMode.STAGED] == 8 * world.block_bytes


def test_ranges_that_nobody_foresaw_go_another_way_once_tables_are_full(fake: FakeCuda) -> None:
    world = simple_world(num_blocks=4, page_bytes=4 * KIB, n_planes=8, slots=4)
    with closing(world.cuda_mover(fake.options(mode=CudaMode.STAGED))) as mover:
        taken = [*[range(i, i + 6) for i in range(3)], range(6), range(2, 5), range(5, 7), range(1)]
        for part in taken:
            expected = world.after(Direction.LOAD, [1], [0], part)
            assert (
                mover.wait(mover.submit(Direction.LOAD, [1], [0], planes=part), 60) is Status.DONE
            )
            assert world.now() == expected
        known = sum(len(part) for part in dict.fromkeys(taken))
        assert known == 3 * len(world.planes)  # all that there is room for
        for part in (range(7), range(6)):
            assert (
                mover.wait(mover.submit(Direction.LOAD, [1], [0], planes=part), 60) is Status.DONE
            )
        assert mover.bytes_by_mode()[CudaMode.AUTO] == 7 * 4 * KIB


def sizes_of(mover: CudaMover, fake: FakeCuda, world: World, direction: Direction) -> int:
    """Launches between ring and pages of a transfer of all blocks."""
    before = fake.calls("cuLaunchKernel")
    copy(mover, world, direction, range(world.num_blocks))
    return fake.calls("cuLaunchKernel") - before


def test_the_last_segments_of_a_load_are_short(fake: FakeCuda) -> None:
    """8 MiB are 4, 2 and twice 1: the kernel works alone on the last."""
    world = simple_world(num_blocks=8, page_bytes=64 * KIB, n_planes=16, slots=8)
    with closing(world.cuda_mover(fake.options(mode=CudaMode.STAGED))) as mover:
        assert sizes_of(mover, fake, world, Direction.LOAD) == 4


@contextmanager
def busy(fake: FakeCuda) -> Iterator[None]:
    """The engine leaves room for no kernel until a test allows one, or fails: the mover's end waits
    for its kernels."""
    fake.allow_kernels(0)
    try:
        yield
    finally:
        fake.allow_kernels()


def launches(fake: FakeCuda, before: int) -> int:
    return fake.calls("cuLaunchKernel") - before


def test_scatters_that_wait_for_the_engine_become_few(fake: FakeCuda) -> None:
    """Each waits for the engine's next kernel to end: few of them carry all that is ready."""
    world = simple_world(num_blocks=64, page_bytes=64 * KIB, n_planes=16, slots=64)
    options = fake.options(mode=CudaMode.STAGED, ring_bytes=16 * MIB)  # segments of 2 MiB
    ran = fake.calls("copies ran")
    with closing(world.cuda_mover(options)) as mover:
        before = fake.calls("cuLaunchKernel")
        with busy(fake):
            ticket = mover.submit(Direction.LOAD, range(64), range(0, 64 * MIB, MIB))
            # The ring is full. One copy takes the tiles to the device as the mover starts: before
            # or after the load is ordered.
            until(lambda: fake.calls("copies ran") >= ran + 9)
            until(lambda: launches(fake, before) == 8)  # a copy may run before its launch is asked
            fake.allow_kernels(2)
            until(lambda: launches(fake, before) == 9)  # 4 MiB: 33 launches become 32 or fewer
        assert mover.wait(ticket, 60) is Status.DONE
        assert launches(fake, before) < 33
        assert world.pages[:] == world.after(Direction.LOAD, range(64), range(0, 64 * MIB, MIB))[0]


def test_gathers_that_wait_for_the_engine_become_few(fake: FakeCuda) -> None:
    """The first has 1 MiB, and each is twice as large as the one before, up to half the ring."""
    world = simple_world(num_blocks=64, page_bytes=64 * KIB, n_planes=16, slots=64)
    options = fake.options(mode=CudaMode.STAGED, ring_bytes=16 * MIB)
    with closing(world.cuda_mover(options)) as mover:
        before = fake.calls("cuLaunchKernel")
        with busy(fake):
            ticket = mover.submit(Direction.STORE, range(64), range(0, 64 * MIB, MIB))
            until(lambda: launches(fake, before) == 2)
            fake.allow_kernels(1)
            until(lambda: launches(fake, before) == 3)
            fake.allow_kernels(1)
            until(lambda: launches(fake, before) == 4)  # 15 MiB: 32 launches become 29 or fewer
        assert mover.wait(ticket, 60) is Status.DONE
        assert launches(fake, before) < 30
        assert world.arena[:] == world.after(Direction.STORE, range(64), range(0, 64 * MIB, MIB))[1]


def test_gathers_do_not_queue_behind_one_that_waits(fake: FakeCuda) -> None:
    world = simple_world(num_blocks=64, page_bytes=64 * KIB, n_planes=16, slots=64)
    held = FakeStream(fake)
    held.fill(world.pages.address, 0, 0)
    with closing(world.cuda_mover(fake.options(mode=CudaMode.STAGED))) as mover:
        before = fake.calls("cuLaunchKernel")
        offsets = range(0, 64 * world.span, world.span)
        ticket = mover.submit(Direction.STORE, range(64), offsets, after=held.handle)
        until(lambda: fake.calls("cuLaunchKernel") == before + 2)
        assert mover.wait(ticket, 0.1) is Status.PENDING
        assert fake.calls("cuLaunchKernel") == before + 2
        held.release()
        assert mover.wait(ticket, 60) is Status.DONE
    held.destroy()


@pytest.mark.parametrize(("major", "shift", "kernel"), [(9, 0, "bulk"), (9, 8, "8"), (8, 0, "16")])
def test_a_lean_kernel_is_used_where_there_is_one(
    make_fake: MakeFake, major: int, shift: int, kernel: str
) -> None:
    """Blocks of one warp, or an eighth as many of the plain kernel."""
    fake = make_fake(major=major)
    planes = [Plane(shift + i * 64 * 4096, 4096, 1, 4080, 4080, i * 4080) for i in range(16)]
    world = World(planes, 64, Memory(17 * 64 * 4096, seed=1), Memory(64 * 65536, seed=2))
    with closing(world.cuda_mover(fake.options(mode=CudaMode.STAGED, thread_blocks=24))) as mover:
        copy(mover, world, Direction.LOAD, range(64))
        assert mover.bytes_by_mode()[CudaMode.STAGED] == 64 * world.block_bytes
    assert fake.grid(f"fkv_copy_{kernel}") == (24 if kernel == "bulk" else 3)


def test_a_mover_goes_the_way_that_it_is_forced_to(make_fake: MakeFake) -> None:
    fake = make_fake()
    world = simple_world(num_blocks=8, page_bytes=64 * KIB, n_planes=16, slots=8)
    with closing(world.cuda_mover(fake.options(ring_bytes=8 * MIB))) as mover:
        for mode in (CudaMode.STAGED, CudaMode.KERNEL, CudaMode.TMA, CudaMode.DMA):
            before = mover.bytes_by_mode()[mode]
            mover.force(mode, thread_blocks=2)
            copy(mover, world, Direction.LOAD, range(8))
            assert mover.bytes_by_mode()[mode] == before + 8 * world.block_bytes
        assert fake.grid("fkv_copy_bulk") == 2
        mover.force(CudaMode.STAGED, ring_bytes=64 * KIB)
        assert sizes_of(mover, fake, world, Direction.LOAD) > 8 * MIB // (32 * KIB)
        mover.force(CudaMode.STAGED)
        assert sizes_of(mover, fake, world, Direction.LOAD) < 16


def test_a_way_that_cannot_be_forced_is_refused(make_fake: MakeFake) -> None:
    fake = make_fake(major=8)
    world = simple_world(num_blocks=8, page_bytes=4 * KIB, n_planes=2, slots=8)
    held = FakeStream(fake)
    held.fill(world.pages.address, 0, 0)
    mover = world.cuda_mover(fake.options(ring_bytes=MIB))
    for change, message in (
        ((CudaMode.AUTO, 0, 0), "mode is 0"),
        ((CudaMode.TMA, 0, 0), "mode is 3 .TMA., which this device lacks"),
        ((CudaMode.KERNEL, 1025, 0), "thread_blocks is 1025"),
        ((CudaMode.STAGED, 0, 2 * MIB), "ring_bytes is 2097152, the mover's rings have 1048576"),
        ((CudaMode.STAGED, 0, 100), "ring_bytes is 100, it must be at least 65536"),
    ):
        with pytest.raises(ValueError, match=message):
            mover.force(*change)
    ticket = mover.submit(Direction.STORE, [1], [0], after=held.handle)
    with pytest.raises(ValueError, match="transfers are pending"):
        mover.force(CudaMode.DMA)
    held.release()
    assert mover.wait(ticket, 60) is Status.DONE
    mover.close()
    with pytest.raises(RuntimeError, match="the mover is closed"):
        mover.force(CudaMode.DMA)
    held.destroy()
