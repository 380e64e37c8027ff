# SPDX-License-Identifier: Apache-2.0
"""Errors of the driver: the transfer they concern fails and nothing hangs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flexkv_kernels import (
    CudaChoice,
    CudaMode,
    CudaMover,
    CudaOptions,
    Direction,
    Status,
    cuda_device,
    cuda_unavailable,
)
from kernels.tests.conftest import MakeFake
from kernels.tests.fake_cuda.fake_driver import (
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    LAUNCH_FAILED,
    OUT_OF_MEMORY,
    UNSUPPORTED_PTX,
    FakeCuda,
    FakeStream,
)
from kernels.tests.worlds import Flag, Memory, World, simple_world, until

COPY = {
    CudaMode.DMA: "cuMemcpyBatchAsync",
    CudaMode.KERNEL: "cuLaunchKernel",
    CudaMode.TMA: "cuLaunchKernel",
    CudaMode.STAGED: "cuLaunchKernel",
}


@pytest.fixture
def world() -> World:
    return simple_world(num_blocks=4, page_bytes=4096, n_planes=2, slots=4)


@pytest.fixture
def stream(fake: FakeCuda) -> Iterator[FakeStream]:
    stream = FakeStream(fake)
    yield stream
    stream.destroy()


@pytest.mark.parametrize("mode", COPY)
@pytest.mark.parametrize("skip", [0, 2])
def test_a_refused_copy_fails_its_transfer_only(
    fake: FakeCuda, world: World, mode: CudaMode, skip: int
) -> None:
    mover = world.cuda_mover(fake.options(mode=mode))
    assert mover.wait(mover.submit(Direction.STORE, [2], [0]), 60) is Status.DONE
    live = fake.live  # with the event that each transfer begins with
    fake.fail(COPY[mode], INVALID_VALUE, skip=skip)
    flag = Flag()
    ticket = mover.submit(Direction.LOAD, [1] * 2000, [0] * 2000, flag_address=flag.address)
    assert mover.wait(ticket, 60) is Status.FAILED
    assert flag.value == Status.FAILED
    assert mover.error() is not None
    assert "CUDA_ERROR_FAKE (1): wanted by the test, while doing" in str(mover.error())
    expected = world.after(Direction.STORE, [2], [0])
    assert mover.wait(mover.submit(Direction.STORE, [2], [0]), 60) is Status.DONE
    assert world.now() == expected
    assert mover.poll(ticket) is Status.FAILED
    assert fake.live == live
    mover.close()


def test_a_refused_wait_fails_the_transfer_and_copies_nothing(
    fake: FakeCuda, world: World, stream: FakeStream
) -> None:
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    before = world.now()
    fake.fail("cuStreamWaitEvent", INVALID_VALUE)
    ticket = mover.submit(Direction.STORE, [1], [0], after=stream.handle)
    assert mover.wait(ticket, 60) is Status.FAILED
    assert world.now() == before
    mover.close()


@pytest.mark.parametrize(
    ("mode", "name", "code"),
    [
        (mode, name, code)
        for mode in COPY
        for name, code in (
            ("run", ILLEGAL_ADDRESS),
            ("run", LAUNCH_FAILED),
            ("cuEventQuery", ILLEGAL_ADDRESS),
            ("cuEventRecord", ILLEGAL_ADDRESS),
            (COPY[mode], ILLEGAL_ADDRESS),
        )
    ],
)
def test_a_failed_device_fails_everything_and_hangs_nothing(  # noqa: PLR0917
    fake: FakeCuda, world: World, stream: FakeStream, mode: CudaMode, name: str, code: int
) -> None:
    live = fake.live
    mover = world.cuda_mover(fake.options(mode=mode))
    place = 3 * world.block_bytes
    in_arena = world.arena.word(place)
    in_arena.value = Status.PENDING
    flags = [Flag() for _ in range(4)]
    many = [1] * 3000
    stream.fill(world.pages.address, 0, 1)
    tickets = [  # of which only a part fits the stream
        mover.submit(
            Direction.STORE, many, [0] * 3000, after=stream.handle, flag_address=flag.address
        )
        for flag in flags
    ]
    load = mover.submit(
        Direction.LOAD,
        [1],
        [0],
        after=stream.handle,
        flag_address=world.arena.address + place,
    )
    fake.fail(name, code, sticky=True)
    stream.release()
    assert [mover.wait(ticket, 60) for ticket in tickets] == [Status.FAILED] * 4
    assert [flag.value for flag in flags] == [Status.FAILED] * 4
    # The load may have been copied, and its flag risen, before the device failed.
    ends = {Status.FAILED} if name == "run" else {Status.DONE, Status.FAILED}
    assert mover.wait(load, 60) in ends
    assert in_arena.value in ends
    with pytest.raises(RuntimeError, match=rf"device no longer works.*\({code}\)"):
        mover.submit(Direction.LOAD, [1], [0])
    assert f"({code})" in str(mover.error())
    mover.close()
    assert mover.poll(tickets[0]) is Status.FAILED
    assert fake.live == live


@pytest.mark.parametrize("mode", COPY)
def test_nothing_has_failed_while_its_copies_may_run(
    fake: FakeCuda, world: World, stream: FakeStream, mode: CudaMode
) -> None:
    """The driver does not say whether copies have ended, though it goes on copying. After a failure
    the pages are used again, and a copy that comes later destroys what they hold then."""
    mover = world.cuda_mover(fake.options(mode=mode))
    stream.fill(world.pages.address, 0, 0)
    ticket = mover.submit(Direction.LOAD, [1], [0], after=stream.handle)
    until(lambda: fake.calls("cuEventQuery") > 0)
    fake.fail("cuEventQuery", INVALID_VALUE)
    assert mover.wait(ticket, 0.3) is Status.PENDING
    stream.release()
    assert mover.wait(ticket, 60) is Status.FAILED
    with pytest.raises(RuntimeError, match=r"device no longer works.*\(1\)"):
        mover.submit(Direction.LOAD, [1], [0])
    mover.close()


def test_a_handle_that_is_no_stream_is_refused(fake: FakeCuda, world: World) -> None:
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    events = set()
    for _ in range(3):
        with pytest.raises(ValueError, match=r"after is 4919, no stream of this device: .*\(400\)"):
            mover.submit(Direction.STORE, [0], [0], after=4919)
        events.add(fake.calls("cuEventCreate"))
    assert len(events) == 1  # the event of the first is used by the others
    assert mover.wait(mover.submit(Direction.STORE, [0], [0]), 60) is Status.DONE
    mover.close()


@pytest.mark.parametrize(
    ("name", "skip"),
    [
        ("cuDevicePrimaryCtxRetain", 0),
        ("cuModuleLoadData", 0),
        ("cuModuleGetFunction", 0),
        ("cuModuleGetFunction", 5),
        ("cuFuncSetAttribute", 0),
        ("cuMemHostRegister", 0),
        ("cuMemHostGetDevicePointer", 0),
        ("cuStreamCreateWithPriority", 0),
        ("cuStreamCreateWithPriority", 1),
        ("cuEventCreate", 0),
        ("cuEventCreate", 5),
        ("cuMemAlloc", 0),
        ("cuMemcpyAsync", 0),
        ("cuStreamSynchronize", 1),
        ("cuLaunchKernel", 0),
        ("cuLaunchKernel", 5),
    ],
)
def test_a_mover_that_cannot_be_made_leaves_nothing_behind(
    fake: FakeCuda, world: World, name: str, skip: int
) -> None:
    live = fake.live
    fake.fail(name, OUT_OF_MEMORY, skip=skip)
    with pytest.raises(ValueError, match=r"CUDA_ERROR_FAKE \(2\)|does not see the arena"):
        world.cuda_mover(fake.options(mode=CudaMode.DMA))
    assert fake.live == live


def test_a_driver_older_than_the_compiler_says_what_to_update(
    make_fake: MakeFake, world: World
) -> None:
    fake = make_fake(version=12040, batches=False)
    fake.fail("cuModuleLoadData", UNSUPPORTED_PTX)
    with pytest.raises(
        ValueError, match=r"of CUDA 12\.4, does not take .* nvcc 1[23]\.\d: update the driver, or"
    ):
        world.cuda_mover(fake.options(mode=CudaMode.DMA))


@pytest.mark.parametrize("name", ["cuMemHostRegister", "cuMemHostGetDevicePointer"])
def test_the_pieces_of_an_arena_that_is_refused_are_given_back(
    fake: FakeCuda, world: World, name: str
) -> None:
    live = fake.live
    world.arena = Memory((1 << 30) + 65536, seed=None)  # of two pieces
    fake.fail(name, OUT_OF_MEMORY, skip=1)
    with pytest.raises(ValueError, match=r"registered 1024 MiB|does not see the arena"):
        world.cuda_mover(fake.options(mode=CudaMode.DMA))
    assert fake.live == live


def test_an_arena_that_cannot_be_locked_names_the_limit(fake: FakeCuda, world: World) -> None:
    fake.fail("cuMemHostRegister", OUT_OF_MEMORY)
    with pytest.raises(
        ValueError,
        match=r"registered 0 MiB of an arena of 0 MiB.*RLIMIT_MEMLOCK, `ulimit -l`\) is "
        r"(unlimited|\d+ MiB)",
    ):
        world.cuda_mover(fake.options(mode=CudaMode.DMA))


def test_a_part_of_the_arena_that_something_else_registered_is_named(
    fake: FakeCuda, world: World
) -> None:
    mover = world.cuda_mover(fake.options(mode=CudaMode.DMA))
    shifted = simple_world(num_blocks=4, page_bytes=4096, n_planes=2, slots=4)
    arguments = (shifted.placed_planes, 4, world.arena.address + 4096, world.arena.size, 0)
    with pytest.raises(ValueError, match="Something else in this process has registered a part"):
        CudaMover(*arguments, fake.options(mode=CudaMode.DMA))
    mover.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": 1}, "device is 1, the driver has 1 CUDA devices"),
        ({"device": -1}, "device is -1"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"planes": []}, "no planes given"),
        ({"options": {"mode": 7}}, "mode is 7, it must be"),
        ({"options": {"thread_blocks": 1025}}, "thread_blocks is 1025, it must be at most 1024"),
        ({"options": {"ring_bytes": 100}}, "ring_bytes is 100, it must be between 65536 and"),
        (
            {"options": {"choices": (CudaChoice(Direction.LOAD, 1, 1, CudaMode.AUTO),)}},
            r"choice 0: mode is 0 \(auto\)",
        ),
        (
            {"options": {"choices": (CudaChoice(Direction.STORE, -1, 1, CudaMode.TMA),)}},
            "run_bytes is -1",
        ),
    ],
)
def test_a_mover_that_cannot_be_is_refused(
    fake: FakeCuda, world: World, change: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {
        "planes": world.placed_planes,
        "num_blocks": 4,
        "arena_address": world.arena.address,
        "arena_bytes": world.arena.size,
        "device": 0,
    }
    options = fake.options(**{"mode": CudaMode.AUTO, **change.pop("options", {})})
    with pytest.raises(ValueError, match=message):
        CudaMover(**(arguments | change), options=options)


def test_bulk_copies_are_refused_where_the_device_lacks_them(
    make_fake: MakeFake, world: World
) -> None:
    with pytest.raises(ValueError, match=r"mode is 3 \(TMA\), which device 0 lacks"):
        world.cuda_mover(make_fake(major=8).options(mode=CudaMode.TMA))


def test_drivers_that_cannot_be_used_say_why(make_fake: MakeFake, world: World) -> None:
    assert cuda_unavailable(make_fake().path) is None
    old = make_fake(version=11080).path
    assert "is of CUDA 11.8, FlexKV needs 12.0 or newer" in str(cuda_unavailable(old))
    empty = make_fake(devices=0).path
    assert "no device" in str(cuda_unavailable(empty))
    missing = "/nowhere/libcuda.so.1"
    assert f"no NVIDIA driver: {missing}" in str(cuda_unavailable(missing))
    with pytest.raises(ValueError, match="no NVIDIA driver"):
        world.cuda_mover(CudaOptions(driver=missing))
    broken = make_fake()
    broken.fail("cuInit", 999)
    assert broken.calls("cuInit") == 1  # cuda_unavailable in make_fake: a driver is started once
    assert cuda_unavailable(broken.path) is None


def test_a_device_is_described(make_fake: MakeFake) -> None:
    fake = make_fake(devices=2)
    device = cuda_device(1, fake.path)
    assert device.name == "Fake H0"
    assert device.pci_bus_id == "0000:a1:00.0"
    assert device.capability == (9, 0)
    assert device.multiprocessors == 132
    assert device.driver_version == (13, 0)
    with pytest.raises(ValueError, match="device is 2, the driver has 2 CUDA devices"):
        cuda_device(2, fake.path)
