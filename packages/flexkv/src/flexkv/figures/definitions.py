# SPDX-License-Identifier: Apache-2.0
"""What FlexKV counts, and the metrics that engines serve of it.

Code increments the fields of `Counters` and `TierCounters`, or counts in a `Meter`. Each metric
names its values and their sources. A new metric is an entry here and a line that counts.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from flexkv.eviction import POLICIES, GuardState
from flexkv.figures.counters import Counters, ResetCause, TierCounters
from flexkv.tiers.base import TierFigures
from flexkv.tiers.circuit import CircuitState
from flexkv.types.changes import BELOW, Medium
from flexkv.types.mover import WAYS
from flexkv.types.troubles import HealthState, Trouble

Samples = dict[str, float]
"""Values by name of the sample, see `sample`: totals since the start and present gauges. A `Reader`
drains the growth of the totals instead. Drained samples merge by `add` and travel as JSON."""

Labels: TypeAlias = tuple[str, ...]
"""Values of a metric's labels, in the order of its label names."""

SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds for latencies, in seconds: from less than a step of an engine to more than any tier may
take."""

BLOCKS_BOUNDS = tuple(float(1 << power) for power in range(13))
"""Bounds for numbers of blocks: up to 4096, a prompt of 65,536 tokens in blocks of 16."""


@dataclass(frozen=True, slots=True)
class HostFigures:
    """A cache's own counts, and its host memory now."""

    counters: Counters
    blocks: int
    """Blocks that can be loaded."""
    slots: int
    """Blocks that host memory has room for."""
    slot_bytes: int
    """Bytes of a block, padding included."""
    pinned_blocks: int
    trouble: Trouble | None
    """What keeps the cache as a whole from loads or stores."""
    transfers: int
    """Loads and stores under way."""
    policy: str
    """Name of the eviction policy."""
    guard: GuardState
    """State of its guard; see `NO_GUARD`."""


class TierReading(NamedTuple):
    """One lower tier: what it holds now and has done since the start, counts of the blocks that
    were fetched from it and written to it, and the bytes of a block, padding included."""

    medium: Medium
    figures: TierFigures
    counters: TierCounters
    slot_bytes: int


ReadHost: TypeAlias = Callable[[HostFigures], float]
ReadTier: TypeAlias = Callable[[TierReading], float]


class Kind(enum.Enum):
    """The kinds of metrics, as Prometheus names them."""

    COUNTER = "counter"
    """A value that only grows."""
    GAUGE = "gauge"
    """A last value."""
    HISTOGRAM = "histogram"
    """Values by size. Each range has two samples that only grow: the number of values, and their
    sum."""


TIER = "*"
"""Stands for the name of each lower tier in the labels of `Metric.tiers`."""


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A metric: its values by their labels, and where they come from."""

    kind: Kind
    name: str
    """Without the prefix of the engine and `flexkv_`."""
    text: str
    """Help text at `/metrics`; gives the unit."""
    label_names: Labels = ()
    """In addition to the engine's own."""
    counted: tuple[Labels, ...] = ()
    """Labels of the values that a `Meter` counts; they belong to one engine."""
    own: Mapping[Labels, ReadHost] = field(default_factory=dict)
    """Reads the values of one engine from its cache."""
    shared: Mapping[Labels, ReadHost] = field(default_factory=dict)
    """Reads the values of host memory, which all engines with the same memory share."""
    tiers: Mapping[Labels, ReadTier] = field(default_factory=dict)
    """Reads the values of each lower tier of `media`, which are shared, too; see `TIER`."""
    media: tuple[Medium, ...] = BELOW
    bounds: tuple[float, ...] = ()
    """Ascending upper bounds of a histogram's ranges; each belongs to the range below it."""

    @property
    def combinations(self) -> list[Labels]:
        """The labels of all values, whether an engine has the tier or not."""
        below = (_named(labels, medium) for medium in self.media for labels in self.tiers)
        return [*self.counted, *self.own, *self.shared, *below]

    def tier_reads(self, medium: Medium) -> dict[str, ReadTier]:
        """Reads the values of the tier `medium`, by name of the sample."""
        reads = self.tiers.items() if medium in self.media else ()
        return {sample(self.name, *_named(labels, medium)): read for labels, read in reads}


def _named(labels: Labels, medium: Medium) -> Labels:
    return tuple(medium.value if label == TIER else label for label in labels)


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
STATES = tuple(state.value for state in CircuitState)
REASONS = ("short", "slow", "awaited", "delayed")
"""The values of `Left`, which the processes that log and serve metrics do not import."""

_HOST = TIERS[0]
_EACH_TIER = tuple((tier,) for tier in TIERS)
_SINGLE: tuple[Labels, ...] = ((),)
_INDEXED = tuple(medium for medium in BELOW if not medium.is_shared)
_COPIES = (("device", "load"), ("device", "store"))


def _has_policy(name: str) -> ReadHost:
    return lambda host: int(host.policy == name)


def _tier_has_policy(name: str) -> ReadTier:
    return lambda tier: int(tier.figures.policy == name)


def _reads_in(state: CircuitState) -> ReadTier:
    return lambda tier: tier.figures.reads.get(state, 0)


def _writes_in(state: CircuitState) -> ReadTier:
    return lambda tier: tier.figures.writes.get(state, 0)


def _has_trouble(trouble: Trouble) -> ReadHost:
    return lambda host: int(host.trouble is trouble)


def _is_open(circuits: Mapping[CircuitState, int]) -> int:
    return int(any(n for state, n in circuits.items() if state is not CircuitState.CLOSED))


_attribute = operator.attrgetter  # costs no call in Python
_RESETS = {
    ResetCause.REQUEST: "request_resets",
    ResetCause.WEIGHTS: "weight_resets",
    ResetCause.DOUBT: "doubt_resets",
    ResetCause.PAUSE: "pauses",
}
_counter, _gauge, _histogram = (functools.partial(Metric, kind) for kind in Kind)

# Each constant that is a `Metric` is an entry of `METRICS`, in this order.
QUERY_TOKENS = _counter(
    "query_tokens",
    "Tokens that the engine did not have itself, looked up in the tier.",
    ("tier",),
    counted=_EACH_TIER,
)
HIT_TOKENS = _counter(
    "hit_tokens",
    "Tokens found in the tier and loaded.",
    ("tier",),
    counted=_EACH_TIER,
)
LEFT_TOKENS = _counter(
    "skipped_tokens",
    "Tokens that could have been loaded and were computed, by reason.",
    ("reason",),
    counted=tuple((reason,) for reason in REASONS),
)
SAVED_PREFILL_SECONDS = _counter(
    "saved_prefill_seconds",
    "Seconds that computing the loaded tokens would have taken, by the measured pace.",
    counted=_SINGLE,
)
COPIED_BYTES = _counter(
    "copied_bytes",
    "Bytes copied over the link, of all ranks together.",
    ("link", "direction"),
    counted=_COPIES,
    tiers={
        (TIER, "read"): _attribute("figures.traffic.read_bytes"),
        (TIER, "write"): _attribute("figures.traffic.written_bytes"),
    },
)
COPY_SECONDS = _counter(
    "copy_seconds",
    "Seconds that copies over the link took, without waiting; parallel copies add up.",
    ("link", "direction"),
    counted=_COPIES,
    tiers={
        (TIER, "read"): _attribute("figures.traffic.read_seconds"),
        (TIER, "write"): _attribute("figures.traffic.written_seconds"),
    },
)
WAY_BYTES = _counter(
    "way_bytes",
    "Bytes copied between GPU and host memory by the way they went, of all ranks together.",
    ("way",),
    counted=tuple((way,) for way in WAYS),
)
FALLBACK_BYTES = _counter(
    "fallback_bytes",
    "Bytes that went another way than the one measured to be fastest, which was not possible.",
    counted=_SINGLE,
)
STORED_BLOCKS = _counter(
    "stored_blocks",
    "FlexKV blocks stored in the tier.",
    ("tier",),
    own={(_HOST,): _attribute("counters.stored_blocks")},
    tiers={(TIER,): _attribute("figures.written_blocks")},
)
DROPPED_BLOCKS = _counter(
    "dropped_blocks",
    "FlexKV blocks not stored in the tier for lack of room, queue or write budget.",
    ("tier",),
    own={(_HOST,): _attribute("counters.refused_blocks")},
    tiers={(TIER,): _attribute("counters.dropped_demotions")},
)
EVICTED_BLOCKS = _counter(
    "evicted_blocks",
    "FlexKV blocks evicted from the tier.",
    ("tier",),
    shared={(_HOST,): _attribute("counters.evicted_blocks")},
    tiers={(TIER,): _attribute("figures.evicted_blocks")},
    media=_INDEXED,
)
EXPIRED_BLOCKS = _counter(
    "expired_blocks",
    "FlexKV blocks that left the tier because they were older than max_age_seconds.",
    ("tier",),
    shared={(_HOST,): _attribute("counters.expired_blocks")},
    tiers={(TIER,): _attribute("figures.expired_blocks")},
    media=_INDEXED,
)
FAILURES = _counter(
    "failures",
    "Failures by cause; each one reached requests only as a miss or a failed load.",
    ("cause", "tier"),
    # Errors inside FlexKV, and the places at which they did not end and FlexKV gave its work up.
    counted=(("internal", ""), ("lasting", "")),
    own={
        ("load", _HOST): _attribute("counters.failed_loads"),
        ("store", _HOST): _attribute("counters.failed_stores"),
    },
    tiers={
        ("read", TIER): lambda tier: tier.counters.failed_fetches - tier.counters.damaged_fetches,
        ("damaged", TIER): _attribute("counters.damaged_fetches"),
        ("stalled", TIER): _attribute("counters.stalled_fetches"),
        ("write", TIER): _attribute("counters.failed_demotions"),
    },
)
LATE_QUESTIONS = _counter(
    "late_questions",
    "Questions that a shared store did not answer by its deadline.",
    ("tier",),
    tiers={(TIER,): _attribute("counters.late_questions")},
    media=tuple(medium for medium in BELOW if medium.is_shared),
)
CIRCUIT_OPENINGS = _counter(
    "circuit_openings",
    "Times that reads or writes of a drive or a store were disabled after failures.",
    ("tier",),
    tiers={(TIER,): _attribute("figures.openings")},
)
RESETS = _counter(
    "resets",
    "Resets of the whole cache, by cause; with the cause pause all blocks stayed.",
    ("cause",),
    own={(cause.value,): _attribute(f"counters.{name}") for cause, name in _RESETS.items()},
)
IGNORED_PARAMETERS = _counter(
    "ignored_parameters",
    "Parameters of requests (kv_transfer_params) that were not understood.",
    counted=_SINGLE,
)
HINT_ACTIONS = (
    *("session", "returns", "max_load_tokens", "max_store_tokens"),
    *("retain", "release", "priority", "fetch", "prefetch", "demote", "other"),
)
HINTS = _counter(
    "hints",
    "Hints of requests, in FlexKV's own form or another, by what became of them.",
    ("action", "result"),
    counted=tuple(
        (action, result)
        for action in HINT_ACTIONS
        for result in ("accepted", "clipped", "expired", "unsupported")
    ),
)
REFUSED_PIN_BLOCKS = _counter(
    "refused_pin_blocks",
    "FlexKV blocks not pinned because half of the host memory is, or not retained.",
    own={(): _attribute("counters.refused_pins")},
)
GUARD_HIT_BLOCKS = _counter(
    "guard_hit_blocks",
    "Blocks that the tier had when their requests came, and that it would have had with lru.",
    ("tier", "policy"),
    own={
        (_HOST, "used"): _attribute("guard.hits"),
        (_HOST, "lru"): _attribute("guard.lru_hits"),
    },
    tiers={
        (TIER, "used"): _attribute("figures.guard.hits"),
        (TIER, "lru"): _attribute("figures.guard.lru_hits"),
    },
    media=_INDEXED,
)
GUARD_SWITCHES = _counter(
    "guard_switches",
    "Times that the guard of the tier's eviction policy fell back to the order of lru.",
    ("tier",),
    own={(_HOST,): _attribute("guard.switches")},
    tiers={(TIER,): _attribute("figures.guard.switches")},
    media=_INDEXED,
)
BLOCKS = _gauge(
    "blocks",
    "FlexKV blocks in the tier that can be loaded.",
    ("tier",),
    shared={(_HOST,): _attribute("blocks")},
    tiers={(TIER,): _attribute("figures.blocks")},
    media=_INDEXED,
)
CAPACITY_BLOCKS = _gauge(
    "capacity_blocks",
    "FlexKV blocks that the tier has room for.",
    ("tier",),
    shared={(_HOST,): _attribute("slots")},
    tiers={(TIER,): _attribute("figures.slots")},
    media=_INDEXED,
)
BYTES = _gauge(
    "bytes",
    "Bytes of the tier's blocks that can be loaded.",
    ("tier",),
    shared={(_HOST,): lambda host: host.blocks * host.slot_bytes},
    tiers={(TIER,): lambda tier: tier.figures.blocks * tier.slot_bytes},
    media=_INDEXED,
)
CAPACITY_BYTES = _gauge(
    "capacity_bytes",
    "Bytes that the tier has room for.",
    ("tier",),
    shared={(_HOST,): lambda host: host.slots * host.slot_bytes},
    tiers={(TIER,): lambda tier: tier.figures.slots * tier.slot_bytes},
    media=_INDEXED,
)
EVICTION_POLICIES = _gauge(
    "eviction_policies",
    "1 for the policy by which the tier evicts, 0 for the others.",
    ("tier", "policy"),
    shared={(_HOST, name): _has_policy(name) for name in POLICIES},
    tiers={(TIER, name): _tier_has_policy(name) for name in POLICIES},
    media=_INDEXED,
)
GUARD_FALLBACKS = _gauge(
    "guard_fallbacks",
    "1 while the guard of the tier's eviction policy has the order of lru in force, else 0.",
    ("tier",),
    shared={(_HOST,): lambda host: not host.guard.trusts_hazard},
    tiers={(TIER,): lambda tier: not tier.figures.guard.trusts_hazard},
    media=_INDEXED,
)
GUARD_CREDIT_BLOCKS = _gauge(
    "guard_credit_blocks",
    "FlexKV blocks that the tier may lose to lru before its policy's guard falls back to lru.",
    ("tier",),
    shared={(_HOST,): lambda host: max(0.0, host.guard.credit)},
    tiers={(TIER,): lambda tier: max(0.0, tier.figures.guard.credit)},
    media=_INDEXED,
)
PINNED_BLOCKS = _gauge(
    "pinned_blocks",
    "FlexKV blocks pinned or retained in host memory.",
    shared={(): _attribute("pinned_blocks")},
)
HEALTH = _gauge(
    "health",
    "1 for the state of the cache, and for each reason why it is not ok; else 0.",
    ("state", "reason", "tier"),
    counted=((HealthState.OK.value, "", ""),),
    own={(each.state, each.value, ""): _has_trouble(each) for each in Trouble if not each.of_tier},
    tiers={
        (Trouble.READS.state, Trouble.READS.value, TIER): lambda tier: _is_open(tier.figures.reads),
        (Trouble.WRITES.state, Trouble.WRITES.value, TIER): lambda tier: _is_open(
            tier.figures.writes
        ),
    },
)
QUEUE_LENGTH = _gauge(
    "queue_length",
    "Transfers of the device, or reads and writes of the tier's blocks, that run or wait.",
    ("link",),
    own={("device",): _attribute("transfers")},
    tiers={(TIER,): _attribute("figures.queued_blocks")},
)
QUEUE_BYTES = _gauge(
    "queue_bytes",
    "Bytes that wait to be written to the tier.",
    ("tier",),
    tiers={(TIER,): _attribute("figures.queued_bytes")},
)
CIRCUITS = _gauge(
    "circuits",
    "Drives of the tier, or the store, whose reads or writes are in the state.",
    ("tier", "direction", "state"),
    tiers={
        **{(TIER, "read", state.value): _reads_in(state) for state in CircuitState},
        **{(TIER, "write", state.value): _writes_in(state) for state in CircuitState},
    },
)
LOAD_SECONDS = _histogram(
    "load_seconds",
    "Seconds from the order of a load to the step that finds it done on all ranks.",
    counted=_SINGLE,
    bounds=SECONDS_BOUNDS,
)
STORE_SECONDS = _histogram(
    "store_seconds",
    "Seconds from the order of a store to the step that makes its blocks loadable.",
    counted=_SINGLE,
    bounds=SECONDS_BOUNDS,
)
FETCH_SECONDS = _histogram(
    "fetch_seconds",
    "Seconds from the beginning of a fetch to the last block that the tier gave it.",
    ("tier",),
    counted=_EACH_TIER[1:],
    bounds=SECONDS_BOUNDS,
)
HIT_BLOCKS = _histogram(
    "hit_blocks",
    "FlexKV blocks that were loaded for a request that had a hit.",
    counted=_SINGLE,
    bounds=BLOCKS_BOUNDS,
)
METRICS = tuple(each for each in tuple(globals().values()) if isinstance(each, Metric))

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
