# SPDX-License-Identifier: Apache-2.0
"""Rules for Prometheus: when somebody should look at an engine's cache.

No threshold is tuned: each is where the troubleshooting page has something to do.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from dashboards.names import Names
from dashboards.panels import hit_rate
from flexkv.types.changes import BELOW

ENGINES = ("vllm", "sglang")
_HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# Made by `python -m dashboards --write`; change dashboards/alerts.py instead.
"""
_WHERE = "model_name, instance"


class Severity(enum.Enum):
    """How soon somebody should look."""

    CRITICAL = "critical"
    """The cache brings nothing until somebody acts."""
    WARNING = "warning"
    """It brings less than it could."""
    INFO = "info"
    """A setting or a request could be better."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule.

    Attributes:
        name: of the alert.
        expr: PromQL; fires where it has a value.
        wait: how long it must have one, as Prometheus writes times.
        severity: see `Severity`.
        summary: what happens, in one line.
        advice: what to do.
    """

    name: str
    expr: str
    wait: str
    severity: Severity
    summary: str
    advice: str


def alerts(names: Names) -> list[Alert]:
    """All rules for one kind of engine, the most severe first."""
    return [*_failures(names), *_pace(names), *_room(names), *_requests(names)]


def alerts_yaml() -> str:
    """The file for Prometheus: a group of rules for each kind of engine."""
    groups = [
        {
            "name": f"flexkv-{engine}",
            "rules": [
                {
                    "alert": each.name,
                    "expr": each.expr,
                    "for": each.wait,
                    "labels": {"severity": each.severity.value, "server": engine},
                    "annotations": {"summary": each.summary, "description": each.advice},
                }
                for each in alerts(Names(f"{engine}:flexkv_", "", "10m", "10m"))
            ],
        }
        for engine in ENGINES
    ]
    return _HEAD + yaml.safe_dump({"groups": groups}, sort_keys=False, width=100)


def _sum(series: str, *labels: str) -> str:
    return f"sum by ({', '.join((_WHERE, *labels))}) ({series})"


_AFTER_ERRORS = "suspended|stopped|lost_track"
"""The reasons for which FlexKV is off without the user's will."""


def _failures(names: Names) -> Sequence[Alert]:
    circuits = names.series("circuits", state="open|probing|connecting")
    return (
        Alert(
            "FlexKVCopiesFail",
            f"{_sum(names.increase('failures', cause='load|store'), 'cause')} > 0",
            "0m",
            Severity.CRITICAL,
            "Copies between the engine and host memory fail ({{ $labels.cause }})",
            "Look for FlexKV's first error in the engine's log. If a rank has ended its copies, "
            "the engine loads nothing until it is restarted.",
        ),
        Alert(
            "FlexKVIsDisabled",
            f"{_sum(names.series('health', state='off', reason=_AFTER_ERRORS), 'reason')} > 0",
            "2m",
            Severity.CRITICAL,
            "FlexKV has disabled loads and stores after errors ({{ $labels.reason }})",
            "Requests are served without hits. Look for FlexKV's first error in the engine's log, "
            "then restart the engine; please report the error.",
        ),
        Alert(
            "FlexKVInternalErrors",
            f"{_sum(names.increase('failures', cause='internal'))} > 0",
            "0m",
            Severity.WARNING,
            "FlexKV caught an error of its own",
            "Requests are served, with fewer hits. The engine's log has the traceback; please "
            "report it.",
        ),
        Alert(
            "FlexKVCircuitOpen",
            f"{_sum(circuits, 'tier', 'direction')} > 0",
            "2m",
            Severity.WARNING,
            "{{ $labels.direction }} of {{ $labels.tier }} is disabled after failures",
            "FlexKV tries again by itself. Check the drive, or the store and the network to it; "
            "the engine's log names the error.",
        ),
        Alert(
            "FlexKVDamagedBlocks",
            f"{_sum(names.increase('failures', '1h', cause='damaged'), 'tier')} > 0",
            "0m",
            Severity.WARNING,
            "Blocks of {{ $labels.tier }} had wrong checksums",
            "They counted as misses. A kill or a power failure can leave some on a disk; if they "
            "keep coming, check the drive with `flexkv verify` and its SMART data.",
        ),
        Alert(
            "FlexKVTierFails",
            f"{_sum(names.increase('failures', cause='read|write|stalled'), 'tier', 'cause')} > 10",
            "5m",
            Severity.WARNING,
            "{{ $labels.tier }} fails ({{ $labels.cause }})",
            "Check the drive, or the store and the network to it.",
        ),
        Alert(
            "FlexKVStoreAnswersLate",
            f"{_sum(names.increase('late_questions'), 'tier')} > 10",
            "5m",
            Severity.WARNING,
            "{{ $labels.tier }} does not answer in time",
            "Questions beyond their deadline count as misses. Check the store and the network to "
            "it, or raise its question_seconds.",
        ),
    )


def _pace(names: Names) -> Sequence[Alert]:
    left = _sum(names.increase("skipped_tokens", "15m", reason="slow|awaited"))
    loaded = _sum(names.increase("hit_tokens", "15m"))
    load = names.quantile(0.99, "load_seconds", "model_name", "instance", window="15m")
    fetch = names.quantile(0.95, "fetch_seconds", "model_name", "instance", "tier", window="15m")
    return (
        Alert(
            "FlexKVLoadsAreSlow",
            f"{load} > 1",
            "15m",
            Severity.WARNING,
            "1 % of loads from host memory take more than a second",
            "Compare the rate of one copy with `nox -s gpu` or with the day before; look for other "
            "traffic on the link, and for hosts that swap.",
        ),
        Alert(
            "FlexKVFetchesAreSlow",
            f"{fetch} > 2.5",
            "15m",
            Severity.WARNING,
            "5 % of fetches from {{ $labels.tier }} take more than 2.5 seconds",
            "The drive, or the network to the store, is slow or has other traffic. `flexkv doctor` "
            "measures the drives.",
        ),
        Alert(
            "FlexKVHitsAreComputed",
            f"{left} > 0.5 * ({left} + {loaded})",
            "15m",
            Severity.WARNING,
            "Most hits are computed, because loading them is slower",
            "Host memory or a lower tier is slower than the engine computes. See `skipped_tokens` "
            "by reason, and the rates of the links.",
        ),
        Alert(
            "FlexKVSlowWayOfCopying",
            f"{_sum(names.increase('fallback_bytes'))} > 0",
            "5m",
            Severity.WARNING,
            "Copies take a slower way than the one measured to be fastest",
            "GPU memory for the copy ring is short: leave the GPU 128 MiB more, by a lower "
            "gpu_memory_utilization or mem_fraction_static.",
        ),
    )


def _room(names: Names) -> Sequence[Alert]:
    stored = _sum(names.rate("stored_blocks", "1h", tier="host"))
    evicted = _sum(names.rate("evicted_blocks", "1h", tier="host"))
    dropped = names.rate("dropped_blocks", "30m", tier="|".join(each.value for each in BELOW))
    arrived = _sum(names.rate("stored_blocks", "30m", tier="host"))
    return (
        Alert(
            "FlexKVEvictsBeforeReuse",
            f"({evicted} > 0.9 * {stored}) and ({hit_rate(names, '1h', _WHERE)} < 0.01)",
            "1h",
            Severity.INFO,
            "Blocks leave host memory before they are used again",
            "More memory or a disk would help if prompts come back at all: `flexkv plan` says how "
            "much, from a recording (FLEXKV_TRACE).",
        ),
        Alert(
            "FlexKVHostMemoryIsFull",
            f"{_sum(names.rate('dropped_blocks', '30m', tier='host'))} > 0.1 * {arrived}",
            "30m",
            Severity.WARNING,
            "Host memory has no room for a tenth of the new blocks",
            "All other blocks are pinned, or being loaded, stored or written. Pin less, or raise "
            "cpu_cache_gb.",
        ),
        Alert(
            "FlexKVWritesAreDropped",
            f"{_sum(dropped, 'tier')} > on ({_WHERE}) group_left () 0.5 * {arrived}",
            "30m",
            Severity.INFO,
            "{{ $labels.tier }} takes less than half of the new blocks",
            "It writes slower than blocks arrive, or its write budget is spent. Admission "
            "`second_hit` writes fewer.",
        ),
        Alert(
            "FlexKVPinsAreRefused",
            f"{_sum(names.increase('refused_pin_blocks'))} > 0",
            "0m",
            Severity.INFO,
            "Requests pin more than half of host memory, or retain more than their share",
            "Blocks beyond that are not kept. Pin or retain less or for a shorter time, or raise "
            "cpu_cache_gb.",
        ),
    )


def _requests(names: Names) -> Sequence[Alert]:
    return (
        Alert(
            "FlexKVParametersAreIgnored",
            f"{_sum(names.increase('ignored_parameters', '1h'))} > 0",
            "0m",
            Severity.INFO,
            "Requests have parameters that FlexKV does not understand",
            "The engine's log names them. A misspelt parameter has no effect.",
        ),
    )
