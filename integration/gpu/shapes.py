# SPDX-License-Identifier: Apache-2.0
"""How the pages lie that are copied: planes, addresses of runs, and what a slot then holds."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import Any

import torch

KIB, MIB = 1 << 10, 1 << 20

BLOCK_BYTES = 2 * MIB
"""Of an engine block in all shapes: what 16 tokens of Llama-3.1-8B have in bfloat16."""

Plane = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """Pages of one kind: a tensor [layers, blocks, tokens, heads, run_bytes] of bytes.

    Attributes:
        run_bytes: what is contiguous both among the pages and in a slot.
        tokens, heads: 1, or what lies between the runs of a head: the page of a head then has
            `tokens` rows, among the pages `heads * run_bytes` apart, in the slot without gaps.
    """

    run_bytes: int
    tokens: int = 1
    heads: int = 1

    @property
    def name(self) -> str:
        size = self.run_bytes
        text = next(
            f"{size // u} {n}" for u, n in ((MIB, "MiB"), (KIB, "KiB"), (1, "B")) if size >= u
        )
        return f"{text} rows" if self.tokens > 1 else f"{text} pages"

    @property
    def layers(self) -> int:
        """Layers that make a block, K and V counted apart."""
        return BLOCK_BYTES // (self.run_bytes * self.tokens * self.heads)

    @property
    def runs(self) -> int:
        """Runs of a block."""
        return BLOCK_BYTES // self.run_bytes

    def planes(self, base: int, blocks: int) -> list[Plane]:
        """The pages at `base` as a mover takes them, heads major in the slot."""
        stride = BLOCK_BYTES // self.layers
        page = self.tokens * self.run_bytes
        return [
            (
                base + layer * blocks * stride + head * self.run_bytes,
                stride,
                self.tokens,
                self.heads * self.run_bytes,
                self.run_bytes,
                (head * self.layers + layer) * page,
            )
            for head in range(self.heads)
            for layer in range(self.layers)
        ]

    def slots_of(self, pages: Any, blocks: array[int]) -> Any:
        """What the slots of `blocks` must hold: a tensor [len(blocks), BLOCK_BYTES]."""
        view = pages.view(self.layers, -1, self.tokens, self.heads, self.run_bytes)
        chosen = view[:, torch.tensor(blocks.tolist(), device=pages.device)]
        return chosen.permute(1, 3, 0, 2, 4).reshape(len(blocks), BLOCK_BYTES)

    def addresses(self, base: int, blocks: int, order: Order, arena: int) -> tuple[Any, Any]:
        """Where each run lies among the pages and in the arena: two int64 tensors on the CPU."""
        offsets = torch.arange(BLOCK_BYTES // self.run_bytes) * self.run_bytes
        head, layer, token = (
            axis.reshape(-1)
            for axis in torch.meshgrid(
                *(torch.arange(n) for n in (self.heads, self.layers, self.tokens)), indexing="ij"
            )
        )
        block = torch.tensor(order.blocks.tolist())[:, None]
        row = ((layer * blocks + block) * self.tokens + token) * self.heads + head
        in_arena = arena + torch.tensor(order.offsets.tolist())[:, None] + offsets
        return (base + row * self.run_bytes).reshape(-1), in_arena.reshape(-1)


SHAPES = (
    Shape(256, tokens=16, heads=8),
    *(Shape(size * KIB) for size in (4, 16, 64, 256, 1024, 2048)),
)
"""The first: heads of 128 elements in bfloat16, those of a token side by side, as vLLM has them."""


@dataclass(frozen=True, slots=True)
class Order:
    """Copies of one transfer: block `blocks[i]` from or to arena byte `offsets[i]` onward."""

    blocks: array[int]
    offsets: array[int]

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def bytes(self) -> int:
        return len(self) * BLOCK_BYTES

    def part(self, start: int, stop: int) -> Order:
        return Order(self.blocks[start:stop], self.offsets[start:stop])


def random_order(blocks: int, slots_offset: int, seed: int) -> Order:
    """All blocks, each with a slot of its own, both in random order."""
    rng = random.Random(seed)
    slots = rng.sample(range(blocks), blocks)
    return Order(
        array("Q", rng.sample(range(blocks), blocks)),
        array("Q", (slots_offset + slot * BLOCK_BYTES for slot in slots)),
    )
