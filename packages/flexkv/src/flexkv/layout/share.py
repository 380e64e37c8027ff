# SPDX-License-Identifier: Apache-2.0
"""The part of its bytes that a rank stores if several ranks hold the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flexkv.layout.kv_layout import SHARD_ALIGNMENT, PlacedPlane


def share_of(
    planes: Sequence[PlacedPlane], replica: int, replicas: int
) -> tuple[list[PlacedPlane], range]:
    """Cut planes so that each of `replicas` ranks stores about as many bytes of them.

    Args:
        planes: planes of a rank, in the order of the slot.
        replica: number of the rank among those that hold the same, from 0.
        replicas: number of ranks that hold the same.

    Returns:
        The planes, up to two of them cut in two, and the numbers of those to store. Over all
        replicas the latter are all planes, each byte once.
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
