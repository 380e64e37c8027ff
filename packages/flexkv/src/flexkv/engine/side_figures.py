# SPDX-License-Identifier: Apache-2.0
"""Counts what one side of an engine does, and drains what is new to the engine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping

from flexkv.client import CacheClient
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.choice.chooser import Left
from flexkv.engine.choice.cost import Span
from flexkv.figures.definitions import (
    COPIED_BYTES,
    COPY_SECONDS,
    FAILURES,
    FALLBACK_BYTES,
    HIT_BLOCKS,
    HIT_TOKENS,
    LEFT_TOKENS,
    QUERY_TOKENS,
    SAVED_PREFILL_SECONDS,
    WAY_BYTES,
    Samples,
    sample,
)
from flexkv.figures.health_samples import ok_sample, problems_of, trouble_samples
from flexkv.figures.meter import Meter, Reader
from flexkv.operators.engine_door import EngineDoor
from flexkv.session.state_reports import StateReport, Subject
from flexkv.types.changes import Medium
from flexkv.types.mover import FALLBACK, Direction, Status
from flexkv.types.troubles import Problem, Trouble

logger = logging.getLogger(__name__)


def _put_errors(meter: Meter, boundary: ErrorBoundary) -> None:
    meter.put(FAILURES, sum(boundary.failures.values()), "internal", "")
    meter.put(FAILURES, len(boundary.given_up), "lasting", "")


class CopyFigures:
    """Copies of one rank between its pages and host memory. The functions are those of its `Mover`.
    If not `active`, `take` has nothing but errors at the boundary."""

    def __init__(
        self,
        boundary: ErrorBoundary,
        copy_seconds: Callable[[int], float | None],
        bytes_by_way: Callable[[], Mapping[str, int]],
    ) -> None:
        self._boundary = boundary
        self._copy_seconds = copy_seconds
        self._bytes_by_way = bytes_by_way
        self._warned = False
        self._begun: dict[int, tuple[Direction, int]] = {}
        self._meter, self._reader = Meter(), Reader()
        self.active = False
        self.load_rate = 0.0

    def begin(self, ticket: int, direction: Direction, size: int) -> None:
        """Note that the mover has accepted a copy of `size` bytes."""
        self._begun[ticket] = direction, size

    def end(self, ticket: int, status: Status) -> None:
        """Count a copy that has ended, if it is DONE. An unknown ticket counts nothing."""
        direction, size = self._begun.pop(ticket, (Direction.STORE, 0))
        if status is Status.DONE and size:
            self.count(direction, size, self._copy_seconds(ticket))

    def count(self, direction: Direction, size: int, seconds: float | None) -> None:
        """Count a copy of `size` bytes that is done and took `seconds`; None if that is unknown."""
        self.active = True
        self._meter.count(COPIED_BYTES, size, "device", direction.name.lower())
        if seconds is None:
            return
        self._meter.count(COPY_SECONDS, seconds, "device", direction.name.lower())
        if direction is Direction.LOAD:
            self.measured(size, seconds)

    def measured(self, size: int, seconds: float) -> None:
        """Take a load of `size` bytes in `seconds` as a measurement of the link."""
        self.load_rate = max(self.load_rate, size / seconds)

    def take_load_rate(self) -> float:
        """Bytes per second of the fastest load that has ended since the last call; 0 if none."""
        rate, self.load_rate = self.load_rate, 0.0
        return rate

    def begin_counting(self) -> None:
        """Leave out the bytes that the mover has copied so far, which measured it."""
        self._put_ways()
        self._reader.drain(self._meter.values)

    def take(self) -> Samples:
        """Take the samples that are new since the last call."""
        _put_errors(self._meter, self._boundary)
        if self.active:
            # The mover counts a copy when it begins, so the way of each ended copy is known.
            self.active = False
            self._put_ways()
        samples = self._reader.drain(self._meter.values)
        if fallback := samples.get(FALLBACK_BYTES.name):
            self._warn(int(fallback))
        return samples

    def _put_ways(self) -> None:
        for way, size in self._bytes_by_way().items():
            if way == FALLBACK:
                self._meter.put(FALLBACK_BYTES, size)
            else:
                self._meter.put(WAY_BYTES, size, way)

    def _warn(self, size: int) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "a copy of %d bytes could not go the way that was measured to be fastest: GPU memory "
            "for the copy ring was short, or the addresses of pages are no multiples of 16. A "
            "slower kernel copies such blocks; fallback_bytes in the metrics counts them. Leave "
            "the GPU 128 MiB more, by a lower gpu_memory_utilization or mem_fraction_static.",
            size,
        )


_OFF_SECONDS = 60.0
"""A side that is off reports that again after so many seconds, for the log's lines."""

_BUSY_SECONDS = 0.1
"""A busy engine is asked in every step, and a look takes 0.07 ms: it looks so often,
and nobody reads the figures more often."""


def log_totals(cache: CacheClient, boundary: ErrorBoundary) -> None:
    """Log what a cache has done, and the errors of the process, as FlexKV's last line."""
    counts = {**cache.figures().counts, **boundary.failures}
    text = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    logger.info("FlexKV ends: %s", text or "never used")


class CacheFigures:
    """The scheduler side's: requests, and all that the cache itself counts.

    Args:
        put_counts: sets what the meter counts of parameters of requests.
        prefill: returns seconds to compute a token and a pair of tokens, once they are measured.

    Attributes:
        health: the problems as of the last `take`, the worst first. Any thread may read it.
    """

    def __init__(
        self,
        cache: CacheClient,
        boundary: ErrorBoundary,
        put_counts: Callable[[Meter], None],
        prefill: Callable[[], tuple[float, float] | None] = lambda: None,
    ) -> None:
        self._cache = cache
        self._boundary = boundary
        self._put_counts = put_counts
        self._prefill = prefill
        self._meter, self._reader = Meter(), Reader()
        self._hit_blocks = self._meter.histogram(HIT_BLOCKS)
        self._names = [
            (
                medium,
                sample(QUERY_TOKENS.name, medium.value),
                sample(HIT_TOKENS.name, medium.value),
            )
            for medium in (Medium.HOST, *cache.info.media)
        ]
        # Tokens and pairs of tokens that were loaded and have no price in seconds yet.
        self._loaded = (0, 0.0)
        self._looked = -math.inf
        self._is_off = False
        self._report: StateReport | None = None
        self._door: EngineDoor | None = None
        self.health: tuple[Problem, ...] = ()
        self.active = True

    def report_health(
        self, root: str, engine: str, fingerprint: str, door: EngineDoor | None = None
    ) -> None:
        """Report `health` for `flexkv health`, and the door for operators, which is owned, until
        `close`."""
        self._door = door
        about = {"engine": engine, "fingerprint": fingerprint}
        self._report = StateReport(root, about, Subject.HEALTH)
        self._report.begin(self._state)

    def _state(self) -> dict[str, object]:
        door = "" if self._door is None else self._door.name
        return {"door": door, "problems": self.health}

    def close(self) -> None:
        """End the report, and answer no more. Idempotent."""
        if self._door is not None:
            self._door.close()
        if self._report is not None:
            self._report.close()

    def turned_off(self) -> None:
        """The engine's side does nothing more, whatever the cache could do. Further calls do
        nothing."""
        if not self._is_off:
            self._is_off = self.active = True
            self.health = (Problem(Trouble.LOST_TRACK),)

    def note_activity(self) -> None:
        """Note that something may have changed, so that `is_due` reports it."""
        self.active = True

    def is_due(self, busy: bool) -> bool:
        """Whether to `take` now: less often while the engine is `busy` with requests, because then
        it soon asks again."""
        seconds = time.monotonic() - self._looked
        if self._is_off and seconds >= _OFF_SECONDS:
            return True
        return self.active and not (busy and seconds < _BUSY_SECONDS)

    def asked(self, tokens: int, hit_tokens: int, fetched: Mapping[Medium, int]) -> None:
        """Count a request to which the engine gave blocks. It did not have `tokens` of its tokens
        itself; of those that are loaded, so many came from each lower tier."""
        self.active = True
        hits = {**fetched, Medium.HOST: hit_tokens - sum(fetched.values())}
        values = self._meter.values
        for medium, queries_name, hits_name in self._names:
            # Each tier is asked for what the faster ones do not have.
            values[queries_name] += tokens
            values[hits_name] += hits.get(medium, 0)
            tokens -= hits.get(medium, 0)

    def hit(self, blocks: int, span: Span | None = None) -> None:
        """Count a load that was ordered for a request."""
        self.active = True
        self._hit_blocks.observe(blocks)
        if span is not None:
            tokens, pairs = self._loaded
            self._loaded = tokens + span.tokens, pairs + span.pairs

    def left(self, reason: Left, tokens: int) -> None:
        """Count `tokens` tokens of a hit that are computed instead of loaded, for `reason`."""
        self._meter.count(LEFT_TOKENS, tokens, reason.value)

    def take(self) -> Samples:
        """Take the samples that are new since the last call; empty if nothing is."""
        self._looked = time.monotonic()
        self._price()
        self._put_counts(self._meter)
        _put_errors(self._meter, self._boundary)
        if self._is_off:
            # The cache may be what fails. Its gauges keep their last values.
            self.active = False
            return self._reader.drain(self._meter.values) | trouble_samples(Trouble.LOST_TRACK)
        figures = self._cache.figures()
        values = self._meter.values | figures.own | figures.shared
        self.health = tuple(problems_of(values))
        samples = self._reader.drain(values | ok_sample(values))
        # A rank may report a copy one step after its end was seen here.
        self.active = bool(samples)
        return samples

    def _price(self) -> None:
        """Count the seconds of computing that loads have saved. What was loaded before the first
        measurement is priced by that one."""
        tokens, pairs = self._loaded
        cost = self._prefill() if tokens else None
        if cost is not None:
            self._loaded = (0, 0.0)
            self._meter.count(SAVED_PREFILL_SECONDS, cost[0] * tokens + cost[1] * pairs)
