# SPDX-License-Identifier: Apache-2.0
"""The parts of a block that are loaded one after another, while layers with loaded parts
compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from flexkv.layout import PlacedPlane
from flexkv.types.mover import LAYER_PARTS


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Consecutive planes of a mover, in the order in which layers need them.

    Attributes:
        planes: the planes of each part.
        last: the number of the last part that each layer needs.
    """

    planes: tuple[range, ...]
    last: Mapping[str, int]


def split_layers(
    planes: Sequence[PlacedPlane], starts: Mapping[str, Set[int]], parts: int = LAYER_PARTS
) -> LayerParts:
    """Cut a block where the pages of a layer end.

    Args:
        planes: as the mover has them, in the order of the layers.
        starts: by layer, where its pieces of block 0 begin; see `KVLayout`.
        parts: at most.
    """
    ends = {layer: _end(planes, bases) for layer, bases in starts.items()}
    cuts = sorted(set(ends.values()))
    count = min(parts, len(cuts))
    chosen = [cuts[(i + 1) * len(cuts) // count - 1] for i in range(count)]
    begins = [0, *chosen[:-1]]
    ranges = tuple(range(begin, end) for begin, end in zip(begins, chosen, strict=True))
    last = {
        layer: next(i for i, part in enumerate(ranges) if end <= part.stop)
        for layer, end in ends.items()
    }
    return LayerParts(ranges, last)


class SplitLayout(NamedTuple):
    """A layout among several.

    Attributes:
        first: number of its first plane among those of all layouts.
        begin: which share of the model's layers comes before its first one, about.
        share: which share of the model's layers it spans, about.
        parts: its own.
    """

    first: int
    begin: float
    share: float
    parts: LayerParts


def merge_layers(layouts: Sequence[SplitLayout]) -> LayerParts:
    """The parts of all layouts, in about the order in which layers need them."""
    order = sorted(
        (each.begin + each.share * number / len(each.parts.planes), layout, number)
        for layout, each in enumerate(layouts)
        for number in range(len(each.parts.planes))
    )
    planes: list[range] = []
    last: dict[str, int] = {}
    for place, (_, layout, number) in enumerate(order):
        first, *_, parts = layouts[layout]
        part = parts.planes[number]
        planes.append(range(first + part.start, first + part.stop))
        last |= {layer: place for layer, needed in parts.last.items() if needed == number}
    return LayerParts(tuple(planes), last)


def _end(planes: Sequence[PlacedPlane], bases: Iterable[int]) -> int:
    """The number of planes up to the last one with bytes of the layer.

    A plane may have pages of several layers, and a page may be cut: following planes that begin no
    page belong to it. The end is therefore found by address.
    """
    wanted = set(bases)
    last = max(i for i, plane in enumerate(planes) if any(_has(plane, base) for base in wanted))
    while last + 1 < len(planes) and _continues(planes[last], planes[last + 1]):
        last += 1
    return last + 1


def _has(plane: PlacedPlane, address: int) -> bool:
    return plane.base <= address < plane.base + plane.row_bytes


def _continues(plane: PlacedPlane, other: PlacedPlane) -> bool:
    """Whether `other` is the rest of the page that `plane` begins."""
    return other.base == plane.base + plane.rows * plane.row_stride and (
        other.slot_offset == plane.slot_offset + plane.page_bytes
    )
