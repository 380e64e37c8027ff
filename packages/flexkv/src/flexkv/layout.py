# SPDX-License-Identifier: Apache-2.0
"""Where an engine keeps the pages of its KV cache, and what a FlexKV block of them looks like.

Everything is derived from addresses, shapes and strides of the engine's tensors; neither the
name of an attention backend nor a version of the engine says anything here.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexkv.errors import LayoutError

FORMAT_VERSION = 1
"""Version of the block format below; part of every fingerprint."""

SLOT_ALIGNMENT = 4096
"""Slots start at multiples of this many bytes: what O_DIRECT asks for."""

SHARD_ALIGNMENT = 64
"""A rank's shard starts at a multiple of this many bytes within the slot: one cache line."""

MAX_PLANES = 65_536
"""More pieces than this per engine block mean that the tensor is not paged by block at all."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """One engine tensor as seen from outside.

    Attributes:
        name: what to call it in an error.
        data_ptr: address of the first element, in bytes.
        shape: extent of each dimension, in elements.
        stride: distance of neighbours in each dimension, in elements.
        itemsize: bytes of one element.
    """

    name: str
    data_ptr: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int


class Plane(NamedTuple):
    """One contiguous piece that every engine block has: the page of block b lies at
    `base + b * block_stride` and has `page_bytes` bytes (all three in bytes)."""

    base: int
    block_stride: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The pages of one rank's KV cache.

    Block b of the engine consists of the page of b in every plane, in this order. The addresses
    are valid as long as the engine keeps its tensors; the layout owns nothing.
    """

    planes: tuple[Plane, ...]
    num_blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one engine block over all planes."""
        return sum(plane.page_bytes for plane in self.planes)

    @property
    def geometry(self) -> tuple[int, ...]:
        """Page sizes in plane order: equal geometries hold the same bytes at the same places."""
        return tuple(plane.page_bytes for plane in self.planes)

    @classmethod
    def from_tensors(cls, views: Iterable[TensorView], num_blocks: int) -> KVLayout:
        """Describe the tensors of one rank.

        Args:
            views: one view per layer (or per packed group of layers), in the engine's order. A
                tensor that several layers share may appear several times and counts once.
            num_blocks: blocks that the engine hands out. One dimension of every tensor has this
                extent, or a multiple of it where the engine's kernels use smaller blocks.

        Raises:
            LayoutError: a tensor has no such dimension, or its pages overlap.
        """
        if num_blocks <= 0:
            raise LayoutError(f"the engine reports {num_blocks} KV blocks; allowed: 1 or more")
        planes: dict[Plane, str] = {}
        for view in views:
            for plane in _planes_of(view, num_blocks):
                planes.setdefault(plane, view.name)
        if not planes:
            raise LayoutError("the engine registered no KV cache tensors; allowed: 1 or more")
        _check_disjoint(planes, num_blocks)
        return cls(tuple(_merge_adjacent(list(planes))), num_blocks)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How FlexKV's blocks lie in their slots.

    A slot holds the shards of all ranks, one after another. A shard holds `engine_blocks` engine
    blocks of its rank, each as the pages of its planes in plane order.

    Attributes:
        engine_blocks: engine blocks per FlexKV block.
        shard_bytes: bytes of each rank's shard, by rank.
    """

    engine_blocks: int
    shard_bytes: tuple[int, ...]

    @property
    def shard_offsets(self) -> tuple[int, ...]:
        """Where each rank's shard starts within the slot, in bytes."""
        offsets, end = [], 0
        for size in self.shard_bytes:
            offsets.append(end)
            end += -(-size // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
        return tuple(offsets)

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        end = self.shard_offsets[-1] + self.shard_bytes[-1]
        return -(-end // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def choose_engine_blocks(
    engine_block_tokens: int, engine_block_bytes: int, block_tokens: int | None
) -> int:
    """How many engine blocks make one FlexKV block.

    Args:
        engine_block_tokens: tokens of one engine block.
        engine_block_bytes: bytes of one engine block over all layers and ranks.
        block_tokens: the setting of that name; None chooses as its help text says. From 2 MiB on,
            larger I/O is hardly faster on NVMe; 128 tokens bound what a prompt loses at its end
            (with 256, a prompt of 1,000 tokens whose engine finds 896 itself took 40 ms instead
            of 24 ms on 2 cores).

    Raises:
        LayoutError: `block_tokens` is not a multiple of the engine's block size.
    """
    if block_tokens is not None:
        if block_tokens % engine_block_tokens:
            raise LayoutError(
                f"block_tokens is {block_tokens}, but the engine's blocks have "
                f"{engine_block_tokens} tokens; allowed: a multiple of {engine_block_tokens}"
            )
        return block_tokens // engine_block_tokens
    wanted = -(-(2 << 20) // engine_block_bytes)
    return max(1, min(wanted, 128 // engine_block_tokens))


def fingerprint(model: Sequence[str], layout: KVLayout, engine_blocks: int) -> str:
    """Name of all blocks that may stand for one another; 32 hex digits.

    Args:
        model: what makes the bytes of a block what they are apart from its key: model, revision,
            dtype, hash scheme and the like, in a fixed order.
        layout: one rank's layout; its geometry goes in, its addresses do not.
        engine_blocks: engine blocks per FlexKV block.
    """
    parts = [str(FORMAT_VERSION), *model, str(engine_blocks), *map(str, layout.geometry)]
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _planes_of(view: TensorView, num_blocks: int) -> list[Plane]:
    block_dim, ratio = _find_block_dim(view, num_blocks)
    dims = [
        (size, stride * view.itemsize)
        for dim, (size, stride) in enumerate(zip(view.shape, view.stride, strict=True))
        if dim != block_dim and size > 1
    ]
    inner_stride = view.stride[block_dim] * view.itemsize
    if ratio > 1:
        dims.append((ratio, inner_stride))
    if any(stride <= 0 for _, stride in dims) or inner_stride <= 0:
        raise LayoutError(_describe(view) + " repeats elements; allowed: positive strides")
    page_bytes, outer = _longest_run(dims, view.itemsize)
    count = 1
    for size, _ in outer:
        count *= size
    if count > MAX_PLANES:
        raise LayoutError(
            f"{_describe(view)} scatters a block over {count} pieces; allowed: {MAX_PLANES}"
        )
    block_stride = inner_stride * ratio
    offsets = [0]
    for size, stride in outer:
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    return [Plane(view.data_ptr + offset, block_stride, page_bytes) for offset in offsets]


def _find_block_dim(view: TensorView, num_blocks: int) -> tuple[int, int]:
    """The dimension that counts blocks, and how many of its entries make one block.

    The first dimension with exactly `num_blocks` entries wins, else the first dimension with a
    multiple of it: engines put at most the K/V pair before the block dimension.
    """
    if len(view.shape) != len(view.stride):
        raise LayoutError(_describe(view) + " has not one stride for each dimension")
    for dim, size in enumerate(view.shape):
        if size == num_blocks:
            return dim, 1
    for dim, size in enumerate(view.shape[:2]):
        if size > 0 and size % num_blocks == 0:
            return dim, size // num_blocks
    raise LayoutError(
        f"{_describe(view)} has no dimension that counts the engine's {num_blocks} blocks; "
        f"allowed: a dimension of {num_blocks} or, as one of the first two, a multiple of it"
    )


def _longest_run(dims: list[tuple[int, int]], itemsize: int) -> tuple[int, list[tuple[int, int]]]:
    """Fold the inner dimensions that lie densely into one run.

    Returns the run's bytes and the dimensions left outside it, outermost first.
    """
    run = itemsize
    rest = sorted(dims, key=lambda dim: dim[1])
    while rest and rest[0][1] == run:
        size, stride = rest.pop(0)
        run = size * stride
    return run, rest[::-1]


def _merge_adjacent(planes: list[Plane]) -> list[Plane]:
    """Join neighbours in the list whose pages follow one another in memory in every block.

    The engine's order is kept, not the order of addresses: the latter may change from one start
    to the next, and with it the meaning of the bytes in a slot.
    """
    merged: list[Plane] = []
    for plane in planes:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.block_stride == plane.block_stride
            and last.base + last.page_bytes == plane.base
            and last.page_bytes + plane.page_bytes <= plane.block_stride
        ):
            merged[-1] = last._replace(page_bytes=last.page_bytes + plane.page_bytes)
        else:
            merged.append(plane)
    return merged


def _check_disjoint(names: dict[Plane, str], num_blocks: int) -> None:
    """Pages that share bytes would overwrite each other's copies.

    Planes whose address ranges do not meet are fine whatever their strides are. Those that do
    meet interleave, block by block, so each must have its own place within a common stride.
    """
    cluster: list[Plane] = []
    end = 0
    for plane in sorted(names):
        if cluster and plane.base >= end:
            _check_cluster(cluster, names, num_blocks)
            cluster = []
        cluster.append(plane)
        end = max(end, plane.base + (num_blocks - 1) * plane.block_stride + plane.page_bytes)
    _check_cluster(cluster, names, num_blocks)


def _check_cluster(cluster: list[Plane], names: dict[Plane, str], num_blocks: int) -> None:
    stride = cluster[0].block_stride if num_blocks > 1 else 1 << 62
    places = sorted(((plane.base - cluster[0].base) % stride, plane) for plane in cluster)
    places.append((stride + places[0][0], places[0][1]))
    for (start, plane), (limit, other) in itertools.pairwise(places):
        if start + plane.page_bytes > limit or plane.block_stride != other.block_stride:
            raise LayoutError(
                f"pages of KV cache tensors {names[plane]!r} and {names[other]!r} overlap or "
                f"interleave at different strides ({plane}, {other}); allowed: pages that "
                f"share no bytes"
            )


def _describe(view: TensorView) -> str:
    return f"KV cache tensor {view.name!r} of shape {view.shape} and strides {view.stride}"
