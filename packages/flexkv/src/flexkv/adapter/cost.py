# SPDX-License-Identifier: Apache-2.0
"""How fast this engine computes and loads, as measured while it runs.

What is measured decides what is measured next: an estimate that keeps FlexKV from loading would
never meet a load that contradicts it. So every estimate here names what corrects it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_TOKENS = 64
"""Steps that compute fewer prompt tokens say more about the rest of the step than about them."""

_PREFILL_STEPS = 16
"""Steps that count: enough to outvote those that something else slowed down, few enough to follow
a batch that grows."""

_UNREPORTED_STEPS = 64
"""Steps of which a report may still come."""

_LOADS = 8
"""Measurements of a link that count."""

_REFUSALS = 16
"""A rate is doubtful after so many hits that were left because of it."""

_TRUST_SECONDS = 30.0
"""A rate is doubtful when nothing has confirmed it for so long: something else may have held the
link up, and have ended since."""

_MOST_PATIENCE = 64


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

    A token takes as long as the weights do, and longer the further back attention looks: seconds
    per token grow linearly with the mean position of a step's tokens. The line is fitted by medians
    (Theil and Sen), so that up to a quarter of the steps may be off by any factor: slowed down by
    something else, or seen to end together with the one before.

    A pace that is too fast leaves hits, which are computed and measured. One that is too slow loads
    them, and then little is computed: steps of a few tokens bound the pace from above.
    """

    def __init__(self) -> None:
        # Mean position of a step's tokens, and seconds per token.
        self._steps: deque[tuple[float, float]] = deque(maxlen=_PREFILL_STEPS)
        self._per_token = self._per_pair = 0.0

    def observe(self, spans: Sequence[Span], seconds: float) -> None:
        """A step that computed `spans`, and little else, took so long."""
        tokens = sum(span.tokens for span in spans)
        if tokens <= 0 or seconds <= 0:
            return
        position, pace = sum(span.pairs for span in spans) / tokens, seconds / tokens
        expected = self._per_token + self._per_pair * position
        if tokens < LEAST_TOKENS and pace >= expected:
            return
        self._steps.append((position, pace))
        self._fit()

    def seconds(self, span: Span) -> float | None:
        """How long `span` would take; None as long as nothing is known."""
        if not self._steps:
            return None
        return self._per_token * span.tokens + self._per_pair * span.pairs

    def _fit(self) -> None:
        steps = self._steps
        slopes = [
            (after - before) / (to - at)
            for (at, before), (to, after) in itertools.combinations(steps, 2)
            if to != at
        ]
        per_pair = max(0.0, statistics.median(slopes)) if slopes else 0.0
        per_token = statistics.median(pace - per_pair * position for position, pace in steps)
        if per_token < 0:
            per_token = 0.0
            per_pair = statistics.median(pace / position for position, pace in steps)
        self._per_token, self._per_pair = per_token, per_pair


class StepTimer:
    """Measures the steps of the engine for a `PrefillPace`, as the scheduler sees them.

    Args:
        pace: learns from each step that is reported.
        clock: seconds.
    """

    def __init__(self, pace: PrefillPace, clock: Callable[[], float]) -> None:
        self._pace = pace
        self._clock = clock
        self._steps: dict[int, tuple[float, Sequence[Span]]] = {}
        self._next = 1
        self._last_end = 0.0

    def begins(self, spans: Sequence[Span]) -> int:
        """A step that computes `spans` is given out. Returns the number that its report bears."""
        number = self._next
        self._next += 1
        # vLLM's own connector passes no reports on, and what is under way are a few steps at most.
        self._steps.pop(number - _UNREPORTED_STEPS, None)
        self._steps[number] = self._clock(), spans
        return number

    def ended(self, number: int) -> None:
        """A step has ended; `number` is that of its report, or 0. If the engine starts a step
        before the last one has ended, the step counts from the end of the last one."""
        now = self._clock()
        begun, spans = self._steps.pop(number, (now, ()))
        self._pace.observe(spans, now - max(begun, self._last_end))
        self._last_end = now


class LinkPace:
    """Bytes per second of a link: the fastest of the last few measurements counts, as what slows a
    copy now and then says nothing of the next one.

    A rate that makes FlexKV leave hits becomes `doubtful`: then it is to be measured again, at a
    cost that the caller bounds. Each try that brings no measurement doubles `patience`, what the
    next may cost and how long it has to wait for its turn.

    Attributes:
        patience: 1 after a measurement.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_LOADS)
        self._refusals = 0
        self._tried = time.monotonic()
        self.patience = 1

    @property
    def doubtful(self) -> bool:
        """Whether the rate must be measured again before it decides further."""
        return (
            self._refusals >= _REFUSALS * self.patience
            or time.monotonic() - self._tried > _TRUST_SECONDS * self.patience
        )

    def observe(self, size: float, seconds: float) -> None:
        """`size` bytes took so long."""
        if size > 0 and seconds > 0:
            self._rates.append(size / seconds)
            self._begin_trust(1)

    def contradict(self, size: float, seconds: float) -> None:
        """Not even `size` bytes came in this time, where more was to be expected: the fastest
        measurement counts no more."""
        if self._rates:
            self._rates.remove(max(self._rates))
        self._rates.append(size / seconds)

    def refuse(self) -> None:
        """A hit was left because of this rate."""
        self._refusals += 1

    def give_up(self) -> None:
        """It was tried to measure a doubtful rate again, in vain."""
        self._begin_trust(min(2 * self.patience, _MOST_PATIENCE))

    def seconds(self, size: int) -> float | None:
        """How long `size` bytes would take; None as long as nothing is known."""
        return size / max(self._rates) if self._rates else None

    def _begin_trust(self, patience: int) -> None:
        self._refusals = 0
        self._tried = time.monotonic()
        self.patience = patience
