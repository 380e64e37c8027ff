# SPDX-License-Identifier: Apache-2.0
"""Collects the values that `metrics` reports to the engine, on each side."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping

from flexkv.adapter.cost import Span
from flexkv.adapter.guard import Edge
from flexkv.adapter.load_choice import Left
from flexkv.adapter.metrics import INTERNAL_FAILURES, LASTING_FAILURES, Samples, bucket, sample
from flexkv.cache import KVCache
from flexkv.changes import Medium
from flexkv.eviction import POLICIES
from flexkv.histogram import BLOCKS_BOUNDS, Histogram
from flexkv.mover import FALLBACK, Direction, Status
from flexkv.tiers.circuit import CircuitState

logger = logging.getLogger(__name__)


class CopyFigures:
    """Copies of one rank between its pages and host memory.

    Args:
        edge: of the process.
        copy_seconds: seconds of a ticket that is done, as `Mover.copy_seconds`.
        bytes_by_way: bytes so far, as `Mover.bytes_by_way`.
    """

    def __init__(
        self,
        edge: Edge,
        copy_seconds: Callable[[int], float | None],
        bytes_by_way: Callable[[], Mapping[str, int]],
    ) -> None:
        self._edge = edge
        self._copy_seconds = copy_seconds
        self._bytes_by_way = bytes_by_way
        self._told_ways: Mapping[str, int] = {}
        self._warned = False
        self._begun: dict[int, tuple[Direction, int]] = {}
        self._samples: Samples = {}
        self._told_failures = self._told_given_up = 0
        self._load_rate = 0.0

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
        way = direction.name.lower()
        self._add(sample("copied_bytes", "device", way), size)
        if seconds is None:
            return
        self._add(sample("copy_seconds", "device", way), seconds)
        if direction is Direction.LOAD:
            self.measured(size, seconds)

    def measured(self, size: int, seconds: float) -> None:
        """Take a load of `size` bytes in `seconds` as a measurement of the link."""
        self._load_rate = max(self._load_rate, size / seconds)

    def take_load_rate(self) -> float:
        """Bytes per second of the fastest load that has ended since the last call; 0 if none."""
        rate, self._load_rate = self._load_rate, 0.0
        return rate

    def begin_counting(self) -> None:
        """Leave out the bytes that the mover has copied so far, which measured it."""
        self._told_ways = self._bytes_by_way()

    @property
    def active(self) -> bool:
        """Whether `take` may have something."""
        return bool(self._samples or self._edge.failures)

    def take(self) -> Samples:
        """Take the samples that are new since the last call."""
        failures = sum(self._edge.failures.values())
        if failures > self._told_failures:
            self._add(INTERNAL_FAILURES, failures - self._told_failures)
            self._told_failures = failures
        given_up = len(self._edge.given_up)
        if given_up > self._told_given_up:
            self._add(LASTING_FAILURES, given_up - self._told_given_up)
            self._told_given_up = given_up
        if self._samples:
            self._count_ways()
        samples, self._samples = self._samples, {}
        return samples

    def _count_ways(self) -> None:
        """Add the bytes by way since the last call. The mover counts a copy when it begins, so the
        way of each ended copy is known."""
        told, self._told_ways = self._told_ways, self._bytes_by_way()
        for way, size in self._told_ways.items():
            if new := size - told.get(way, 0):
                if way == FALLBACK:
                    self._add("fallback_bytes", new)
                    self._warn(new)
                else:
                    self._add(sample("way_bytes", way), new)

    def _warn(self, size: int) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "a copy of %d bytes could not go the way that was measured to be fastest: GPU memory "
            "for the copy ring was short, or the ring is too small for such blocks. A slower "
            "kernel copies them; fallback_bytes in the metrics counts them. Leave the GPU 128 MiB "
            "more, by a lower gpu_memory_utilization or mem_fraction_static.",
            size,
        )

    def _add(self, name: str, value: float) -> None:
        self._samples[name] = self._samples.get(name, 0) + value


_BUSY_SECONDS = 0.1
"""A busy engine is asked in every step, and a look takes 0.07 ms: it looks so often. Not tuned:
nobody reads the figures more often."""


class CacheFigures:
    """The scheduler side's: requests, and all that the cache itself counts.

    Args:
        cache: of the engine.
        edge: of the process.
        ignored_parameters: how many parameters of requests were not understood so far.
        prefill: returns seconds to compute a token and a pair of tokens, once they are measured.

    Attributes:
        active: whether `take` may have something.
    """

    def __init__(
        self,
        cache: KVCache,
        edge: Edge,
        ignored_parameters: Callable[[], int],
        prefill: Callable[[], tuple[float, float] | None] = lambda: None,
    ) -> None:
        self._cache = cache
        self._edge = edge
        self._ignored_parameters = ignored_parameters
        self._prefill = prefill
        media = [Medium.HOST, *(medium for medium, _, _ in cache.tier_figures)]
        self._queries = dict.fromkeys(media, 0)
        self._hits = dict.fromkeys(media, 0)
        self._left = dict.fromkeys(Left, 0)
        self._hit_blocks = Histogram(BLOCKS_BOUNDS)
        # Tokens and pairs of tokens that were loaded and have no price in seconds yet.
        self._loaded = (0, 0.0)
        self._saved_seconds = 0.0
        self._told: Samples = {}
        self._told_gauges: Samples = {}
        self._looked = -math.inf
        self.active = True

    def note_activity(self) -> None:
        """Note that something may have changed, so that `is_due` reports it."""
        self.active = True

    def is_due(self, busy: bool) -> bool:
        """Whether to `take` now.

        Args:
            busy: whether the engine has requests. Then this is asked again soon, and samples are
                taken less often.
        """
        return self.active and not (busy and time.monotonic() < self._looked + _BUSY_SECONDS)

    def asked(self, tokens: int, hit_tokens: int, fetched: Mapping[Medium, int]) -> None:
        """Count a request to which the engine gave blocks.

        Args:
            tokens: tokens of the request that the engine did not have itself.
            hit_tokens: the number of them that are loaded.
            fetched: the number of loaded tokens that came from each lower tier.
        """
        self.active = True
        hits = {**fetched, Medium.HOST: hit_tokens - sum(fetched.values())}
        for medium in self._queries:
            # Each tier is asked for what the faster ones do not have.
            self._queries[medium] += tokens
            self._hits[medium] += hits.get(medium, 0)
            tokens -= hits.get(medium, 0)

    def hit(self, blocks: int, span: Span | None = None) -> None:
        """Count a load that was ordered for a request.

        Args:
            blocks: FlexKV blocks of the load.
            span: the tokens that need not be computed; None if they are unknown.
        """
        self.active = True
        self._hit_blocks.observe(blocks)
        if span is not None:
            tokens, pairs = self._loaded
            self._loaded = tokens + span.tokens, pairs + span.pairs

    def left(self, reason: Left, tokens: int) -> None:
        """Count `tokens` tokens of a hit that are computed instead of loaded, for `reason`."""
        self._left[reason] += tokens

    def take(self) -> Samples:
        """Take the samples that are new since the last call; empty if nothing is."""
        self._looked = time.monotonic()
        totals = self._totals()
        told, self._told = self._told, totals
        new = {name: value - told.get(name, 0) for name, value in totals.items()}
        samples = {name: value for name, value in new.items() if value > 0}
        self._take_histograms(samples)
        gauges = self._gauges()
        if samples or gauges != self._told_gauges:
            self._told_gauges = gauges
            samples |= gauges
        # A rank may report a copy one step after its end was seen here.
        self.active = bool(samples)
        return samples

    def _take_histograms(self, samples: Samples) -> None:
        latencies = self._cache.latencies
        self._take(samples, "load_seconds", latencies.load)
        self._take(samples, "store_seconds", latencies.store)
        self._take(samples, "hit_blocks", self._hit_blocks)
        for medium, histogram in latencies.fetch.items():
            self._take(samples, "fetch_seconds", histogram, medium.value)

    @staticmethod
    def _take(samples: Samples, name: str, histogram: Histogram, *labels: str) -> None:
        for each in histogram.take():
            count_name, sum_name = bucket(name, each.place, *labels)
            samples[count_name], samples[sum_name] = each.count, each.total

    def _price(self) -> float:
        """Seconds of computing that loads have saved so far. What was loaded before the first
        measurement is priced by that one."""
        tokens, pairs = self._loaded
        cost = self._prefill() if tokens else None
        if cost is not None:
            self._loaded = (0, 0.0)
            self._saved_seconds += cost[0] * tokens + cost[1] * pairs
        return self._saved_seconds

    def _totals(self) -> Samples:
        counters = self._cache.counters
        totals: Samples = {
            sample("stored_blocks", "host"): counters.stored_blocks,
            sample("dropped_blocks", "host"): counters.refused_blocks,
            sample("evicted_blocks", "host"): counters.evicted_blocks,
            sample("failures", "load", "host"): counters.failed_loads,
            sample("failures", "store", "host"): counters.failed_stores,
            INTERNAL_FAILURES: sum(self._edge.failures.values()),
            LASTING_FAILURES: len(self._edge.given_up),
            "ignored_parameters": self._ignored_parameters(),
            "refused_pin_blocks": counters.refused_pins,
            "saved_prefill_seconds": self._price(),
        }
        causes = counters.resets_by_cause()
        totals |= {sample("resets", cause.value): count for cause, count in causes.items()}
        totals |= {sample("left_tokens", why.value): count for why, count in self._left.items()}
        for medium, queries in self._queries.items():
            totals[sample("query_tokens", medium.value)] = queries
            totals[sample("hit_tokens", medium.value)] = self._hits[medium]
        for medium, figures, counted in self._cache.tier_figures:
            tier, traffic = medium.value, figures.traffic
            totals |= {
                sample("copied_bytes", tier, "read"): traffic.read_bytes,
                sample("copy_seconds", tier, "read"): traffic.read_seconds,
                sample("copied_bytes", tier, "write"): traffic.written_bytes,
                sample("copy_seconds", tier, "write"): traffic.written_seconds,
                sample("stored_blocks", tier): figures.written_blocks,
                sample("dropped_blocks", tier): counted.dropped_demotions,
                sample("circuit_openings", tier): figures.openings,
                sample("failures", "read", tier): counted.failed_fetches - counted.damaged_fetches,
                sample("failures", "damaged", tier): counted.damaged_fetches,
                sample("failures", "stalled", tier): counted.stalled_fetches,
                sample("failures", "write", tier): counted.failed_demotions,
            }
            if medium.is_shared:
                totals[sample("late_questions", tier)] = counted.late_questions
            else:
                totals[sample("evicted_blocks", tier)] = figures.evicted_blocks
        return totals

    def _gauges(self) -> Samples:
        cache, host, size = self._cache, Medium.HOST.value, self._cache.slot_bytes
        gauges: Samples = {
            sample("blocks", host): cache.ready_blocks,
            sample("capacity_blocks", host): cache.num_slots,
            sample("bytes", host): cache.ready_blocks * size,
            sample("capacity_bytes", host): cache.num_slots * size,
            "pinned_blocks": cache.pinned_blocks,
            "disabled_engines": int(cache.disabled),
            sample("queue_length", "device"): cache.transfers_under_way,
        }
        for each in POLICIES:
            gauges[sample("eviction_policies", each)] = int(each == cache.policy_name)
        for medium, figures, _ in cache.tier_figures:
            tier = medium.value
            gauges[sample("queue_length", tier)] = figures.queued_blocks
            gauges[sample("queue_bytes", tier)] = figures.queued_bytes
            for state in CircuitState:
                for way, states in (("read", figures.reads), ("write", figures.writes)):
                    gauges[sample("circuits", tier, way, state.value)] = states.get(state, 0)
            if not medium.is_shared:
                gauges |= {
                    sample("blocks", tier): figures.blocks,
                    sample("capacity_blocks", tier): figures.slots,
                    sample("bytes", tier): figures.blocks * size,
                    sample("capacity_bytes", tier): figures.slots * size,
                }
        return gauges
