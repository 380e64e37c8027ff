# SPDX-License-Identifier: Apache-2.0
"""Histograms, for metrics whose average says too little."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds for latencies, in seconds: from less than a step of an engine to more than any tier may
take. Not tuned."""

BLOCKS_BOUNDS = tuple(float(1 << power) for power in range(13))
"""Bounds for numbers of blocks: up to 4096, a prompt of 65,536 tokens in blocks of 16."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The values of one range since the last `take`.

    Attributes:
        place: index of the range's upper bound; the number of bounds for the range beyond the last.
        count: the number of values.
        total: the sum of the values.
    """

    place: int
    count: int
    total: float


class Histogram:
    """Counts values by range. Adding a value costs a binary search; memory does not grow.

    Args:
        bounds: upper bounds of the ranges, ascending. A bound belongs to the range below it.
    """

    __slots__ = ("_bounds", "_counts", "_totals")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts: dict[int, int] = {}
        self._totals: dict[int, float] = {}

    def observe(self, value: float) -> None:
        """Add one value."""
        place = bisect.bisect_left(self._bounds, value)
        self._counts[place] = self._counts.get(place, 0) + 1
        self._totals[place] = self._totals.get(place, 0.0) + value

    def take(self) -> list[Bucket]:
        """Take the ranges that got values since the last call."""
        if not self._counts:
            return []
        counts, self._counts = self._counts, {}
        totals, self._totals = self._totals, {}
        return [Bucket(place, count, totals[place]) for place, count in counts.items()]


def representative(bounds: Sequence[float], place: int, count: int, total: float) -> float:
    """The mean of `count` values of one range, moved into the range if rounding has left it. If a
    histogram observes it `count` times, buckets and sum are right.

    Args:
        bounds: upper bounds of the ranges, ascending.
        place: see `Bucket`.
        count: the number of values, at least 1.
        total: the sum of the values.
    """
    low = bounds[place - 1] if place else -math.inf
    high = bounds[place] if place < len(bounds) else math.inf
    return min(high, max(math.nextafter(low, math.inf), total / count))
