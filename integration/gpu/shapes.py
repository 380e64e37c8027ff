# SPDX-License-Identifier: Apache-2.0
"""How the pages lie that are copied: planes, addresses of runs, and what a slot then holds."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexkv.types.mover import LAYER_PARTS

KIB, MIB = 1 << 10, 1 << 20

BLOCK_BYTES = 2 * MIB
"""Of an engine block, unless a shape says otherwise: what 16 tokens of Llama-3.1-8B have in
bfloat16."""

Plane = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """Pages of one kind: a tensor [layers, blocks, tokens, heads, run_bytes] of bytes.

    Attributes:
        run_bytes: what is contiguous both among the pages and in a slot.
        tokens, heads: 1, or what lies between the runs of a head: the page of a head then has
            `tokens` rows, among the pages `heads * run_bytes` apart, in the slot without gaps.
        block_bytes: of an engine block over all layers and heads.
        slot_blocks: engine blocks of a slot, which has all of a head before those of the next.
        parts: transfers that a copy of blocks consists of, each of some layers: layer-wise loads
            have eight.
        label: what the report calls it; "": after the length of its runs.
    """

    run_bytes: int
    tokens: int = 1
    heads: int = 1
    block_bytes: int = BLOCK_BYTES
    slot_blocks: int = 1
    parts: int = 1
    label: str = ""

    @property
    def name(self) -> str:
        if self.label:
            return self.label
        size = self.run_bytes
        text = next(
            f"{size // u} {n}" for u, n in ((MIB, "MiB"), (KIB, "KiB"), (1, "B")) if size >= u
        )
        return f"{text} rows" if self.tokens > 1 else f"{text} pages"

    @property
    def layers(self) -> int:
        """Layers that make a block; of pages of K alone and V alone, both apart."""
        return self.block_bytes // (self.run_bytes * self.tokens * self.heads)

    @property
    def runs(self) -> int:
        """Runs of a block."""
        return self.block_bytes // self.run_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of a head in a block."""
        return self.block_bytes // self.heads

    @property
    def slot_bytes(self) -> int:
        return self.slot_blocks * self.block_bytes

    def blocks_in(self, size: int) -> int:
        """Engine blocks of as many whole slots as `size` bytes hold."""
        return size // self.slot_bytes * self.slot_blocks

    def planes(self, base: int, blocks: int) -> list[Plane]:
        """The pages at `base` as a mover takes them: by layer, heads major in the slot."""
        stride = self.tokens * self.heads * self.run_bytes
        page = self.tokens * self.run_bytes
        return [
            (
                base + layer * blocks * stride + head * self.run_bytes,
                stride,
                self.tokens,
                self.heads * self.run_bytes,
                self.run_bytes,
                head * self.slot_blocks * self.head_bytes + layer * page,
            )
            for layer in range(self.layers)
            for head in range(self.heads)
        ]

    def plane_parts(self) -> list[range]:
        """The numbers of the planes of each part, as layer-wise loads divide them."""
        count = self.layers * self.heads
        step = -(-count // self.parts)
        return [range(first, min(first + step, count)) for first in range(0, count, step)]

    def slots_of(self, pages: Any, blocks: array[int]) -> Any:
        """What slots must hold of `blocks`: a tensor [len(blocks), heads, head_bytes].

        Args:
            pages: all pages and nothing else, as a tensor of bytes.
            blocks: numbers of engine blocks.
        """
        view = pages.view(self.layers, -1, self.tokens, self.heads, self.run_bytes)
        chosen = view[:, torch.tensor(blocks.tolist(), device=pages.device)]
        return chosen.permute(1, 3, 0, 2, 4).reshape(len(blocks), self.heads, self.head_bytes)

    def put_in_slots(self, memory: Any, content: Any, offsets: Any) -> None:
        """Put what `slots_of` gives to its places.

        Args:
            memory: slots from the first one on, as a tensor of bytes.
            content: of the blocks.
            offsets: of the blocks, from the first slot on: an int64 tensor.
        """
        shape = (-1, self.heads, self.slot_blocks, self.head_bytes)
        slots = memory[: memory.numel() // self.slot_bytes * self.slot_bytes].view(shape)
        within = offsets % self.slot_bytes // self.head_bytes
        slots[offsets // self.slot_bytes, :, within] = content

    def addresses(self, base: int, blocks: int, order: Order, arena: int) -> tuple[Any, Any]:
        """Where each run lies among the pages and in the arena: two int64 tensors on the CPU."""
        head, layer, token = (
            axis.reshape(-1)
            for axis in torch.meshgrid(
                *(torch.arange(n) for n in (self.heads, self.layers, self.tokens)), indexing="ij"
            )
        )
        block = torch.tensor(order.blocks.tolist())[:, None]
        row = ((layer * blocks + block) * self.tokens + token) * self.heads + head
        offsets = head * self.slot_blocks * self.head_bytes
        offsets += (layer * self.tokens + token) * self.run_bytes
        in_arena = arena + torch.tensor(order.offsets.tolist())[:, None] + offsets
        return (base + row * self.run_bytes).reshape(-1), in_arena.reshape(-1)


SHAPES = (
    Shape(256, tokens=16, heads=8),
    *(Shape(size * KIB) for size in (4, 16, 64, 256, 1024, 2048)),
)
"""The first: heads of 128 elements in bfloat16, those of a token side by side, as vLLM has them."""

_LLAMA = Shape(512, tokens=16, heads=8, label="Llama 8B")
_LATENT = Shape(72 * KIB, block_bytes=61 * 72 * KIB, label="DeepSeek V3, pages of 64 tokens")
LAYOUTS = (
    _LLAMA,
    replace(_LLAMA, slot_blocks=4, label="Llama 8B, slots of 64 tokens"),
    replace(_LLAMA, parts=LAYER_PARTS, label="Llama 8B, eighths of the layers"),
    Shape(
        256,
        tokens=16,
        heads=8,
        block_bytes=512 * KIB,
        slot_blocks=16,
        label="Llama 3.2 1B, slots of 256 tokens",
    ),
    replace(_LLAMA, block_bytes=5 * MIB, label="Llama 70B"),
    Shape(8 * KIB, block_bytes=640 * KIB, label="Llama 70B, one of 8 ranks"),
    _LATENT,
    replace(_LATENT, parts=LAYER_PARTS, label="DeepSeek V3, eighths of the layers"),
)
"""Of models that people serve, in bfloat16, K beside V, 16 tokens to an engine block but for the
last two, which have 64 rows of 576 elements: latent attention."""


@dataclass(frozen=True, slots=True)
class Order:
    """Copies of one transfer: block `blocks[i]` from or to arena byte `offsets[i]` onward.

    Attributes:
        blocks: numbers of engine blocks.
        offsets: of each in the arena.
        block_bytes: of each.
        parts: planes of each transfer that the copies are made by; None: all in one.
    """

    blocks: array[int]
    offsets: array[int]
    block_bytes: int = BLOCK_BYTES
    parts: tuple[range | None, ...] = (None,)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def bytes(self) -> int:
        return len(self) * self.block_bytes

    def part(self, start: int, stop: int) -> Order:
        """Some of the blocks."""
        return replace(self, blocks=self.blocks[start:stop], offsets=self.offsets[start:stop])

    def first(self, size: int) -> Order:
        """The first blocks, of `size` bytes in all at most, but at least one."""
        return self.part(0, max(1, size // self.block_bytes))


def random_order(shape: Shape, blocks: int, slots_offset: int, seed: int) -> Order:
    """All blocks, each with a place of its own: blocks and slots in random order, the places of a
    slot one after the other."""
    rng = random.Random(seed)
    count = blocks // shape.slot_blocks
    slots = rng.sample(range(count), count)
    return Order(
        array("Q", rng.sample(range(blocks), blocks)),
        array(
            "Q",
            (
                slots_offset + slot * shape.slot_bytes + place * shape.head_bytes
                for slot in slots
                for place in range(shape.slot_blocks)
            ),
        ),
        shape.block_bytes,
        (None,) if shape.parts == 1 else tuple(shape.plane_parts()),
    )
