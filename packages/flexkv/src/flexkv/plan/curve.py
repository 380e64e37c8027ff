# SPDX-License-Identifier: Apache-2.0
"""Hit rates, saved seconds and writes of an LRU cache against its size, from distances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexkv.plan.distances import UNSEEN, lru_distances
from flexkv.plan.prefill import PrefillCost
from flexkv.plan.trace import Trace

_DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class Point:
    """A cache, and what it brings on a trace.

    Attributes:
        blocks: that it holds.
        hit_tokens: prompt tokens that are loaded instead of computed.
        hit_rate: share of all prompt tokens.
        saved_seconds: of computing; None if the cost of computing is unknown.
        written_blocks: written to it, if it is a disk that takes all blocks it lacks.
    """

    blocks: int
    hit_tokens: int
    hit_rate: float
    saved_seconds: float | None
    written_blocks: int


class LRUCurve:
    """What an LRU cache of any size brings on a trace.

    Args:
        trace: replayed once.
        cost: of computing; None if unknown.
        engine_blocks: blocks that the engine's own prefix cache holds. What that hits is no hit
            here.

    Attributes:
        useful_blocks: the smallest cache that hits all that can be hit.
        engine_tokens: prompt tokens that the engine's own cache hits.
    """

    def __init__(self, trace: Trace, cost: PrefillCost | None, engine_blocks: int = 0) -> None:
        found = lru_distances(trace)
        self._block_tokens = trace.block_tokens
        self._prompt_tokens = trace.prompt_tokens
        seen = found.distance != UNSEEN
        useful = seen & found.counts
        by_engine = useful & (found.distance <= engine_blocks)
        self.engine_tokens = int(by_engine.sum()) * trace.block_tokens
        useful &= ~by_engine
        order = np.argsort(found.distance[useful], kind="stable")
        self._depths = found.distance[useful][order]
        self._saved: npt.NDArray[np.float64] | None = None
        if cost is not None:
            seconds = cost.of_blocks(found.position[useful][order], trace.block_tokens)
            self._saved = np.concatenate(([0.0], np.cumsum(seconds)))
        self._uses = len(found.distance)
        self._all_depths = np.sort(found.distance[seen])
        self.useful_blocks = int(self._depths[-1]) if len(self._depths) else 0

    def at(self, blocks: int) -> Point:
        """A cache of so many blocks."""
        hits = int(np.searchsorted(self._depths, blocks, side="right"))
        kept = int(np.searchsorted(self._all_depths, blocks, side="right"))
        tokens = hits * self._block_tokens
        return Point(
            blocks,
            tokens,
            tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
            None if self._saved is None else float(self._saved[hits]),
            self._uses - kept,
        )

    @property
    def knee(self) -> int:
        """Blocks beyond which more bring little: where the curve is farthest above the straight
        line from nothing to `useful_blocks`. 0 if nothing can be hit.

        Satopaa et al.: Finding a "Kneedle" in a Haystack. ICDCSW 2011.
        """
        if not len(self._depths):
            return 0
        hits = np.arange(1, len(self._depths) + 1) / len(self._depths)
        return int(self._depths[np.argmax(hits - self._depths / self.useful_blocks)])

    def smallest_with(self, share: float) -> int:
        """The smallest cache that hits this share of what can be hit."""
        if not len(self._depths):
            return 0
        hits = max(1, int(np.ceil(share * len(self._depths))))
        return int(self._depths[hits - 1])


def a_day(amount: float, seconds: float) -> float | None:
    """`amount` of `seconds`, for 24 hours; None if the trace took no time."""
    return amount * _DAY_SECONDS / seconds if seconds > 0 else None


def round_sizes(least: int, most: int, count: int) -> Sequence[int]:
    """About `count` sizes from `least` to `most`, in equal ratios."""
    if most <= least:
        return [most]
    sizes = np.geomspace(least, most, count).round().astype(int).tolist()
    return sorted(set(map(int, sizes)))
