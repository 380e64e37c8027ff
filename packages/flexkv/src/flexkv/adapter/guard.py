# SPDX-License-Identifier: Apache-2.0
"""The edge to the engine: where an unexpected exception ends instead of ending the engine."""

from __future__ import annotations

import logging
from collections import Counter
from types import TracebackType

logger = logging.getLogger(__name__)


class Edge:
    """Counts errors by place, and logs each place once.

    Put `with edge.guard(place, consequence):` around a call, and return the answer that makes it a
    miss behind the block.
    """

    __slots__ = ("failures",)

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()

    def guard(self, place: str, consequence: str) -> Guard:
        """Swallow, count and log what the block raises. `KeyboardInterrupt` and the like pass."""
        return Guard(self, place, consequence)

    def failed(self, place: str, consequence: str, error: BaseException) -> None:
        """Record one failure."""
        self.failures[place] += 1
        if self.failures[place] == 1:
            logger.error(
                "error in %s: %s (logged once, then only counted)",
                place,
                consequence,
                exc_info=error,
            )


class Guard:
    """One guarded block; see `Edge.guard`."""

    __slots__ = ("_consequence", "_edge", "_place")

    def __init__(self, edge: Edge, place: str, consequence: str) -> None:
        self._edge = edge
        self._place = place
        self._consequence = consequence

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self._edge.failed(self._place, self._consequence, error)
        return True
