# SPDX-License-Identifier: Apache-2.0
"""Computes in one pass, for every use of a block, the smallest LRU cache that hits it.

The cache evicts prefixes from their ends, and a request uses its last block first. Blocks therefore
lie in the order of their last request, latest first, and blocks of one request by position. A
prefix is hit up to the first block that lies too deep. Depths grow along a prefix, so no later
block is nearer.

The blocks that a request was the last to use are the end of its prompt. The order is therefore one
of requests, each with a range of positions. A prompt crosses few of these ranges. The cost is O(1)
per block and O(log requests) per range.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexkv.plan.trace import Trace

UNSEEN = 0
"""The distance of a block that no earlier request has used."""


@dataclass(frozen=True, slots=True)
class Distances:
    """Every use of a complete block, in the order of the trace. All have the shape (uses,)."""

    distance: npt.NDArray[np.int64]
    """The number of blocks that an LRU cache must hold to hit this block; `UNSEEN` if it is new."""
    position: npt.NDArray[np.int64]
    """Position of the block in its prompt, in blocks."""
    counts: npt.NDArray[np.bool_]
    """Whether a hit saves computing. False for blocks of answers, and for a block that ends its
    prompt, whose last token an engine always computes."""


class _Sums:
    """Numbers with sums of suffixes in O(log n): a Fenwick tree."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tree = [0] * (size + 1)

    def add(self, place: int, value: int) -> None:
        tree, at = self._tree, self._size - place
        while at <= self._size:
            tree[at] += value
            at += at & -at

    def behind(self, place: int) -> int:
        """The sum of the numbers at places greater than `place`."""
        tree, at, total = self._tree, self._size - place - 1, 0
        while at > 0:
            total += tree[at]
            at -= at & -at
        return total


def lru_distances(trace: Trace) -> Distances:
    """Compute the distances of all uses in `trace`."""
    distance, position, counts = array("q"), array("q"), bytearray()
    last = [-1] * trace.distinct_blocks
    owned = _Sums(len(trace.requests))
    for number, request in enumerate(trace.requests):
        chain = request.chain
        known = _known(chain, last)
        start = 0
        while start < known:
            owner = last[chain[start]]
            stop = start + 1
            while stop < known and last[chain[stop]] == owner:
                stop += 1
            # Blocks that later requests used last, and blocks that this one has used already.
            nearer = owned.behind(owner) + start
            distance.extend(range(nearer + 1, nearer + 1 + stop - start))
            owned.add(owner, start - stop)
            start = stop
        distance.extend([UNSEEN] * (len(chain) - known))
        position.extend(range(len(chain)))
        useful = min(len(request.blocks), (request.prompt_tokens - 1) // trace.block_tokens)
        counts += b"\1" * useful + b"\0" * (len(chain) - useful)
        owned.add(number, len(chain))
        for block in chain:
            last[block] = number
    return Distances(
        np.array(distance, dtype=np.int64),
        np.array(position, dtype=np.int64),
        np.frombuffer(bytes(counts), dtype=np.bool_),
    )


def _known(chain: Sequence[int], last: Sequence[int]) -> int:
    """How many blocks of the chain earlier requests have used. A block behind a new one is new."""
    for place, block in enumerate(chain):
        if last[block] < 0:
            return place
    return len(chain)
