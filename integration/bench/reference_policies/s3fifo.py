# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO: evicts a block that no second request finds before blocks that many requests find.

Yang, Zhang, Qiu, Yue, Rashmi: FIFO Queues are All You Need for Cache Eviction. SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from flexkv.eviction.policy import EvictionPolicy, RequestContext

_SMALL_SHARE = 10
"""The small queue has a tenth of the blocks, as in the paper. There are at most as many ghosts as
blocks in the main queue then."""

_MOST_HITS = 3
"""Hits are counted up to this number, as in the paper."""

_PROMOTING_HITS = 2
"""Hits with which a block moves from the small queue to the main queue."""


class _Queue:
    """A queue of blocks, first in, first out.

    Attributes:
        order: the blocks in order, the next to leave first. A block that is held when its turn
            comes is taken out, and becomes the first again when it is released.
        blocks: the number of its blocks, those that are taken out included.
    """

    __slots__ = ("blocks", "order")

    def __init__(self) -> None:
        self.order: OrderedDict[bytes, _Block] = OrderedDict()
        self.blocks = 0


@dataclass(slots=True, eq=False)
class _Block:
    """The state of a block.

    Attributes:
        queue: the queue of the block.
        hits: hits since it entered the queue, less one for each round in the main queue.
        held: whether the block must not be evicted.
        aside: whether the block was taken out of the queue's order, because it was held.
    """

    queue: _Queue
    hits: int = 0
    held: bool = True
    aside: bool = False


class S3FIFOPolicy(EvictionPolicy):
    """Two queues of blocks and the keys of evicted ones. See `EvictionPolicy`.

    New blocks enter the small queue. At its end, blocks with two hits move to the main queue. The
    others are evicted, and their keys are kept as ghosts. A block whose key is a ghost enters the
    main queue. At the end of the main queue, a block with hits returns to its start with one hit
    less.

    A scan therefore passes through the small queue only. Each step of `victim` uses up a hit, an
    insertion or a release, so a call takes amortised O(1). A block takes up to 650 bytes, key and
    ghosts included.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._capacity = 0  # the most blocks of the tier so far
        self._small = _Queue()
        self._main = _Queue()

    def inserted(self, key: bytes, after: bytes | None, fetched: bool = False) -> None:
        queue = self._small
        if key in self._ghosts:
            del self._ghosts[key]
            queue = self._main
        block = self._blocks[key] = _Block(queue)
        self._capacity = max(self._capacity, len(self._blocks))
        _enter(queue, key, block)

    def hit(self, key: bytes, used: int, context: RequestContext) -> None:
        block = self._blocks[key]
        block.hits = min(block.hits + 1, _MOST_HITS)

    def held(self, key: bytes) -> None:
        self._blocks[key].held = True

    def released(self, key: bytes, used: int) -> None:
        block = self._blocks[key]
        block.held = False
        if block.aside:
            block.aside = False
            block.queue.order[key] = block
            block.queue.order.move_to_end(key, last=False)

    def evicted(self, key: bytes) -> None:
        block = self._blocks.pop(key)
        _leave(block.queue, key, block)
        if block.queue is self._small:
            self._ghosts[key] = None
            if len(self._ghosts) > self._capacity - self._capacity // _SMALL_SHARE:
                self._ghosts.popitem(last=False)

    def victim(self) -> bytes | None:
        while (queue := self._next_queue()) is not None:
            key, block = next(iter(queue.order.items()))
            if queue is self._small and block.hits >= _PROMOTING_HITS:
                _leave(queue, key, block)
                block.queue, block.hits = self._main, 0
                _enter(self._main, key, block)
            elif queue is self._main and block.hits:
                block.hits -= 1
                queue.order.move_to_end(key)
            elif block.held:
                block.aside = True
                del queue.order[key]
            else:
                return key
        return None

    def clear(self) -> None:
        self._blocks.clear()
        self._ghosts.clear()
        self._small = _Queue()
        self._main = _Queue()

    def _next_queue(self) -> _Queue | None:
        """The queue of the next victim; None if the order of both queues is empty."""
        small, main = self._small, self._main
        if small.order and (small.blocks * _SMALL_SHARE >= self._capacity or not main.order):
            return small
        return main if main.order else None


def _enter(queue: _Queue, key: bytes, block: _Block) -> None:
    queue.order[key] = block
    queue.blocks += 1


def _leave(queue: _Queue, key: bytes, block: _Block) -> None:
    if not block.aside:
        del queue.order[key]
    queue.blocks -= 1
