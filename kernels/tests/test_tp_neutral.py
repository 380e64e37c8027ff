# SPDX-License-Identifier: Apache-2.0
"""Blocks written by one number of ranks and read by another: every byte where it belongs.

Pages and arena are real memory in random layouts; tensors are described as an engine's are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexkv import KVLayout, TensorView
from flexkv.layout import BlockFormat, Sharding, block_identity, fingerprint, share_of
from flexkv_kernels import CpuMover, Direction, Status
from kernels.tests.patient import PATIENT

Bytes = NDArray[np.uint8]
Order = tuple[int, ...]
ENGINE_BLOCKS = 3
SLOTS = 2
POISON = 0xA5


@dataclass(frozen=True)
class Shape:
    """A model's KV cache: extents of (layer, block, head, token, content), content in bytes."""

    layers: int
    blocks: int
    heads: int
    tokens: int
    content: int


class Rank:
    """One rank's tensors in one allocation, its dimensions in memory in any order."""

    def __init__(self, shape: Shape, heads: int, order: Order, split: bool) -> None:
        extents = (shape.layers, shape.blocks, heads, shape.tokens, shape.content)
        memory = np.full(tuple(extents[dim] for dim in order), POISON, np.uint8)
        self.kv: Bytes = memory.transpose(np.argsort(order))  # (layer, block, head, token, content)
        views = [
            TensorView(
                f"l{i}",
                layer.__array_interface__["data"][0],
                layer.shape,
                layer.strides,
                1,
                1 if split else None,
                page_dim=0,
            )
            for i, layer in enumerate(self.kv)
        ]
        self.layout = KVLayout.from_tensors(views, shape.blocks)


class Engine:
    """All ranks of an engine over one arena."""

    def __init__(
        self,
        shape: Shape,
        ranks: int,
        order: Order,
        arena: Bytes | None = None,
        split: bool = True,
    ) -> None:
        sharding = Sharding.by_head(shape.heads, ranks) if split else Sharding(ranks)
        assert sharding is not None
        self.shape = shape
        self.sharding = sharding
        local = shape.heads // sharding.parts
        self.ranks = [Rank(shape, local, order, split) for _ in range(ranks)]
        layout = self.ranks[0].layout
        assert layout.by_head == split
        sizes = (layout.shard_bytes(ENGINE_BLOCKS),) * sharding.parts
        self.format = BlockFormat(ENGINE_BLOCKS, sizes, sharding.replicas)
        self.fingerprint = fingerprint(block_identity([], layout, ENGINE_BLOCKS, sharding))
        if arena is None:
            arena = np.full(self.format.slot_bytes * SLOTS, POISON, np.uint8)
        assert arena.size == self.format.slot_bytes * SLOTS
        self.arena = arena

    def heads_of(self, rank: int) -> slice:
        local = self.shape.heads // self.sharding.parts
        first = rank // self.sharding.replicas * local
        return slice(first, first + local)

    def fill(self, kv: Bytes) -> None:
        for number, rank in enumerate(self.ranks):
            rank.kv[:] = kv[:, :, self.heads_of(number)]

    def copy(self, direction: Direction, blocks: list[int], slot: int, parts: int = 1) -> None:
        """Every rank copies engine blocks from or to a slot, in so many parts at once."""
        for number, rank in enumerate(self.ranks):
            replicas = self.sharding.replicas
            planes, store = share_of(rank.layout.place(ENGINE_BLOCKS), number % replicas, replicas)
            mover = CpuMover(
                planes,
                self.shape.blocks,
                self.arena.__array_interface__["data"][0],
                self.arena.size,
                2,
                store=store,
            )
            start = slot * self.format.slot_bytes
            start += self.format.shard_offsets[number // replicas]
            step = rank.layout.head_bytes
            offsets = [start + i * step for i in range(len(blocks))]
            ends = [len(planes) * i // parts for i in range(parts + 1)]
            tickets = [
                mover.submit(direction, blocks, offsets, planes=range(*part))
                for part in itertools.pairwise(ends)
            ]
            assert all(mover.wait(ticket, 60) is Status.DONE for ticket in tickets)
            mover.close()


SHAPES = st.builds(
    Shape,
    layers=st.integers(1, 3),
    blocks=st.integers(4, 6),
    heads=st.sampled_from([1, 2, 4, 8]),
    tokens=st.integers(1, 5),
    content=st.sampled_from([16, 24, 48, 64, 100]),
)
# Any order of the dimensions that leaves the content innermost, as all engines' are.
ORDERS = st.permutations(range(4)).map(lambda order: (*order, 4))
RANKS = st.sampled_from([1, 2, 4, 8])


@settings(PATIENT, max_examples=200)
@given(SHAPES, st.tuples(RANKS, RANKS), st.tuples(ORDERS, ORDERS), st.data())
def test_what_some_ranks_wrote_any_number_of_ranks_reads(
    shape: Shape, ranks: tuple[int, int], orders: tuple[Order, Order], data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    extents = (shape.layers, shape.blocks, shape.heads, shape.tokens, shape.content)
    kv = rng.integers(0, 255, extents, np.uint8)
    writer = Engine(shape, ranks[0], orders[0])
    reader = Engine(shape, ranks[1], orders[1], writer.arena)
    assert reader.fingerprint == writer.fingerprint

    def blocks() -> list[int]:
        return data.draw(st.permutations(range(shape.blocks)))[:ENGINE_BLOCKS]

    writer.fill(kv)
    wrote = [blocks(), blocks()]
    for slot, chosen in enumerate(wrote):
        writer.copy(Direction.STORE, chosen, slot, data.draw(st.integers(1, 3)))
    slot, into = data.draw(st.sampled_from(range(SLOTS))), blocks()
    reader.copy(Direction.LOAD, into, slot, data.draw(st.integers(1, 4)))
    for number, rank in enumerate(reader.ranks):
        expected = np.full(rank.kv.shape, POISON, np.uint8)
        expected[:, into] = kv[:, wrote[slot], reader.heads_of(number)]
        np.testing.assert_array_equal(rank.kv, expected)


@settings(PATIENT, max_examples=50)
@given(SHAPES.filter(lambda shape: shape.heads == 8), RANKS, ORDERS)
def test_opaque_blocks_come_back_to_as_many_ranks(shape: Shape, ranks: int, order: Order) -> None:
    rng = np.random.default_rng(1)
    extents = (shape.layers, shape.blocks, shape.heads, shape.tokens, shape.content)
    kv = rng.integers(0, 255, extents, np.uint8)
    writer = Engine(shape, ranks, order, split=False)
    local = shape.heads // ranks
    for number, rank in enumerate(writer.ranks):
        rank.kv[:] = kv[:, :, number * local : (number + 1) * local]
    writer.copy(Direction.STORE, [3, 0, 1], 1)
    reader = Engine(shape, ranks, order, writer.arena, split=False)
    assert reader.fingerprint == writer.fingerprint
    reader.copy(Direction.LOAD, [2, 1, 3], 1)
    for rank, wrote in zip(reader.ranks, writer.ranks, strict=True):
        expected = np.full(rank.kv.shape, POISON, np.uint8)
        expected[:, [2, 1, 3]] = wrote.kv[:, [3, 0, 1]]
        np.testing.assert_array_equal(rank.kv, expected)


def test_heads_are_major_in_the_slot() -> None:
    shape = Shape(layers=2, blocks=4, heads=4, tokens=3, content=16)
    one = Engine(shape, 1, (0, 1, 3, 2, 4))
    kv = np.random.default_rng(2).integers(0, 255, (2, 4, 4, 3, 16), np.uint8)
    one.fill(kv)
    one.copy(Direction.STORE, [0, 1, 2], 0)
    stride = one.ranks[0].layout.head_stride(ENGINE_BLOCKS)
    for head, block in itertools.product(range(4), range(3)):
        start = head * stride + block * one.ranks[0].layout.head_bytes
        expected = kv[:, block, head].tobytes()
        assert one.arena[start : start + len(expected)].tobytes() == expected
