# SPDX-License-Identifier: Apache-2.0
"""Memory to copy between: pages in a tensor, an arena as FlexKV makes it, and a check of copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch

from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.types.mover import Direction, Status
from integration.gpu.shapes import BLOCK_BYTES, Order, Plane, Shape, random_order

WAIT_SECONDS = 60.0
POISON = 0xA5

Copy = Callable[[], None]
"""Makes all copies of an order, and returns when they are done."""


class WrongBytesError(Exception):
    """A copy did not move the bytes that it should have; `count` of them are wrong."""

    def __init__(self, what: str, count: int) -> None:
        super().__init__(f"{what}: {count} bytes are wrong")
        self.count = count


class AnyMover(Protocol):
    """What is measured: a mover for GPU pages, or in tests one for CPU pages."""

    def submit(
        self,
        direction: Direction,
        blocks: Any,
        offsets: Any,
        after: int = 0,
        *,
        planes: range | None = None,
    ) -> int: ...

    def wait(self, ticket: int, timeout: float) -> Status: ...


class Rig:
    """Pages and an arena of `blocks` blocks of 2 MiB each, filled with random bytes. Shapes with
    larger or smaller blocks divide the same memory.

    Owns both; `close` gives the arena back. Movers over it must be closed before.
    """

    def __init__(
        self, blocks: int, device: str, numa_nodes: frozenset[int] = frozenset(), seed: int = 0
    ) -> None:
        self.pages = torch.empty(blocks * BLOCK_BYTES, dtype=torch.uint8, device=device)
        torch.manual_seed(seed)
        # As words: torch draws bytes one by one.
        self.pages.view(torch.int64).random_(-(1 << 62), 1 << 62)
        spec = ArenaSpec(BlockFormat(1, (BLOCK_BYTES,)), blocks)
        self.arena = Arena.create(spec, numa_nodes=numa_nodes)
        self._seed = seed
        memory = (ctypes.c_uint8 * (blocks * BLOCK_BYTES)).from_address(
            self.arena.address + spec.slots_offset
        )
        self.slots = torch.frombuffer(memory, dtype=torch.uint8)
        self.slots.copy_(self.pages)

    @property
    def base(self) -> int:
        """Address of the pages."""
        return int(self.pages.data_ptr())

    def blocks(self, shape: Shape) -> int:
        """Blocks of a shape that there is memory for."""
        return shape.blocks_in(self.pages.numel())

    def planes(self, shape: Shape) -> list[Plane]:
        """The pages as a mover takes them."""
        return shape.planes(self.base, self.blocks(shape))

    def order(self, shape: Shape) -> Order:
        """All blocks of a shape, in random order."""
        return _random_order(shape, self.blocks(shape), self.arena.spec.slots_offset, self._seed)

    def addresses(self, shape: Shape, order: Order) -> tuple[Any, Any]:
        """Of every run of an order, among the pages and in the arena."""
        return shape.addresses(self.base, self.blocks(shape), order, self.arena.address)

    def check(self, shape: Shape, order: Order, copies: dict[Direction, Copy]) -> None:
        """Store and load an order once, over poisoned memory, and compare every byte of it.

        Raises:
            WrongBytesError: a byte is not what it should be, in the copy or beside it.
        """
        pages = self.pages[: self.blocks(shape) * shape.block_bytes]
        offsets = torch.tensor(order.offsets.tolist()) - self.arena.spec.slots_offset
        self.slots.fill_(POISON)
        self._synchronize()
        copies[Direction.STORE]()
        expected = torch.full_like(self.slots, POISON, device=pages.device)
        content = shape.slots_of(pages, order.blocks)
        shape.put_in_slots(expected, content, offsets.to(pages.device))
        self._compare(shape, "store", expected, self.slots.to(pages.device))
        saved = self.pages.clone()
        view = pages.view(shape.layers, self.blocks(shape), -1)
        view[:, torch.tensor(order.blocks.tolist(), device=pages.device)] ^= 0xFF
        self._synchronize()
        copies[Direction.LOAD]()
        self._compare(shape, "load", saved, self.pages)

    def _compare(self, shape: Shape, what: str, expected: Any, found: Any) -> None:
        if not torch.equal(expected, found):
            raise WrongBytesError(f"{what} of {shape.name}", int((expected != found).sum()))

    def _synchronize(self) -> None:
        if self.pages.is_cuda:
            torch.cuda.synchronize()

    def close(self) -> None:
        """Give the arena back. Idempotent."""
        del self.slots
        self.arena.close()


def mover_copies(mover: AnyMover, order: Order) -> dict[Direction, Copy]:
    """The copies of an order by a mover, one for each direction."""
    return {direction: _copy_by(mover, direction, order) for direction in Direction}


def start(mover: AnyMover, direction: Direction, order: Order) -> list[int]:
    """Order the copies; returns the ticket of each part."""
    return [
        mover.submit(direction, order.blocks, order.offsets, planes=part) for part in order.parts
    ]


def finish(mover: AnyMover, tickets: Sequence[int]) -> None:
    """Wait for transfers; RuntimeError unless all are done."""
    for ticket in tickets:
        status = mover.wait(ticket, WAIT_SECONDS)
        if status is not Status.DONE:
            raise RuntimeError(f"a transfer is {status.name} after at most {WAIT_SECONDS:.0f} s")


def _copy_by(mover: AnyMover, direction: Direction, order: Order) -> Copy:
    return lambda: finish(mover, start(mover, direction, order))


_random_order = cache(random_order)
