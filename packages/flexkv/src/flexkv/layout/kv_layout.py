# SPDX-License-Identifier: Apache-2.0
"""The pages of one rank's KV cache, their places in a slot, and a rank's share of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flexkv.layout.planes import Plane, TensorView, geometry, head_planes, opaque_planes
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
            planes, and `by_head` is False, if the heads cannot be divided.
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
        """Place all planes in a shard of `engine_blocks` engine blocks, by default with as many
        bytes from one head to the next as the method `head_stride` says.

        Returns the planes in the order of the tensors: those of all heads of the first tensor, then
        of the next. A place is the distance, in bytes, from where the engine block begins in the
        shard. Engine block e begins `e * head_bytes` after the shard's start."""
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
                may, `page_dim` of the view names it. Raises LayoutError if there is none, if there
                are several, or if pages overlap.
        """
        if num_blocks <= 0:
            raise LayoutError(f"the engine reports {num_blocks} KV blocks; allowed: 1 or more")
        own: list[TensorView] = []
        divided: list[list[list[Plane]] | None] = []
        names: dict[Plane, str] = {}
        starts: dict[str, frozenset[int]] = {}
        owners: list[object] = []
        for view in views:
            owners.append(view.owner)
            planes, by_head = opaque_planes(view, num_blocks), head_planes(view, num_blocks)
            own_planes = [plane for plane in planes if plane not in names]
            if own_planes:
                own.append(view)
                divided.append(by_head)
                names |= dict.fromkeys(own_planes, view.name)
            pieces = (piece for head in (planes, *(by_head or ())) for piece in head)
            begins = frozenset(piece.base for piece in pieces)
            starts[view.name] = starts.get(view.name, frozenset()) | begins
        if not own:
            raise LayoutError("the engine registered no KV cache tensors; allowed: 1 or more")
        pages = _longest(names)
        check_disjoint(pages, num_blocks)
        heads = _join_heads(divided) if len(pages) == len(names) else ()
        has_heads = bool(heads)
        meaning = tuple(geometry(view, num_blocks, by_head=has_heads) for view in own)
        pieces_of_heads = heads or (_merge_adjacent(pages),)
        return cls(pieces_of_heads, num_blocks, has_heads, meaning, starts, tuple(owners))


def _longest(names: dict[Plane, str]) -> dict[Plane, str]:
    """The longest of the opaque planes that begin at the same place in every block."""
    longest: dict[tuple[int, int], Plane] = {}
    for plane in names:
        place = plane.base, plane.block_stride
        if place not in longest or plane.row_bytes > longest[place].row_bytes:
            longest[place] = plane
    return {plane: names[plane] for plane in longest.values()}


def _join_heads(tensors: Sequence[list[list[Plane]] | None]) -> tuple[tuple[Plane, ...], ...]:
    """The planes of each head over all tensors; empty if heads cannot be divided."""
    divided = [each for each in tensors if each is not None]
    if len(divided) < len(tensors) or len(set(map(len, divided))) > 1:
        return ()
    return tuple(_merge_adjacent(itertools.chain(*each)) for each in zip(*divided, strict=True))


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


def check_disjoint(names: Mapping[Plane, str], num_blocks: int) -> None:
    """Refuse planes of one row each that share bytes, by a LayoutError.

    Planes whose address ranges do not meet are valid with any strides. Planes that do meet
    interleave block by block, so each must have its own place within a common stride."""
    cluster: list[Plane] = []
    end = 0
    for plane in sorted(names):
        if cluster and plane.base >= end:
            _check_cluster(cluster, names, num_blocks)
            cluster = []
        cluster.append(plane)
        end = max(end, plane.base + (num_blocks - 1) * plane.block_stride + plane.row_bytes)
    _check_cluster(cluster, names, num_blocks)


def _check_cluster(cluster: list[Plane], names: Mapping[Plane, str], num_blocks: int) -> None:
    stride = cluster[0].block_stride if num_blocks > 1 else 1 << 62
    places = sorted(((plane.base - cluster[0].base) % stride, plane) for plane in cluster)
    places.append((stride + places[0][0], places[0][1]))
    for (start, plane), (limit, other) in itertools.pairwise(places):
        if start + plane.row_bytes > limit or plane.block_stride != other.block_stride:
            raise LayoutError(
                f"pages of KV cache tensors {names[plane]!r} and {names[other]!r} overlap or "
                f"interleave at different strides ({plane}, {other}); allowed: pages that "
                f"share no bytes"
            )


def share_of(
    planes: Sequence[PlacedPlane], replica: int, replicas: int
) -> tuple[list[PlacedPlane], range]:
    """Cut planes, in the order of the slot, so that each of `replicas` ranks that hold the same
    stores about as many bytes of them. Returns the planes, up to two of them cut in two, and the
    numbers of those that rank `replica`, counted from 0, stores: over all replicas each byte once.
    """
    total = sum(plane.page_bytes for plane in planes)
    begin = _snap(planes, total * replica // replicas)
    end = _snap(planes, total * (replica + 1) // replicas)
    cut = _cut(_cut(planes, begin), end)
    starts = list(itertools.accumulate((plane.page_bytes for plane in cut), initial=0))
    return cut, range(starts.index(begin), starts.index(end))


def _snap(planes: Sequence[PlacedPlane], position: int) -> int:
    """The last place up to byte `position` where a plane may be cut: a row's start, or in a plane
    of one row a cache line's."""
    start = 0
    for plane in planes:
        if position < start + plane.page_bytes:
            step = plane.row_bytes if plane.rows > 1 else SHARD_ALIGNMENT
            return start + (position - start) // step * step
        start += plane.page_bytes
    return start


def _cut(planes: Sequence[PlacedPlane], position: int) -> list[PlacedPlane]:
    """The planes, cut so that one begins at byte `position`."""
    cut: list[PlacedPlane] = []
    start = 0
    for plane in planes:
        within = position - start
        cut += _split(plane, within) if 0 < within < plane.page_bytes else (plane,)
        start += plane.page_bytes
    return cut


def _split(plane: PlacedPlane, position: int) -> tuple[PlacedPlane, PlacedPlane]:
    if plane.rows > 1:
        rows = position // plane.row_bytes
        tail = plane._replace(
            base=plane.base + rows * plane.row_stride,
            rows=plane.rows - rows,
            slot_offset=plane.slot_offset + rows * plane.row_bytes,
        )
        return plane._replace(rows=rows), tail
    rest = plane.row_bytes - position
    tail = plane._replace(
        base=plane.base + position,
        row_bytes=rest,
        row_stride=rest,
        slot_offset=plane.slot_offset + position,
    )
    return plane._replace(row_bytes=position, row_stride=position), tail
