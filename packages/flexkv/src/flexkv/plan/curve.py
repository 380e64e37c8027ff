# SPDX-License-Identifier: Apache-2.0
"""Computes hit rate, saved seconds and writes of an LRU cache of any size, from distances."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexkv.plan.distances import UNSEEN, lru_distances
from flexkv.plan.saving import Savings
from flexkv.plan.trace import Trace

_KNEE = 0.1
"""A knee is at least this share of all hits above the straight line. Curves of sizes that hit in
proportion, such as that of one long prompt again and again, have noise there. Not tuned."""


@dataclass(frozen=True, slots=True)
class Point:
    """The results of one size of cache on a trace."""

    blocks: int
    hit_tokens: int
    hit_rate: float
    """`hit_tokens` as a share of all prompt tokens."""
    saved_seconds: float | None
    """Seconds that hits from memory save; None if the cost is unknown."""
    written_blocks: int
    """Blocks written to the cache, if it is a disk that stores all blocks it lacks."""


class LRUCurve:
    """The results of an LRU cache of any size on a trace, which is replayed once. Hits of the
    engine's own prefix cache, which holds `engine_blocks`, do not count; they are of
    `engine_tokens`. The smallest cache with all possible hits has `useful_blocks`."""

    def __init__(self, trace: Trace, savings: Savings | None, engine_blocks: int = 0) -> None:
        found = lru_distances(trace)
        self.distances = found
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
        if savings is not None:
            seconds = savings.of_memory[found.position[useful][order]]
            self._saved = np.concatenate(([0.0], np.cumsum(seconds)))
        self._uses = len(found.distance)
        self._all_depths = np.sort(found.distance[seen])
        self.useful_blocks = int(self._depths[-1]) if len(self._depths) else 0

    def at(self, blocks: int) -> Point:
        """The results of a cache of `blocks` blocks."""
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
        """The number of blocks beyond which more blocks add few hits: where the curve is farthest
        above the straight line from 0 to `useful_blocks`. 0 if the curve has no knee: it stays
        within a tenth of that line, or below it.

        Satopaa et al.: Finding a "Kneedle" in a Haystack. ICDCSW 2011.
        """
        if not len(self._depths):
            return 0
        hits = np.arange(1, len(self._depths) + 1) / len(self._depths)
        above = hits - self._depths / self.useful_blocks
        best = int(np.argmax(above))
        return int(self._depths[best]) if above[best] >= _KNEE else 0

    def smallest_with(self, share: float) -> int:
        """Blocks of the smallest cache with this share of all possible hits."""
        if not len(self._depths):
            return 0
        hits = max(1, int(np.ceil(share * len(self._depths))))
        return int(self._depths[hits - 1])
