# SPDX-License-Identifier: Apache-2.0
"""How fast this engine computes and loads, measured while it runs.

Each measurement decides which measurements follow: an estimate that prevents loads would never meet
a load that contradicts it. So each estimate here documents how it is corrected.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_TOKENS = 64
"""Steps with fewer prompt tokens are ignored: their time depends more on the rest of the step."""

_PREFILL_STEPS = 16
"""Steps in the fit: enough to outvote steps that something else slowed down, and few enough to
follow a growing batch."""

_UNREPORTED_STEPS = 64
"""Steps whose report may still arrive."""

_RECENT_STEPS = 4
"""Steps that predict the next one: few, since an engine's load changes within seconds."""

_LOADS = 8
"""Measurements of a link in the estimate."""

_REFUSALS = 16
"""A rate becomes doubtful after it made FlexKV skip this many hits."""

_TRUST_SECONDS = 30.0
"""A rate becomes doubtful if no measurement has confirmed it for this time: the reason of a slow
link may have gone."""

_MOST_PATIENCE = 64
"""The largest patience. A link that never gives a measurement is then tried again after 32 minutes
or 1,024 skipped hits."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one request that a step computes, from position `start` to `stop`."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.stop - self.start

    @property
    def pairs(self) -> float:
        """Pairs of tokens that attention computes."""
        return (self.stop**2 - self.start**2) / 2


class PrefillPace:
    """Seconds that prompt tokens take to compute.

    A token takes the time of the weights, and more the further back attention looks: seconds per
    token grow linearly with the mean position of a step's tokens. The line is fitted by medians
    (Theil and Sen). Up to a quarter of the steps may therefore be off by any factor: slowed down by
    something else, or reported together with the step before.

    If the estimate is too fast, FlexKV skips hits, which are then computed and measured. If it is
    too slow, FlexKV loads them and the engine computes little; steps of a few tokens then bound the
    estimate from above.
    """

    def __init__(self) -> None:
        # Mean position of a step's tokens, and seconds per token.
        self._steps: deque[tuple[float, float]] = deque(maxlen=_PREFILL_STEPS)
        self._per_token = self._per_pair = 0.0

    def observe(self, spans: Sequence[Span], seconds: float) -> None:
        """Take a measurement: a step that computed `spans`, and little else, took `seconds`."""
        tokens = sum(span.tokens for span in spans)
        if tokens <= 0 or seconds <= 0:
            return
        position, pace = sum(span.pairs for span in spans) / tokens, seconds / tokens
        expected = self._per_token + self._per_pair * position
        if tokens < LEAST_TOKENS and pace >= expected:
            return
        self._steps.append((position, pace))
        self._fit()

    @property
    def cost(self) -> tuple[float, float] | None:
        """Seconds of a token, and of a pair of tokens; None before the first measurement."""
        return (self._per_token, self._per_pair) if self._steps else None

    def seconds(self, span: Span) -> float | None:
        """Seconds that `span` would take; None before the first measurement."""
        if not self._steps:
            return None
        start, stop = span.start, span.stop
        return self._per_token * (stop - start) + self._per_pair * (stop**2 - start**2) / 2

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
    """Measures the steps of the engine for a `PrefillPace`, as the scheduler sees them."""

    def __init__(self, pace: PrefillPace, clock: Callable[[], float]) -> None:
        self._pace = pace
        self._clock = clock
        self._steps: dict[int, tuple[float, Sequence[Span]]] = {}
        self._next = 1
        self._last_end = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    @property
    def step_seconds(self) -> float:
        """Seconds that a step takes now: the median of the last steps, of which those without a
        prompt count as 0. 0 if the engine has been idle since."""
        if not self._recent or self._clock() - self._last_end > 2 * max(self._recent):
            return 0.0
        return statistics.median(self._recent)

    def begins(self, spans: Sequence[Span]) -> int:
        """Note that the engine begins a step that computes `spans`. Returns the number of the step,
        from 1, which its report must have."""
        number = self._next
        self._next += 1
        # vLLM's own connector passes no reports on, and what is under way are a few steps at most.
        self._steps.pop(number - _UNREPORTED_STEPS, None)
        self._steps[number] = self._clock(), spans
        return number

    def ended(self, number: int) -> None:
        """Note that a step has ended. If the engine began the step before the previous one had
        ended, its time counts from the end of the previous one."""
        now = self._clock()
        begun, spans = self._steps.pop(number, (now, ()))
        seconds = now - max(begun, self._last_end)
        if spans:
            self._pace.observe(spans, seconds)
        self._recent.append(seconds)
        self._last_end = now


class LinkPace:
    """Bytes per second of a link: the fastest of the last few measurements, since an occasional
    slow copy says nothing about the next one.

    A rate that makes FlexKV skip hits becomes `doubtful` and must be measured again, at a cost that
    the caller bounds. Each attempt without a measurement doubles `patience`, a factor of both the
    cost of the next attempt and the interval before it. It is 1 after a measurement.
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
        """Take a measurement: `size` bytes took `seconds`. Without bytes or time it is none."""
        if size > 0 and seconds > 0:
            self._rates.append(size / seconds)
            self._begin_trust(1)

    def contradict(self, size: float, seconds: float) -> None:
        """Take an upper bound: fewer than `size` bytes arrived in `seconds`, where more were
        expected. It replaces the fastest measurement. `seconds` is more than 0."""
        if self._rates:
            self._rates.remove(max(self._rates))
        self._rates.append(size / seconds)

    def refuse(self) -> None:
        """Count a hit that was skipped because of this rate."""
        self._refusals += 1

    def give_up(self) -> None:
        """Note that an attempt to measure a doubtful rate brought no measurement; this doubles
        `patience`."""
        self._begin_trust(min(2 * self.patience, _MOST_PATIENCE))

    def seconds(self, size: int) -> float | None:
        """Seconds that `size` bytes would take; None before the first measurement."""
        return size / max(self._rates) if self._rates else None

    def _begin_trust(self, patience: int) -> None:
        self._refusals = 0
        self._tried = time.monotonic()
        self.patience = patience
