# SPDX-License-Identifier: Apache-2.0
"""Real memory laid out as pages and an arena, and what a transfer must leave in it."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Sequence
from dataclasses import dataclass

from flexkv_kernels import CpuMover, CpuOptions, Direction

Plane = tuple[int, int, int]


class Memory:
    """``size`` bytes of mapped memory, filled with reproducible noise."""

    def __init__(self, size: int, seed: int = 0, fd: int = -1) -> None:
        self.map = mmap.mmap(fd, size)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        if fd == -1:
            self.map[:] = random.Random(seed).randbytes(size)

    def __getitem__(self, key: slice) -> bytes:
        return self.map[key]


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
    """Pages and an arena; ``planes`` are offsets into ``pages`` where a mover takes addresses."""

    planes: Sequence[Plane]
    num_blocks: int
    pages: Memory
    arena: Memory

    @property
    def block_bytes(self) -> int:
        return sum(page_bytes for _, _, page_bytes in self.planes)

    def mover(self, threads: int = 1, options: CpuOptions | None = None) -> CpuMover:
        base = self.pages.address
        planes = [(base + offset, stride, size) for offset, stride, size in self.planes]
        return CpuMover(
            planes,
            self.num_blocks,
            self.arena.address,
            self.arena.size,
            threads,
            CpuOptions() if options is None else options,
        )

    def after(
        self, direction: Direction, blocks: Sequence[int], offsets: Sequence[int]
    ) -> tuple[bytes, bytes]:
        """Pages and arena as they must be after the copies, which nothing has made yet."""
        pages, arena = bytearray(self.pages[:]), bytearray(self.arena[:])
        for block, offset in zip(blocks, offsets, strict=True):
            place = offset
            for start, stride, size in self.planes:
                page = slice(start + block * stride, start + block * stride + size)
                slot = slice(place, place + size)
                if direction is Direction.LOAD:
                    pages[page] = arena[slot]
                else:
                    arena[slot] = pages[page]
                place += size
        return bytes(pages), bytes(arena)

    def now(self) -> tuple[bytes, bytes]:
        return self.pages[:], self.arena[:]


def simple_world(num_blocks: int, page_bytes: int, n_planes: int, slots: int) -> World:
    """Planes one after the other and an arena of ``slots`` blocks."""
    planes = [(i * num_blocks * page_bytes, page_bytes, page_bytes) for i in range(n_planes)]
    pages = Memory(n_planes * num_blocks * page_bytes, seed=1)
    return World(planes, num_blocks, pages, Memory(slots * n_planes * page_bytes, seed=2))


ENDLESS = 200_000
"""Copies of one block of ``endless_world`` (1 MiB each): far more than a test waits for."""


def endless_world() -> World:
    """One plane with 1 MiB pages: a store of ``ENDLESS`` copies of a block takes many seconds."""
    return simple_world(num_blocks=2, page_bytes=1 << 20, n_planes=1, slots=2)
