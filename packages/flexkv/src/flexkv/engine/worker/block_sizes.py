# SPDX-License-Identifier: Apache-2.0
"""Bytes of an engine's blocks, which may be of several parts with slots of their own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flexkv.types.mover import Direction


class SizedPart(NamedTuple):
    """Blocks of one size.

    Attributes:
        first: number of the first of them.
        planes: numbers of their planes among all.
    """

    first: int
    planes: range


class BlockSizes:
    """Bytes that a rank copies.

    Args:
        plane_bytes: bytes of a block in each plane.
        stored: numbers of the planes that this rank stores.
        parts: in the order of their blocks; empty if all blocks have all planes.
    """

    def __init__(
        self,
        plane_bytes: Sequence[int],
        stored: Sequence[int],
        parts: Sequence[SizedPart] = (),
    ) -> None:
        kept = set(stored)
        self._bytes = {
            Direction.LOAD: list(plane_bytes),
            Direction.STORE: [size if i in kept else 0 for i, size in enumerate(plane_bytes)],
        }
        self._parts = parts or [SizedPart(0, range(len(plane_bytes)))]
        self._firsts = np.array([part.first for part in self._parts], dtype=np.uint64)
        self._whole = {
            direction: [sum(sizes[part.planes.start : part.planes.stop]) for part in self._parts]
            for direction, sizes in self._bytes.items()
        }

    def of(self, direction: Direction, blocks: Sequence[int], planes: range | None = None) -> int:
        """Bytes of engine blocks; `planes`: of these planes only."""
        sizes = self._whole[direction]
        if planes is not None:
            sizes = [self._some(direction, part, planes) for part in self._parts]
        if len(sizes) == 1:
            return len(blocks) * sizes[0]
        numbers = np.frombuffer(array("Q", blocks), dtype=np.uint64)
        part_of = np.searchsorted(self._firsts, numbers, side="right") - 1
        counts = np.bincount(part_of, minlength=len(sizes)).tolist()
        return sum(count * size for count, size in zip(counts, sizes, strict=True))

    def _some(self, direction: Direction, part: SizedPart, planes: range) -> int:
        start = max(part.planes.start, planes.start)
        return sum(self._bytes[direction][start : min(part.planes.stop, planes.stop)])
