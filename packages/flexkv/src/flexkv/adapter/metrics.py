# SPDX-License-Identifier: Apache-2.0
"""The metrics of an engine with FlexKV: names, labels and texts, and the sums of their samples."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from flexkv.changes import BELOW, Medium
from flexkv.counters import ResetCause
from flexkv.eviction import POLICIES
from flexkv.histogram import BLOCKS_BOUNDS, SECONDS_BOUNDS
from flexkv.mover import WAYS
from flexkv.tiers.circuit import CircuitState

Samples = dict[str, float]
"""Values by name of the sample. A counter has its growth since the last report, a gauge its last
value."""


class Kind(enum.Enum):
    """The kinds of metrics, as Prometheus names them."""

    COUNTER = "counter"
    """A value that only grows."""
    GAUGE = "gauge"
    """A last value."""
    HISTOGRAM = "histogram"
    """Values by size. Each range has two samples that only grow: the number of values, and their
    sum."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and all label values that it can have.

    Attributes:
        name: name without the prefix of the engine and `flexkv_`.
        kind: see `Kind`.
        text: help text at `/metrics`; gives the unit.
        labels: names of labels and their values, in addition to the engine's own labels.
        only: the combinations of values that exist; all if empty.
        bounds: bounds of a histogram's ranges; see `flexkv.histogram`.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    only: tuple[tuple[str, ...], ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def label_names(self) -> list[str]:
        """Names of the labels, without the engine's own."""
        return [name for name, _ in self.labels]

    @property
    def combinations(self) -> list[tuple[str, ...]]:
        """All combinations of the labels' values that exist, in the order of `label_names`."""
        return list(self.only or itertools.product(*(values for _, values in self.labels)))


@functools.cache
def sample(name: str, *labels: str) -> str:
    """The name of one value of a metric, for instance "hit_tokens:disk"."""
    return ":".join((name, *labels))


@functools.cache
def bucket(name: str, place: int, *labels: str) -> tuple[str, str]:
    """The names of a histogram's samples for one range: the number of values, and their sum."""
    return sample(name, *labels, str(place)), sample(name, *labels, str(place), "sum")


TIERS = tuple(medium.value for medium in Medium)
"""The tiers by name, the fastest first. All have values, whether an engine has them or not."""

_LOWER = tuple(medium.value for medium in BELOW)
_TIERS = (("tier", TIERS),)
_BELOW = (("tier", _LOWER),)
_KNOWING = (("tier", tuple(medium.value for medium in Medium if not medium.is_shared)),)
_ASKED = (("tier", tuple(medium.value for medium in BELOW if medium.is_shared)),)
_DIRECTIONS = ("read", "write")
_LINKS = (("link", ("device", *_LOWER)), ("direction", ("load", "store", *_DIRECTIONS)))
_WAYS = (
    ("device", "load"),
    ("device", "store"),
    *((tier, direction) for tier in _LOWER for direction in _DIRECTIONS),
)
_HOST_CAUSES = ("load", "store")
_TIER_CAUSES = ("read", "damaged", "stalled", "write")
_NO_TIER = ""
CAUSES = (*_HOST_CAUSES, *_TIER_CAUSES, "internal", "lasting")
_FAILURES = (
    *((cause, Medium.HOST.value) for cause in _HOST_CAUSES),
    *((cause, tier) for cause in _TIER_CAUSES for tier in _LOWER),
    ("internal", _NO_TIER),
    ("lasting", _NO_TIER),
)
INTERNAL_FAILURES = sample("failures", "internal", _NO_TIER)
"""Errors inside FlexKV, which belong to no tier."""
LASTING_FAILURES = sample("failures", "lasting", _NO_TIER)
"""Places at which such errors did not end, and FlexKV gave its work up."""

STATES = tuple(state.value for state in CircuitState)
REASONS = ("short", "slow", "awaited", "delayed")
"""The values of `Left`, which the processes that log and serve metrics do not import."""

METRICS = (
    Metric(
        "query_tokens",
        Kind.COUNTER,
        "Tokens that the engine did not have itself, looked up in the tier.",
        _TIERS,
    ),
    Metric("hit_tokens", Kind.COUNTER, "Tokens found in the tier and loaded.", _TIERS),
    Metric(
        "left_tokens",
        Kind.COUNTER,
        "Tokens that could have been loaded and were computed, by reason.",
        (("reason", REASONS),),
    ),
    Metric(
        "saved_prefill_seconds",
        Kind.COUNTER,
        "Seconds that computing the loaded tokens would have taken, by the measured pace.",
    ),
    Metric(
        "copied_bytes",
        Kind.COUNTER,
        "Bytes copied over the link, of all ranks together.",
        _LINKS,
        _WAYS,
    ),
    Metric(
        "copy_seconds",
        Kind.COUNTER,
        "Seconds that copies over the link took, without waiting; parallel copies add up.",
        _LINKS,
        _WAYS,
    ),
    Metric(
        "way_bytes",
        Kind.COUNTER,
        "Bytes copied between GPU and host memory by the way they went, of all ranks together.",
        (("way", WAYS),),
    ),
    Metric(
        "fallback_bytes",
        Kind.COUNTER,
        "Bytes that went another way than the one measured to be fastest, which was not possible.",
    ),
    Metric("stored_blocks", Kind.COUNTER, "FlexKV blocks stored in the tier.", _TIERS),
    Metric(
        "dropped_blocks",
        Kind.COUNTER,
        "FlexKV blocks not stored in the tier for lack of room, queue or write budget.",
        _TIERS,
    ),
    Metric("evicted_blocks", Kind.COUNTER, "FlexKV blocks evicted from the tier.", _KNOWING),
    Metric(
        "failures",
        Kind.COUNTER,
        "Failures by cause; each one reached requests only as a miss or a failed load.",
        (("cause", CAUSES), ("tier", (*TIERS, _NO_TIER))),
        _FAILURES,
    ),
    Metric(
        "late_questions",
        Kind.COUNTER,
        "Questions that a shared store did not answer by its deadline.",
        _ASKED,
    ),
    Metric(
        "circuit_openings",
        Kind.COUNTER,
        "Times that reads or writes of a drive or a store were disabled after failures.",
        _BELOW,
    ),
    Metric(
        "resets",
        Kind.COUNTER,
        "Resets of the whole cache, by cause; with the cause pause all blocks stayed.",
        (("cause", tuple(cause.value for cause in ResetCause)),),
    ),
    Metric(
        "ignored_parameters",
        Kind.COUNTER,
        "Parameters of requests (kv_transfer_params) that were not understood.",
    ),
    Metric(
        "refused_pin_blocks",
        Kind.COUNTER,
        "FlexKV blocks not pinned because half of the host memory is.",
    ),
    Metric("blocks", Kind.GAUGE, "FlexKV blocks in the tier that can be loaded.", _KNOWING),
    Metric("capacity_blocks", Kind.GAUGE, "FlexKV blocks that the tier has room for.", _KNOWING),
    Metric("bytes", Kind.GAUGE, "Bytes of the tier's blocks that can be loaded.", _KNOWING),
    Metric("capacity_bytes", Kind.GAUGE, "Bytes that the tier has room for.", _KNOWING),
    Metric(
        "eviction_policies",
        Kind.GAUGE,
        "1 for the policy by which host memory evicts, 0 for the others.",
        (("policy", tuple(POLICIES)),),
    ),
    Metric("pinned_blocks", Kind.GAUGE, "FlexKV blocks pinned in host memory."),
    Metric(
        "disabled_engines",
        Kind.GAUGE,
        "1 if the engine's loads and stores are disabled, after an error; else 0.",
    ),
    Metric(
        "queue_length",
        Kind.GAUGE,
        "Transfers of the device, or reads and writes of the tier's blocks, that run or wait.",
        (("link", ("device", *_LOWER)),),
    ),
    Metric("queue_bytes", Kind.GAUGE, "Bytes that wait to be written to the tier.", _BELOW),
    Metric(
        "circuits",
        Kind.GAUGE,
        "Drives of the tier, or the store, whose reads or writes are in the state.",
        (*_BELOW, ("direction", _DIRECTIONS), ("state", STATES)),
    ),
    Metric(
        "load_seconds",
        Kind.HISTOGRAM,
        "Seconds from the order of a load to the step that finds it done on all ranks.",
        bounds=SECONDS_BOUNDS,
    ),
    Metric(
        "store_seconds",
        Kind.HISTOGRAM,
        "Seconds from the order of a store to the step that makes its blocks loadable.",
        bounds=SECONDS_BOUNDS,
    ),
    Metric(
        "fetch_seconds",
        Kind.HISTOGRAM,
        "Seconds from the beginning of a fetch to the last block that the tier gave it.",
        _BELOW,
        bounds=SECONDS_BOUNDS,
    ),
    Metric(
        "hit_blocks",
        Kind.HISTOGRAM,
        "FlexKV blocks that were loaded for a request that had a hit.",
        bounds=BLOCKS_BOUNDS,
    ),
)
GAUGES = frozenset(
    sample(metric.name, *labels)
    for metric in METRICS
    if metric.kind is Kind.GAUGE
    for labels in metric.combinations
)
"""Names of samples whose last value counts."""


def add(samples: Samples, later: Mapping[str, float]) -> None:
    """Add the counts of another rank, or later counts of the same rank, to `samples`."""
    for name, value in later.items():
        samples[name] = value if name in GAUGES else samples.get(name, 0) + value


def summary(samples: Mapping[str, float]) -> dict[str, int | float]:
    """The content of a log line: the changes since the previous line."""

    def total(name: str, *labels: str) -> float:
        return samples.get(sample(name, *labels), 0)

    line: dict[str, int | float] = {}
    queries = total("query_tokens", "host")
    if queries:
        hits = sum(total("hit_tokens", tier) for tier in TIERS)
        line["FlexKV hit rate (%)"] = round(100 * hits / queries, 1)
    for tier in TIERS:
        _put(line, f"{tier} hits (tokens)", total("hit_tokens", tier))
    _put(line, "saved prefill (s)", round(total("saved_prefill_seconds"), 1))
    _put(line, "left hits (tokens)", sum(total("left_tokens", why) for why in REASONS))
    for way in _WAYS:
        size, seconds = total("copied_bytes", *way), total("copy_seconds", *way)
        _put(line, f"{' '.join(way)} (MB)", round(size / 1e6, 1))
        if seconds:
            line[f"{' '.join(way)} (GB/s per copy)"] = round(size / seconds / 1e9, 2)
    for tier in TIERS:
        _put(line, f"{tier} evictions (blocks)", total("evicted_blocks", tier))
        _put(line, f"{tier} drops (blocks)", total("dropped_blocks", tier))
    _put(line, "failures", sum(total("failures", *labels) for labels in _FAILURES))
    return line


def _put(line: dict[str, int | float], name: str, value: float) -> None:
    if value:
        line[name] = value
