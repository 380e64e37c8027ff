# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO: a block that no second request finds leaves before blocks that many requests find.

Yang, Zhang, Qiu, Yue, Rashmi: FIFO Queues are All You Need for Cache Eviction. SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from flexkv.eviction.base import EvictionPolicy, RequestContext

_SMALL_SHARE = 10
"""The small queue has a tenth of the blocks; the ghosts are as many as the main queue has then."""

_MOST_HITS = 3
"""Hits are counted up to this number, as in the paper."""

_PROMOTING_HITS = 2
"""A block with so many hits goes from the small queue to the main queue."""


class _Queue:
    """First in, first out.

    Attributes:
        order: the blocks in their order, the next one to leave first. A block that is held when its
            turn comes stands aside, and is first again once it is released.
        blocks: of this queue, those aside included.
    """

    __slots__ = ("blocks", "order")

    def __init__(self) -> None:
        self.order: OrderedDict[bytes, _Block] = OrderedDict()
        self.blocks = 0


@dataclass(slots=True, eq=False)
class _Block:
    """What is remembered of a block.

    Attributes:
        queue: that it belongs to.
        hits: since it came into its queue, less one for each round in the main queue.
        held: whether it is no victim.
        aside: whether its turn came while it was held.
    """

    queue: _Queue
    hits: int = 0
    held: bool = True
    aside: bool = False


class S3FIFOPolicy(EvictionPolicy):
    """Two queues and a memory of keys. See `EvictionPolicy`.

    New blocks enter the small queue. At its end, those that were hit twice go to the main queue and
    the others leave the tier; their keys are kept as ghosts. A block whose key is a ghost enters
    the main queue. At its end, a block that was hit goes around again, with one hit less.

    A scan therefore passes through the small queue alone. Each step of `victim` is paid for by a
    hit, an insertion or a release, so a call takes amortised O(1). A block takes up to 650 bytes,
    key and ghosts included.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._capacity = 0  # the most blocks that there were at once
        self._small = _Queue()
        self._main = _Queue()

    def inserted(self, key: bytes, after: bytes | None) -> None:
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

    def victim(self, newcomer: bytes | None = None) -> bytes | None:
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
        """The queue that gives the next victim; None if all blocks stand aside."""
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
