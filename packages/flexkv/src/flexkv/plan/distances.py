# SPDX-License-Identifier: Apache-2.0
"""How many blocks an LRU cache needs so that it hits a block: for every block in one pass.

The cache evicts prefixes from their ends, and a request uses its last block first. So blocks lie in
order of their last request, latest first, and those of one request by position. A prefix is hit up
to the first block that lies too deep: depths grow along a prefix, so no later block is nearer.

Blocks of which a request was the last to use them are the end of its prompt. The order is therefore
one of requests, each with a range of positions, and a prompt crosses few of them. This costs O(1)
a block, and O(log requests) for each range.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexkv.plan.trace import Trace

UNSEEN = 0
"""The distance of a block that no request had before."""


@dataclass(frozen=True, slots=True)
class Distances:
    """Every use of a complete block, in the order of the trace.

    Attributes:
        distance: int64 (uses,): blocks that an LRU cache must hold to hit this one; `UNSEEN` if it
            is new.
        position: int64 (uses,): of the block in its prompt.
        counts: bool (uses,): whether a hit saves computing: not for blocks of answers, nor for one
            that ends its prompt, of which an engine computes the last token in any case.
    """

    distance: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    counts: npt.NDArray[np.bool_]


class _Sums:
    """Numbers of which suffixes are added up in O(log n): a Fenwick tree."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tree = [0] * (size + 1)

    def add(self, place: int, value: int) -> None:
        tree, at = self._tree, self._size - place
        while at <= self._size:
            tree[at] += value
            at += at & -at

    def behind(self, place: int) -> int:
        """Sum of the numbers at places greater than `place`."""
        tree, at, total = self._tree, self._size - place - 1, 0
        while at > 0:
            total += tree[at]
            at -= at & -at
        return total


def lru_distances(trace: Trace) -> Distances:
    """The distances of all uses in `trace`."""
    distance, position, counts = array("q"), array("q"), bytearray()
    last = [-1] * trace.distinct_blocks
    owned = _Sums(len(trace.requests))
    for number, request in enumerate(trace.requests):
        chain = [*request.blocks, *request.answer]
        known = _known(chain, last)
        start = 0
        while start < known:
            owner = last[chain[start]]
            stop = start + 1
            while stop < known and last[chain[stop]] == owner:
                stop += 1
            # What later requests used last, and what this one has used already.
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
    """Blocks of the chain that some request had before: a block is new if the one before it is."""
    for place, block in enumerate(chain):
        if last[block] < 0:
            return place
    return len(chain)
