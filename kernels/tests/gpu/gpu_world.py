# SPDX-License-Identifier: Apache-2.0
"""Pages in the memory of a real GPU, an arena, and what a transfer must leave in them.

Import only after torch was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexkv_kernels import CudaMode, CudaMover, CudaOptions, Direction
from kernels.tests.worlds import Memory, Plane

KIB = 1024
DEVICE = 0
LAYERS = 4
TAIL = 4 * KIB
"""Bytes of the arena behind the last slot: for flags, and to show that nothing is written there."""


def engine_planes(kind: str, blocks: int, layers: int = LAYERS) -> tuple[list[Plane], int]:
    """Planes as engines have them, and the bytes of the pages they lie in.

    "NHD": 16 tokens of 8 heads of 256 bytes, head by head. "HND": heads of 4 KiB. "opaque": 200 KiB
    a layer. "odd": rows of 100 bytes at odd addresses. "large": 3 MiB and a bit a layer.
    """
    heads, tokens, row = 8, 16, 256
    if kind == "NHD":
        stride = heads * tokens * row
        shape = [
            (layer * blocks * stride + head * row, stride, tokens, heads * row, row)
            for layer in range(layers)
            for head in range(heads)
        ]
    elif kind == "HND":
        page = tokens * row
        shape = [
            ((layer * blocks * heads + head) * page, heads * page, 1, page, page)
            for layer in range(layers)
            for head in range(heads)
        ]
    elif kind == "odd":
        stride = 3 * tokens * 103
        shape = [
            (7 + layer * blocks * stride + head * 101, stride, tokens, 3 * 103, 100)
            for layer in range(layers)
            for head in range(3)
        ]
    else:
        page = 200 * KIB if kind == "opaque" else 3 * 1024 * KIB + 48
        shape = [(layer * blocks * page, page, 1, page, page) for layer in range(layers)]
    planes: list[Plane] = []
    for base, block_stride, rows, row_stride, row_bytes in shape:
        place = planes[-1].slot_end if planes else 0
        planes.append(Plane(base, block_stride, rows, row_stride, row_bytes, place))
    return planes, max(plane.base + blocks * plane.block_stride for plane in planes)


@dataclass
class GpuWorld:
    """``planes`` count from the start of ``pages``, a uint8 tensor on the device."""

    planes: Sequence[Plane]
    num_blocks: int
    slots: int
    pages: torch.Tensor
    memory: Memory

    @property
    def block_bytes(self) -> int:
        return sum(plane.page_bytes for plane in self.planes)

    @property
    def arena(self) -> torch.Tensor:
        """All bytes of the arena, as a CPU tensor over the memory itself."""
        return torch.frombuffer(self.memory.map, dtype=torch.uint8)

    @property
    def flag_address(self) -> int:
        """Of a word behind the slots."""
        return self.memory.address + self.flag_offset

    @property
    def flag_offset(self) -> int:
        return self.memory.size - TAIL + 64

    def layers(self) -> list[range]:
        """The numbers of each layer's planes."""
        n = len(self.planes) // LAYERS
        return [range(layer * n, layer * n + n) for layer in range(LAYERS)]

    def offsets(self, slots: Sequence[int]) -> list[int]:
        return [slot * self.block_bytes for slot in slots]

    @property
    def placed_planes(self) -> list[Plane]:
        """The planes at their addresses, as movers take them."""
        start = self.pages.data_ptr()
        return [plane._replace(base=start + plane.base) for plane in self.planes]

    def mover(self, mode: CudaMode, thread_blocks: int = 0) -> CudaMover:
        return CudaMover(
            self.placed_planes,
            self.num_blocks,
            self.memory.address,
            self.memory.size,
            DEVICE,
            CudaOptions(mode=mode, thread_blocks=thread_blocks),
        )

    def fill(self) -> None:
        """Fresh random bytes everywhere; returns when the device has them."""
        for memory in (self.pages, self.arena):
            whole = memory.numel() // 8 * 8
            # As words: torch draws bytes one by one.
            memory[:whole].view(torch.int64).random_(-(1 << 62), 1 << 62)
            memory[whole:].random_(0, 256)
        torch.cuda.synchronize()

    def after(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        part: range | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages (on the device) and arena as they must be after the copies of all planes, or of a
        part of them; made by torch alone."""
        pages, arena = self.pages.clone(), self.arena.clone()
        index = torch.tensor(blocks, device=pages.device)
        stacked = arena[: self.slots * self.block_bytes].view(self.slots, self.block_bytes)
        for plane in self.planes if part is None else self.planes[part.start : part.stop]:
            paged = pages.as_strided(
                (self.num_blocks, plane.rows, plane.row_bytes),
                (plane.block_stride, plane.row_stride, 1),
                plane.base,
            )
            place = slice(plane.slot_offset, plane.slot_end)
            if direction is Direction.LOAD:
                rows = stacked[list(slots), place].view(-1, plane.rows, plane.row_bytes)
                paged[index] = rows.to(pages.device)
            else:
                stacked[list(slots), place] = paged[index].reshape(len(blocks), -1).cpu()
        torch.cuda.synchronize()
        return pages, arena

    def same(self, expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
        return torch.equal(self.pages, expected[0]) and torch.equal(self.arena, expected[1])


def gpu_world(kind: str, num_blocks: int, slots: int) -> GpuWorld:
    planes, size = engine_planes(kind, num_blocks)
    pages = torch.empty(size + 256, dtype=torch.uint8, device=f"cuda:{DEVICE}")
    block_bytes = planes[-1].slot_end
    memory = Memory((slots * block_bytes + TAIL + KIB) // KIB * KIB, seed=None)
    world = GpuWorld(planes, num_blocks, slots, pages, memory)
    world.fill()
    return world
