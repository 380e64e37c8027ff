# SPDX-License-Identifier: Apache-2.0
"""How fast this engine computes and loads, as measured while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_MEMORY = 0.9
"""Weight of what was known, with each new step: some ten steps count. Long enough to even out a
step that something else slowed down, short enough to follow a batch that grows."""

LEAST_TOKENS = 64
"""Steps that compute fewer prompt tokens say more about the rest of the step than about them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one request that a step computes, from position `start` to `stop`."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def pairs(self) -> float:
        """Pairs of tokens that attention looks at."""
        return (self.stop**2 - self.start**2) / 2


class PrefillPace:
    """Seconds that prompt tokens take to compute.

    They grow with the tokens (weights) and with the pairs of tokens (attention). Both rates are
    fitted to the steps by least squares, in which older steps fade.
    """

    def __init__(self) -> None:
        # Sums of products of tokens (t), pairs (p) and seconds (s).
        self._tt = self._tp = self._pp = self._ts = self._ps = 0.0

    def observe(self, spans: Sequence[Span], seconds: float) -> None:
        """A step that computed `spans`, and little else, took so long."""
        tokens = sum(span.tokens for span in spans)
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        pairs = sum(span.pairs for span in spans)
        # Relative errors count: a step of many tokens is not worth more than one of few.
        t, p = tokens / seconds, pairs / seconds
        self._tt = self._tt * _MEMORY + t * t
        self._tp = self._tp * _MEMORY + t * p
        self._pp = self._pp * _MEMORY + p * p
        self._ts = self._ts * _MEMORY + t
        self._ps = self._ps * _MEMORY + p

    def seconds(self, span: Span) -> float | None:
        """How long `span` would take; None as long as nothing is known."""
        if not self._tt:
            return None
        per_token, per_pair = self._rates()
        return per_token * span.tokens + per_pair * span.pairs

    def _rates(self) -> tuple[float, float]:
        """Seconds per token and per pair, neither below 0."""
        determinant = self._tt * self._pp - self._tp**2
        # Steps that were all alike do not tell the two apart.
        if determinant > 1e-6 * self._tt * self._pp:
            per_token = (self._ts * self._pp - self._ps * self._tp) / determinant
            per_pair = (self._ps * self._tt - self._ts * self._tp) / determinant
            if per_token >= 0 and per_pair >= 0:
                return per_token, per_pair
            if per_token < 0:
                return 0.0, self._ps / self._pp
        return self._ts / self._tt, 0.0


class LinkPace:
    """Bytes per second of a link.

    What is measured runs from an order to when its end was seen, which may be a step later, so it
    is only ever too slow: the fastest of the last few counts.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=8)

    def observe(self, size: float, seconds: float) -> None:
        """`size` bytes took so long."""
        if size > 0 and seconds > 0:
            self._rates.append(size / seconds)

    def contradict(self, size: float, seconds: float) -> None:
        """Not even `size` bytes came in this time, where more was to be expected: the fastest
        measurement counts no more."""
        if self._rates:
            self._rates.remove(max(self._rates))
        self.observe(size, seconds)

    def seconds(self, size: int) -> float | None:
        """How long `size` bytes would take; None as long as nothing is known."""
        return size / max(self._rates) if self._rates else None
