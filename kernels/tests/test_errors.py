# SPDX-License-Identifier: Apache-2.0
"""Bad arguments: one message naming the value and what is allowed, and no byte touched."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from flexkv_kernels import CpuMover, CpuOptions, Direction, Status, available_kernels
from flexkv_kernels._library import LIBRARY, CpuOptionsStruct, LayoutStruct
from kernels.tests.worlds import Flag, simple_world

GOOD: dict[str, Any] = {
    "planes": [(4096, 128, 1, 100, 100, 0), (8192, 64, 2, 32, 32, 100)],
    "num_blocks": 4,
    "arena_address": 65536,
    "arena_bytes": 4096,
    "threads": 1,
}


def one(**change: int) -> dict[str, Any]:
    """One plane, changed."""
    names = ("base", "block_stride", "rows", "row_stride", "row_bytes", "slot_offset")
    plane = dict(zip(names, GOOD["planes"][0], strict=True)) | change
    return {"planes": [tuple(plane.values())]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"planes": []}, "no planes given"),
        (one(row_bytes=0), "plane 0: it has 1 rows of 0 bytes"),
        (one(rows=0), "plane 0: it has 0 rows of 100 bytes"),
        (one(row_stride=99), "plane 0: row_stride 99 is smaller than row_bytes 100"),
        (one(block_stride=99), "plane 0: block_stride 99 is smaller than row_bytes 100"),
        (one(base=0), "plane 0: base is a null pointer"),
        (one(base=-1), "base is -1"),
        (one(base=1 << 64), "base is 18446744073709551616"),
        (one(block_stride=1 << 63), "plane 0: 4 blocks .* pass the end of the address"),
        (one(rows=1 << 60), "plane 0: its rows pass the end of the address"),
        (one(slot_offset=(1 << 64) - 1), "its bytes in the arena pass the end of the address"),
        (one(slot_offset=4000), "an arena of 4096 bytes cannot hold one block, .* 4100 bytes"),
        (
            {"planes": [(4096, 128, 1, 100, 100, 0), (8192, 64, 1, 64, 64, 99)]},
            "planes 0 and 1 share bytes of the arena",
        ),
        ({"store": range(3)}, "stores are to copy 3 planes from number 0 on, but there are 2"),
        ({"store": range(3, 3)}, "stores are to copy 0 planes from number 3 on"),
        ({"store": range(0, 2, 2)}, "it must have a step of 1"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": -1}, "num_blocks is -1"),
        ({"num_blocks": 1 << 63}, "pass the end of the address space"),
        ({"arena_address": 0}, "the arena is a null pointer"),
        (
            {"arena_bytes": 163},
            "an arena of 163 bytes cannot hold one block, which spans 164 bytes",
        ),
        ({"arena_bytes": (1 << 64) - 1}, "an arena of .* would pass the end of the address space"),
        ({"threads": 0}, "threads is 0, it must be between 1 and 1024"),
        ({"threads": -1}, "threads is -1"),
        ({"threads": 1025}, "threads is 1025, it must be between 1 and 1024"),
        ({"options": CpuOptions(kernel="mmx")}, "copy kernel 'mmx' .* allowed are .*portable"),
        ({"options": CpuOptions(chunk_bytes=-5)}, "chunk_bytes is -5"),
    ],
)
def test_a_mover_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CpuMover(**(GOOD | change))


@pytest.mark.parametrize(
    ("blocks", "offsets", "kwargs", "message"),
    [
        ([0, 4], [0, 0], {}, "copy 1: block 4 is out of range, the engine has 4 blocks"),
        ([0, 2**63], [0, 0], {}, "copy 1: block 9223372036854775808 is out of range"),
        ([0, 1], [0, 601], {}, "copy 1: offset 601 is out of range, .* starts at 600"),
        ([0, 1], [0, 2**64 - 1], {}, "copy 1: offset 18446744073709551615 is out of range"),
        ([0, -1], [0, 0], {}, "blocks holds -1"),
        ([0, 1], [0, 2**64], {}, "offsets holds 18446744073709551616"),
        ([0, 1], [0], {}, "2 blocks but 1 offsets"),
        ([0], [0], {"after": 7}, "after is 7, the CPU mover has no streams"),
        ([0], [0], {"planes": range(3)}, "transfer is to copy 3 planes from number 0 on, .* are 2"),
        ([0], [0], {"planes": range(2, 3)}, "to copy 1 planes from number 2 on, but there are 2"),
        ([0], [0], {"planes": range(3, 3)}, "to copy 0 planes from number 3 on, but there are 2"),
        ([0], [0], {"planes": range(2**32 - 1, 2**32)}, "to copy 1 planes from number 4294967295"),
        ([0], [0], {"planes": range(-1, 1)}, "planes.start is -1"),
        ([0], [0], {"planes": range(2**32)}, "the number of planes is 4294967296"),
        ([0], [0], {"planes": range(0, 2, 2)}, "planes is .*, it must have a step of 1"),
        ([0], [0], {"flag_address": 4097}, "flag's address is not a multiple of 4"),
        ([0], [0], {"flag_address": -4}, "flag_address is -4"),
    ],
)
def test_a_refused_transfer_touches_nothing(
    blocks: list[int], offsets: list[int], kwargs: dict[str, Any], message: str
) -> None:
    world = simple_world(num_blocks=4, page_bytes=100, n_planes=2, slots=4)
    mover = world.mover()
    before = world.now()
    flag = Flag()
    for direction in Direction:
        with pytest.raises(ValueError, match=message):
            mover.submit(direction, blocks, offsets, **{"flag_address": flag.address, **kwargs})
    ticket = mover.submit(Direction.STORE, [], [])
    assert mover.wait(ticket, 60) is Status.DONE
    mover.close()
    assert world.now() == before
    assert flag.value == Status.PENDING


def test_a_message_stays_in_its_buffer() -> None:
    buffer = ctypes.create_string_buffer(b"\xff" * 16, 16)
    layout, options = LayoutStruct(), CpuOptionsStruct(threads=1)
    create = LIBRARY.waiting.fkv_cpu_mover_create
    assert create(ctypes.byref(layout), ctypes.byref(options), buffer, 8) is None
    assert buffer.raw == b"no plan\0" + b"\xff" * 8
    assert create(ctypes.byref(layout), ctypes.byref(options), None, 0) is None


def test_the_last_block_and_the_last_offset_are_in_range() -> None:
    world = simple_world(num_blocks=4, page_bytes=100, n_planes=2, slots=4)
    mover = world.mover()
    expected = world.after(Direction.STORE, [3], [600])
    assert mover.wait(mover.submit(Direction.STORE, [3], [600]), 60) is Status.DONE
    assert world.now() == expected
    mover.close()


def test_an_unknown_direction_is_refused() -> None:
    world = simple_world(num_blocks=4, page_bytes=100, n_planes=2, slots=4)
    mover = world.mover()
    with pytest.raises(ValueError, match="direction 2 is neither"):
        mover.submit(2, [0], [0])  # type: ignore[arg-type]
    mover.close()


def test_a_portable_kernel_always_exists() -> None:
    assert available_kernels()[-1] == "portable"
