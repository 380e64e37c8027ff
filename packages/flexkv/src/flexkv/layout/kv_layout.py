# SPDX-License-Identifier: Apache-2.0
"""The pages of one rank's KV cache, and their places in a slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from flexkv.layout.overlap import check_disjoint
from flexkv.layout.planes import (
    Plane,
    TensorView,
    head_geometry,
    head_planes,
    opaque_geometry,
    opaque_planes,
)
from flexkv.types.errors import LayoutError

SHARD_ALIGNMENT = 64
"""A head, and so a rank's shard, starts at a multiple of this many bytes within the slot: one
cache line."""


class PlacedPlane(NamedTuple):
    """A plane and the place of its rows in a slot, in bytes behind the place of the engine block.
    The rows follow one another. See `Plane`."""

    base: int
    block_stride: int
    rows: int
    row_stride: int
    row_bytes: int
    slot_offset: int

    @property
    def page_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The pages of one rank's KV cache.

    Block b of the engine consists of the pages of b in every plane of every head, in this order.
    The addresses are valid as long as the engine keeps its tensors; the layout keeps only those
    whose views name an owner.

    Attributes:
        heads: the planes of each KV head of this rank, all heads alike; a single entry with all
            planes if the heads cannot be divided.
        num_blocks: number of the engine's blocks.
        by_head: whether `heads` are KV heads.
        geometry: the meaning of the bytes of one head. Equal geometries have the same content at
            the same places.
        starts: by the name of the tensors, where their pieces of block 0 begin, of all heads.
        owners: of the tensors' memory; see `TensorView`.
    """

    heads: tuple[tuple[Plane, ...], ...]
    num_blocks: int
    by_head: bool
    geometry: tuple[tuple[int, ...], ...]
    starts: Mapping[str, frozenset[int]]
    owners: tuple[object, ...] = field(default=(), repr=False, compare=False)

    @property
    def head_bytes(self) -> int:
        """Bytes of one engine block of one head: in a slot, from one engine block to the next."""
        return sum(plane.page_bytes for plane in self.heads[0])

    @property
    def block_bytes(self) -> int:
        """Bytes of one engine block over all heads."""
        return len(self.heads) * self.head_bytes

    def head_stride(self, engine_blocks: int) -> int:
        """Bytes from one head to the next in a slot of `engine_blocks` engine blocks, a multiple of
        `SHARD_ALIGNMENT`."""
        return -(-engine_blocks * self.head_bytes // SHARD_ALIGNMENT) * SHARD_ALIGNMENT

    def shard_bytes(self, engine_blocks: int) -> int:
        """Bytes of this rank in a slot of `engine_blocks` engine blocks."""
        return len(self.heads) * self.head_stride(engine_blocks)

    def place(self, engine_blocks: int, head_stride: int = 0) -> list[PlacedPlane]:
        """Place all planes in a shard of `engine_blocks` engine blocks.

        Args:
            engine_blocks: engine blocks of a slot.
            head_stride: bytes from one head to the next; 0 for `head_stride`.

        Returns:
            The planes in the order of the tensors: those of all heads of the first tensor, then of
            the next. A place is the plane's distance, in bytes, from where the engine block begins
            in the shard. Engine block e begins `e * head_bytes` after the shard's start.
        """
        by_head = []
        stride = head_stride or self.head_stride(engine_blocks)
        for head, planes in enumerate(self.heads):
            placed = []
            offset = head * stride
            for base, block_stride, row_bytes, rows, row_stride in planes:
                placed.append(PlacedPlane(base, block_stride, rows, row_stride, row_bytes, offset))
                offset += rows * row_bytes
            by_head.append(placed)
        return [plane for planes in zip(*by_head, strict=True) for plane in planes]

    @classmethod
    def from_tensors(cls, views: Iterable[TensorView], num_blocks: int) -> KVLayout:
        """Describe the tensors of one rank, by head if all tensors have equally many.

        Args:
            views: one view per layer (or per packed group of layers), in the engine's order. A
                tensor that several layers share may appear several times and counts once. So do
                pages of different kinds of layers that begin at the same addresses, of which a
                block holds one or the other: they are as long as the longest, and opaque. Tensors
                of one name belong to one layer.
            num_blocks: number of the engine's blocks. One dimension of every tensor has this
                extent, or a multiple of it if the engine's kernels use smaller blocks. If several
                may, `page_dim` of the view names it.

        Raises:
            LayoutError: a tensor has no such dimension, or several, or its pages overlap.
        """
        if num_blocks <= 0:
            raise LayoutError(f"the engine reports {num_blocks} KV blocks; allowed: 1 or more")
        own: list[TensorView] = []
        names: dict[Plane, str] = {}
        starts: dict[str, frozenset[int]] = {}
        owners: list[object] = []
        for view in views:
            owners.append(view.owner)
            planes = opaque_planes(view, num_blocks)
            own_planes = [plane for plane in planes if plane not in names]
            if own_planes:
                own.append(view)
                names |= dict.fromkeys(own_planes, view.name)
            heads_of_view = head_planes(view, num_blocks) or ()
            pieces = (piece for head in (planes, *heads_of_view) for piece in head)
            begins = frozenset(piece.base for piece in pieces)
            starts[view.name] = starts.get(view.name, frozenset()) | begins
        if not own:
            raise LayoutError("the engine registered no KV cache tensors; allowed: 1 or more")
        pages = _longest(names)
        check_disjoint(pages, num_blocks)
        heads = _by_head(own, num_blocks) if len(pages) == len(names) else None
        if heads is not None:
            geometry = tuple(head_geometry(view, num_blocks) for view in own)
            return cls(heads, num_blocks, True, geometry, starts, tuple(owners))
        geometry = tuple(opaque_geometry(view, num_blocks) for view in own)
        merged = (_merge_adjacent(pages),)
        return cls(merged, num_blocks, False, geometry, starts, tuple(owners))


def _longest(names: dict[Plane, str]) -> dict[Plane, str]:
    """The longest of the opaque planes that begin at the same place in every block."""
    longest: dict[tuple[int, int], Plane] = {}
    for plane in names:
        place = plane.base, plane.block_stride
        if place not in longest or plane.row_bytes > longest[place].row_bytes:
            longest[place] = plane
    return {plane: names[plane] for plane in longest.values()}


def _by_head(views: list[TensorView], num_blocks: int) -> tuple[tuple[Plane, ...], ...] | None:
    """The planes of each head over all tensors; None if heads cannot be divided."""
    tensors: list[list[list[Plane]]] = []
    for view in views:
        planes = head_planes(view, num_blocks)
        if planes is None or (tensors and len(planes) != len(tensors[0])):
            return None
        tensors.append(planes)
    return tuple(
        _merge_adjacent(plane for planes in tensors for plane in planes[head])
        for head in range(len(tensors[0]))
    )


def _merge_adjacent(planes: Iterable[Plane]) -> tuple[Plane, ...]:
    """Join neighbours of one row whose pages follow one another in memory in every block.

    The engine's order is kept, not the order of addresses: the latter may change from one start
    to the next, and with it the meaning of the bytes in a slot.
    """
    merged: list[Plane] = []
    for plane in planes:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.rows == plane.rows == 1
            and last.block_stride == plane.block_stride
            and last.base + last.row_bytes == plane.base
            and last.row_bytes + plane.row_bytes <= plane.block_stride
        ):
            size = last.row_bytes + plane.row_bytes
            merged[-1] = last._replace(row_bytes=size, row_stride=size)
        else:
            merged.append(plane)
    return tuple(merged)
