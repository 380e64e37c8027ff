# SPDX-License-Identifier: Apache-2.0
"""Divides one tensor of an engine into the pieces of each of its blocks.

A tensor can be divided in two ways. By head: each KV head's bytes are separate, in the order of the
tensor's dimensions, so the result does not depend on the order in memory or the number of heads.
Opaque: the bytes stay as they lie in memory, whatever they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flexkv.types.errors import LayoutError

MAX_PLANES = 65_536
"""More pieces than this per engine block mean that the tensor is not paged by block at all."""

MIN_ROW_BYTES = 16
"""Heads with shorter rows are not divided: one access of a GPU copies one row."""

_NUMBERS = "biufcV"
"""Kinds of elements that consist of plain bytes; V stands for types that numpy lacks."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """One engine tensor as seen from outside. `shape` and `stride` count elements, of `itemsize`
    bytes. Errors show the name.

    Attributes:
        head_dim: the dimension that counts this rank's KV heads; None if there is none, or if its
            entries cannot be divided.
        page_dim: the dimension that counts blocks; None if only one has a fitting extent.
        owner: owner of the memory, kept alive by the view and layouts made of it; None if the
            caller keeps the memory alive.
    """

    name: str
    data_ptr: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    head_dim: int | None = None
    page_dim: int | None = None
    owner: object = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls, name: str, array: object, head_dim: int | None = None, page_dim: int | None = None
    ) -> TensorView:
        """The view of a writable numpy array of numbers, or of another object with
        `__array_interface__`, in host memory. The view keeps the array alive. Raises LayoutError
        for anything else."""
        about = getattr(array, "__array_interface__", None)
        if not isinstance(about, Mapping):
            raise LayoutError(
                f"tensor {name!r} is a {type(array).__name__}; allowed: a numpy array, or what has "
                f"__array_interface__"
            )
        address, read_only = about["data"]
        if about["typestr"][1] not in _NUMBERS or read_only:
            raise LayoutError(
                f"tensor {name!r} has elements of type {about['typestr']}"
                f"{' and is read-only' if read_only else ''}; allowed: a writable array of numbers"
            )
        itemsize = int(about["typestr"][2:])
        shape = tuple(about["shape"])
        strides = about.get("strides") or _dense_strides(shape, itemsize)
        if any(stride % itemsize for stride in strides):
            raise LayoutError(
                f"tensor {name!r} has strides of {strides} bytes; allowed: multiples of the "
                f"{itemsize} bytes of an element"
            )
        stride = tuple(each // itemsize for each in strides)
        return cls(name, address, shape, stride, itemsize, head_dim, page_dim, array)

    def __str__(self) -> str:
        return f"KV cache tensor {self.name!r} of shape {self.shape} and strides {self.stride}"


class Plane(NamedTuple):
    """One piece that every engine block has, its page: `rows` rows of `row_bytes` bytes. Row r of
    block b lies at `base + b * block_stride + r * row_stride` (all in bytes)."""

    base: int
    block_stride: int
    row_bytes: int
    rows: int
    row_stride: int

    @property
    def page_bytes(self) -> int:
        return self.rows * self.row_bytes


class Dim(NamedTuple):
    """A dimension within a block: its extent, and the distance of neighbours in bytes."""

    size: int
    stride: int


def _dense_strides(shape: Sequence[int], itemsize: int) -> list[int]:
    """Strides of an array without gaps, in bytes."""
    return [itemsize * math.prod(shape[number + 1 :]) for number in range(len(shape))]


def opaque_planes(view: TensorView, num_blocks: int) -> list[Plane]:
    """The pieces of each block as they lie in memory, each as long as possible. Raises LayoutError
    if the tensor is not paged by block."""
    block_dim, ratio = _find_block_dim(view, num_blocks)
    dims = _dims_within(view, block_dim, ratio)
    dims.sort(key=lambda dim: dim.stride, reverse=True)
    page_bytes, outer = _fold(dims, view.itemsize)
    block_stride = view.stride[block_dim] * view.itemsize * ratio
    return [
        Plane(view.data_ptr + offset, block_stride, page_bytes, 1, page_bytes)
        for offset in _offsets(view, outer)
    ]


def head_planes(view: TensorView, num_blocks: int) -> list[list[Plane]] | None:
    """The pieces of each block by KV head, in the order of the tensor's dimensions. None if the
    tensor has no dimension of heads, or if its heads lie interleaved in memory in pieces too short
    to copy one by one. Raises LayoutError if the tensor is not paged by block."""
    block_dim, ratio = _find_block_dim(view, num_blocks)
    if view.head_dim is None:
        return None
    dims = _dims_within(view, block_dim, ratio, view.head_dim)
    row_bytes, outer = _fold(dims, view.itemsize)
    if row_bytes < MIN_ROW_BYTES:
        return None
    rows = outer.pop() if outer else Dim(1, row_bytes)
    block_stride = view.stride[block_dim] * view.itemsize * ratio
    head_stride = view.stride[view.head_dim] * view.itemsize
    offsets = _offsets(view, outer)
    return [
        [
            Plane(view.data_ptr + head * head_stride + offset, block_stride, row_bytes, *rows)
            for offset in offsets
        ]
        for head in range(view.shape[view.head_dim])
    ]


def geometry(view: TensorView, num_blocks: int, *, by_head: bool) -> tuple[int, ...]:
    """The meaning of the bytes of `opaque_planes`, or of one head of `head_planes`: extents in the
    order of the dimensions, and the places of these in the order of memory. The place of the heads
    among the other dimensions makes no difference."""
    block_dim, ratio = _find_block_dim(view, num_blocks)
    dims = _dims_within(view, block_dim, ratio, view.head_dim if by_head else None)
    order = sorted(range(len(dims)), key=lambda i: dims[i].stride)
    return (view.itemsize, *(dim.size for dim in dims), *order)


def _dims_within(
    view: TensorView, block_dim: int, ratio: int, head_dim: int | None = None
) -> list[Dim]:
    """The dimensions within a block, those of one entry left out, in the tensor's order. Kernel
    blocks, `ratio` of which make a block, count as a dimension in the place of the blocks'."""
    dims = []
    for number, (extent, stride) in enumerate(zip(view.shape, view.stride, strict=True)):
        size = ratio if number == block_dim else extent
        if size > 1 and number != head_dim:
            dims.append(Dim(size, stride * view.itemsize))
    if any(dim.stride <= 0 for dim in dims) or view.stride[block_dim] <= 0:
        raise LayoutError(f"{view} repeats elements; allowed: positive strides")
    return dims


def _find_block_dim(view: TensorView, num_blocks: int) -> tuple[int, int]:
    """The dimension that counts blocks, and how many of its entries make one block.

    Without `page_dim`, a dimension fits if it has `num_blocks` entries. One of the first two also
    fits with a multiple, unless one with `num_blocks` entries stands before it: engines put at most
    the K/V pair before the block dimension. A single block is all of the tensor, whichever fits.
    """
    if len(view.shape) != len(view.stride):
        raise LayoutError(f"{view} has not one stride for each dimension")
    sizes = [0 if dim == view.head_dim else size for dim, size in enumerate(view.shape)]
    fits = [
        dim
        for dim, size in enumerate(sizes)
        if size > 0
        and size % num_blocks == 0
        and (
            dim == view.page_dim
            if view.page_dim is not None
            else size == num_blocks or (dim < _FIRST and num_blocks not in sizes[:dim])
        )
    ]
    if len(fits) > 1 < num_blocks:
        raise LayoutError(
            f"{view} has dimensions {' and '.join(map(str, fits))} that may count the engine's "
            f"{num_blocks} blocks; allowed: one such dimension, or page_dim in its TensorView"
        )
    if fits:
        dim = min(fits, key=lambda dim: sizes[dim])
        return dim, sizes[dim] // num_blocks
    which = "" if view.page_dim is None else f", or page_dim={view.page_dim} is none"
    raise LayoutError(
        f"{view} has no dimension that counts the engine's {num_blocks} blocks{which}; "
        f"allowed: a dimension of {num_blocks} or, as one of the first two or page_dim, a multiple "
        f"of it; it counts no heads"
    )


_FIRST = 2
"""Of this many first dimensions, one may count smaller blocks: the K/V pair stands before it."""


def _fold(dims: Sequence[Dim], itemsize: int) -> tuple[int, list[Dim]]:
    """Fold the last dimensions that lie densely into one run. Returns the run's bytes and the
    dimensions left before it."""
    run = itemsize
    rest = list(dims)
    while rest and rest[-1].stride == run:
        run *= rest.pop().size
    return run, rest


def _offsets(view: TensorView, dims: Sequence[Dim]) -> list[int]:
    """Where each combination of entries of `dims` starts, the last dimension fastest."""
    count = math.prod(dim.size for dim in dims)
    if count > MAX_PLANES:
        raise LayoutError(f"{view} scatters a block over {count} pieces; allowed: {MAX_PLANES}")
    offsets = [0]
    for size, stride in dims:
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    return offsets
