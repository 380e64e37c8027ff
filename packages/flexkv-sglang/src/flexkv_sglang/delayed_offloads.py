# SPDX-License-Identifier: Apache-2.0
"""Offloads that wait until SGLang is about to evict the pages.

SGLang offloads pages as soon as they are computed. Once host memory is full, each of them would
replace a block that SGLang's own pool may lack, by one that the pool has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flexkv_sglang.ranks import Exchanges

AT_ONCE = 32
"""The most offloads that begin at once: rank 0 names them in one message to the others."""


class DelayedOffloads:
    """Nodes of SGLang's tree whose offload waits, the least recently used first, on the rank that
    decides. Single-threaded. At most as many as the tree has, apart from evicted ones that have not
    been taken yet.

    Attributes:
        tokens: tokens of all nodes; 0 on ranks that do not decide.
        wrapper: SGLang's wrapper of the linker, which offloads; None while no offload may wait. Set
            on all ranks at once.
    """

    def __init__(self, exchanges: Exchanges) -> None:
        self.tokens = 0
        self.wrapper: Any = None
        self._exchanges = exchanges
        self._nodes: dict[int, int] = {}

    def used(self, node: int, tokens: int) -> None:
        """A node was made or used: it becomes the last to be taken."""
        self.tokens += tokens - self._nodes.pop(node, 0)
        self._nodes[node] = tokens

    def take(self, left: int, most: int, *, latest: bool = False) -> Iterator[int]:
        """Remove nodes until at most `left` tokens wait, or `most` tokens are removed. `latest`:
        the most recently used first."""
        last = max(left, self.tokens - most)
        while self._nodes and self.tokens > last:
            node = next(reversed(self._nodes) if latest else iter(self._nodes))
            self.tokens -= self._nodes.pop(node)
            yield node

    def agree(self, choose: Callable[[], Sequence[int]]) -> list[int]:
        """The nodes whose offload begins now, on all ranks: those that `choose` returns on the rank
        that decides, at most `AT_ONCE`."""

        def made() -> Sequence[int]:
            nodes = choose()
            more = bool(self._nodes or nodes)
            return [more, len(nodes), *nodes, *[0] * (AT_ONCE - len(nodes))]

        place, consequence = "choosing delayed offloads", "the pages are not cached"
        more, count, *nodes = self._exchanges.decide(place, consequence, made, 2 + AT_ONCE)
        if not more:
            self.wrapper = None
        return nodes[:count]

    def can_all(self, holds: Callable[[], bool]) -> bool:
        """Whether `holds` returns true on all ranks."""
        return self._exchanges.all("preparing an offload", "the pages are not cached", holds)

    def clear(self) -> None:
        """Forget all nodes."""
        self._nodes.clear()
        self.tokens = 0
