# SPDX-License-Identifier: Apache-2.0
"""Offloads that wait until SGLang is about to evict the pages.

SGLang offloads pages as soon as they are computed. Once host memory is full, each of them would
replace a block that SGLang's own pool may lack, by one that the pool has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

Offload = Callable[[], None]
"""Offloads the pages of one node, if SGLang still has them."""


class DelayedOffloads:
    """Nodes of SGLang's tree whose offload waits, the least recently used first. Single-threaded.
    At most as many as the tree has, apart from evicted ones that have not been taken yet.

    Attributes:
        tokens: tokens of all nodes.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._nodes: dict[int, tuple[int, Offload]] = {}

    def used(self, node: int, tokens: int, offload: Offload) -> None:
        """A node was made or used: it becomes the last to be taken."""
        self.tokens += tokens - self._nodes.pop(node, (0, offload))[0]
        self._nodes[node] = tokens, offload

    def take(self, left: int, most: int | None = None) -> Iterator[Offload]:
        """Remove nodes until at most `left` tokens wait. Stops earlier once `most` tokens are
        removed, if that is given."""
        last = -1 if most is None else self.tokens - most
        while self._nodes and self.tokens > max(left, last):
            tokens, offload = self._nodes.pop(next(iter(self._nodes)))
            self.tokens -= tokens
            yield offload

    def clear(self) -> None:
        """Forget all nodes."""
        self._nodes.clear()
        self.tokens = 0
