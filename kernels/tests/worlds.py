# SPDX-License-Identifier: Apache-2.0
"""Real memory laid out as pages and an arena, and what a transfer must leave in it."""

from __future__ import annotations

import ctypes
import mmap
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexkv_kernels import CpuMover, CpuOptions, CudaMover, CudaOptions, Direction
from flexkv_kernels.native_mover import NativeMover


class Plane(NamedTuple):
    """As ``CpuMover`` takes it, but ``base`` counts from the start of the pages."""

    base: int
    block_stride: int
    rows: int
    row_stride: int
    row_bytes: int
    slot_offset: int

    @property
    def page_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def slot_end(self) -> int:
        return self.slot_offset + self.page_bytes


def in_order(pages: Iterable[tuple[int, int, int]]) -> list[Plane]:
    """Planes of one row, ``(base, block_stride, bytes)``, which follow one another in a slot."""
    planes: list[Plane] = []
    for base, stride, size in pages:
        place = planes[-1].slot_end if planes else 0
        planes.append(Plane(base, stride, 1, size, size, place))
    return planes


class Memory:
    """``size`` bytes of mapped memory, filled with reproducible noise."""

    def __init__(self, size: int, seed: int | None = 0, fd: int = -1) -> None:
        """``seed`` None, and memory of a file, is left as it is."""
        self.map = mmap.mmap(fd, size)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        if fd == -1 and seed is not None:
            self.map[:] = random.Random(seed).randbytes(size)

    def __getitem__(self, key: slice) -> bytes:
        return self.map[key]

    def word(self, offset: int) -> ctypes.c_uint32:
        """The 32-bit word at an offset, as it is now and later."""
        return ctypes.c_uint32.from_buffer(self.map, offset)


class Flag:
    """A completion flag that starts pending."""

    def __init__(self) -> None:
        self._value = ctypes.c_uint32(0)
        self.address = ctypes.addressof(self._value)

    @property
    def value(self) -> int:
        return self._value.value


@dataclass
class World:
    """Pages and an arena; stores copy the planes ``store``, or all."""

    planes: Sequence[Plane]
    num_blocks: int
    pages: Memory
    arena: Memory
    store: range | None = None

    @property
    def block_bytes(self) -> int:
        return sum(plane.page_bytes for plane in self.planes)

    @property
    def span(self) -> int:
        return max(plane.slot_end for plane in self.planes)

    @property
    def placed_planes(self) -> list[Plane]:
        """The planes at their addresses, as movers take them."""
        return [plane._replace(base=self.pages.address + plane.base) for plane in self.planes]

    def cuda_mover(self, options: CudaOptions) -> CudaMover:
        """For a driver whose device memory is host memory."""
        return CudaMover(
            self.placed_planes,
            self.num_blocks,
            self.arena.address,
            self.arena.size,
            0,
            options,
            store=self.store,
        )

    def mover(self, threads: int = 1, options: CpuOptions | None = None) -> CpuMover:
        return CpuMover(
            self.placed_planes,
            self.num_blocks,
            self.arena.address,
            self.arena.size,
            threads,
            CpuOptions() if options is None else options,
            store=self.store,
        )

    def after(
        self,
        direction: Direction,
        blocks: Sequence[int],
        offsets: Sequence[int],
        part: range | None = None,
    ) -> tuple[bytes, bytes]:
        """Pages and arena as they must be after the copies of all planes, or of a part of them,
        which nothing has made yet."""
        pages, arena = bytearray(self.pages[:]), bytearray(self.arena[:])
        numbers = set(range(len(self.planes)) if part is None else part)
        if direction is Direction.STORE and self.store is not None:
            numbers &= set(self.store)
        planes = [self.planes[i] for i in numbers]
        for block, offset in zip(blocks, offsets, strict=True):
            for plane in planes:
                for i in range(plane.rows):
                    row = plane.base + block * plane.block_stride + i * plane.row_stride
                    page = slice(row, row + plane.row_bytes)
                    place = offset + plane.slot_offset + i * plane.row_bytes
                    slot = slice(place, place + plane.row_bytes)
                    if direction is Direction.LOAD:
                        pages[page] = arena[slot]
                    else:
                        arena[slot] = pages[page]
        return bytes(pages), bytes(arena)

    def now(self) -> tuple[bytes, bytes]:
        return self.pages[:], self.arena[:]


def simple_world(num_blocks: int, page_bytes: int, n_planes: int, slots: int) -> World:
    """Planes one after the other and an arena of ``slots`` blocks."""
    starts = range(0, n_planes * num_blocks * page_bytes, num_blocks * page_bytes)
    planes = in_order((start, page_bytes, page_bytes) for start in starts)
    pages = Memory(n_planes * num_blocks * page_bytes, seed=1)
    return World(planes, num_blocks, pages, Memory(slots * n_planes * page_bytes, seed=2))


def until(happened: Callable[[], bool]) -> None:
    """Waits for what must happen; a test that fails ends all the same."""
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


def is_closing(mover: NativeMover) -> bool:
    """Whether the mover's end has begun: it takes not even what has nothing to copy."""
    try:
        mover.submit(Direction.STORE, [], [])
    except RuntimeError:
        return True
    return False


ENDLESS = 200_000
"""Copies of one block of ``endless_world`` (1 MiB each): far more than a test waits for."""


def endless_world() -> World:
    """One plane with 1 MiB pages: a store of ``ENDLESS`` copies of a block takes many seconds."""
    return simple_world(num_blocks=2, page_bytes=1 << 20, n_planes=1, slots=2)
