# SPDX-License-Identifier: Apache-2.0
"""Pages in the memory of a real GPU, an arena, and what a transfer must leave in them.

Import only after torch was found. With memory of the host and the fake driver, the same runs on the
emulated device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexkv.types.mover import LAYER_PARTS
from flexkv_kernels import CudaMode, CudaMover, CudaOptions, Direction
from kernels.tests.worlds import Memory, Plane

KIB = 1024
DEVICE = 0
LAYERS = 4
TAIL = 4 * KIB
"""Bytes of the arena behind the last slot: for flags, and to show that nothing is written there."""


@dataclass(frozen=True)
class ModelLayout:
    """Pages of a model: ``heads`` runs of ``row`` bytes for each token side by side, or one page of
    a head as one run. ``slot_blocks`` engine blocks make a slot, head by head."""

    layers: int
    heads: int
    tokens: int
    row: int
    slot_blocks: int = 1

    @property
    def head_bytes(self) -> int:
        """Of an engine block."""
        return self.layers * self.tokens * self.row

    def planes(self, blocks: int) -> list[Plane]:
        """By layer, as FlexKV places them."""
        page = self.tokens * self.row
        stride = self.heads * page
        return [
            Plane(
                layer * blocks * stride + head * self.row,
                stride,
                self.tokens,
                self.heads * self.row,
                self.row,
                head * self.slot_blocks * self.head_bytes + layer * page,
            )
            for layer in range(self.layers)
            for head in range(self.heads)
        ]


LAYOUTS = {
    "slot64": ModelLayout(8, 8, 16, 512, slot_blocks=4),
    "slot256": ModelLayout(8, 8, 16, 512, slot_blocks=16),
    "5MiB": ModelLayout(80, 8, 16, 512),
    "onehead": ModelLayout(80, 1, 1, 8 * KIB),
    "MLA": ModelLayout(61, 1, 1, 72 * KIB),
}
"""Slots of 64 and 256 tokens, in eight layers; Llama 70B alone and one of eight ranks of it; latent
attention with pages of 64 tokens."""


def engine_planes(kind: str, blocks: int, layers: int = LAYERS) -> tuple[list[Plane], int]:
    """Planes as engines have them, and the bytes of the pages they lie in.

    "NHD": 16 tokens of 8 heads of 256 bytes, head by head. "HND": heads of 4 KiB. "opaque": 200 KiB
    a layer. "odd": rows of 100 bytes at odd addresses. "large": 3 MiB and a bit a layer. Others are
    in ``LAYOUTS``, and have layers of their own.
    """
    if kind in LAYOUTS:
        planes = LAYOUTS[kind].planes(blocks)
        return planes, LAYOUTS[kind].heads * LAYOUTS[kind].head_bytes * blocks
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
    planes = []
    for base, block_stride, rows, row_stride, row_bytes in shape:
        place = planes[-1].slot_end if planes else 0
        planes.append(Plane(base, block_stride, rows, row_stride, row_bytes, place))
    return planes, max(plane.base + blocks * plane.block_stride for plane in planes)


@dataclass
class GpuWorld:
    """``planes`` count from the start of ``pages``, a uint8 tensor on the device.

    The arena has room for ``slots`` engine blocks, of which ``slot_blocks`` make one slot of
    FlexKV, where those of ``heads`` heads lie apart.
    """

    planes: Sequence[Plane]
    num_blocks: int
    slots: int
    pages: torch.Tensor
    memory: Memory
    driver: str = ""
    heads: int = 1
    slot_blocks: int = 1

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

    def eighths(self) -> list[range]:
        """The numbers of the planes of each part of a layer-wise load."""
        step = -(-len(self.planes) // LAYER_PARTS)
        ends = range(0, len(self.planes), step)
        return [range(first, min(first + step, len(self.planes))) for first in ends]

    @property
    def head_bytes(self) -> int:
        """Of a block: from one to the next in a slot."""
        return self.block_bytes // self.heads

    def offsets(self, slots: Sequence[int]) -> list[int]:
        """Where blocks lie in the arena that have the places ``slots``, counted through all
        slots."""
        size = self.slot_blocks
        return [
            slot // size * size * self.block_bytes + slot % size * self.head_bytes for slot in slots
        ]

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
            CudaOptions(mode=mode, thread_blocks=thread_blocks, driver=self.driver),
        )

    def fill(self) -> None:
        """Fresh random bytes everywhere; returns when the device has them."""
        for memory in (self.pages, self.arena):
            whole = memory.numel() // 8 * 8
            # As words: torch draws bytes one by one.
            memory[:whole].view(torch.int64).random_(-(1 << 62), 1 << 62)
            memory[whole:].random_(0, 256)
        self._synchronize()

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
        shape = (-1, self.heads, self.slot_blocks, self.head_bytes)
        stacked = arena[: self.slots * self.block_bytes].view(shape)
        number = torch.tensor(slots)
        of_slot, within = number // self.slot_blocks, number % self.slot_blocks
        for plane in self.planes if part is None else self.planes[part.start : part.stop]:
            paged = pages.as_strided(
                (self.num_blocks, plane.rows, plane.row_bytes),
                (plane.block_stride, plane.row_stride, 1),
                plane.base,
            )
            head, start = divmod(plane.slot_offset, self.slot_blocks * self.head_bytes)
            place = slice(start, start + plane.page_bytes)
            of_head = stacked[:, head]
            if direction is Direction.LOAD:
                rows = of_head[of_slot, within, place].reshape(-1, plane.rows, plane.row_bytes)
                paged[index] = rows.to(pages.device)
            else:
                of_head[of_slot, within, place] = paged[index].reshape(len(blocks), -1).cpu()
        self._synchronize()
        return pages, arena

    def same(self, expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
        return torch.equal(self.pages, expected[0]) and torch.equal(self.arena, expected[1])

    def _synchronize(self) -> None:
        if self.pages.is_cuda:
            torch.cuda.synchronize()


def gpu_world(
    kind: str, num_blocks: int, slots: int, device: str = f"cuda:{DEVICE}", driver: str = ""
) -> GpuWorld:
    """Pages of ``num_blocks`` blocks, and an arena with room for ``slots`` of them, in whole
    slots."""
    planes, size = engine_planes(kind, num_blocks)
    layout = LAYOUTS.get(kind)
    heads, slot_blocks = (layout.heads, layout.slot_blocks) if layout else (1, 1)
    slots = -(-slots // slot_blocks) * slot_blocks
    pages = torch.empty(size + 256, dtype=torch.uint8, device=device)
    block_bytes = sum(plane.page_bytes for plane in planes)
    memory = Memory((slots * block_bytes + TAIL + KIB) // KIB * KIB, seed=None)
    world = GpuWorld(planes, num_blocks, slots, pages, memory, driver, heads, slot_blocks)
    world.fill()
    return world
