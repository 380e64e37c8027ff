# SPDX-License-Identifier: Apache-2.0
"""What the dashboard shows, independent of Grafana."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from dashboards.names import ENDINGS, Names
from flexkv.figures.definitions import METRICS, Kind, Metric


class Shape(enum.Enum):
    """How a panel shows its series."""

    LINES = "lines"
    STACK = "stack"
    """Areas upon each other: parts of a sum."""
    NUMBER = "number"
    """The last value, large."""


@dataclass(frozen=True, slots=True)
class Query:
    """Series of a panel.

    Attributes:
        expr: PromQL.
        legend: text for each series; labels in double braces.
    """

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: of the panel.
        text: what the values are, for the panel's hint.
        unit: Grafana's name of the unit.
        queries: one or more.
        shape: see `Shape`.
    """

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    shape: Shape = Shape.LINES


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


def rows(names: Names) -> list[Row]:
    """All rows of the dashboard, from the top. The last has the metrics that no other row shows."""
    made = [_gain(names), _latency(names), _links(names), _room(names), _failures(names)]
    queries = (query.expr for row in made for panel in row.panels for query in panel.queries)
    shown = set(re.findall(r":flexkv_(\w+)", " ".join(queries)))
    others = [each for each in METRICS if each.name + ENDINGS[each.kind] not in shown]
    return [*made, Row("Others", tuple(_plain(names, each) for each in others))] if others else made


def _plain(names: Names, metric: Metric) -> Panel:
    """A panel of one metric: a counter in a second, a gauge, or the 99th percentile."""
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.label_names) or metric.name
    if metric.kind is Kind.HISTOGRAM:
        expr = names.quantile(0.99, metric.name, *metric.label_names)
    else:
        values = (names.series if metric.kind is Kind.GAUGE else names.rate)(metric.name)
        expr = f"sum by ({', '.join(metric.label_names)}) ({values})"
    return Panel(metric.name.replace("_", " "), metric.text, "short", (Query(expr, legend),))


def hit_rate(names: Names, window: str = "", by: str = "") -> str:
    """Share of the tokens that were looked up which some tier had, for each value of `by`."""
    total = f"sum by ({by})" if by else "sum"
    asked = names.rate("query_tokens", window, tier="host")
    return f"{total} ({names.rate('hit_tokens', window)}) / ({total} ({asked}) > 0)"


def _gain(names: Names) -> Row:
    asked = f"sum ({names.rate('query_tokens', tier='host')})"
    by_tier = f"sum by (tier) ({names.rate('hit_tokens')})"
    saved = names.increase("saved_prefill_seconds", names.span)
    return Row(
        "What FlexKV brings",
        (
            Panel(
                "Hit rate",
                "Share of the tokens that the engine did not have itself and FlexKV loaded.",
                "percentunit",
                (Query(hit_rate(names), "all tiers"),),
                Shape.NUMBER,
            ),
            Panel(
                "Prefill time saved",
                "Seconds of computing in the time range that loads have saved.",
                "s",
                (Query(f"sum ({saved})", "saved"),),
                Shape.NUMBER,
            ),
            Panel(
                "Version",
                "Engines by the version of FlexKV that they run.",
                "none",
                (Query(f"count by (version) ({names.series('info')})", "{{version}}"),),
                Shape.NUMBER,
            ),
            Panel(
                "Hit rate by tier",
                "Share of the tokens looked up that the tier had.",
                "percentunit",
                (Query(f"{by_tier} / ignoring (tier) group_left () ({asked} > 0)", "{{tier}}"),),
                Shape.STACK,
            ),
            Panel(
                "Tokens",
                "Tokens in a second: looked up, loaded by tier, and left to compute by reason.",
                "short",
                (
                    Query(asked, "looked up"),
                    Query(by_tier, "loaded from {{tier}}"),
                    Query(f"sum by (reason) ({names.rate('skipped_tokens')})", "left: {{reason}}"),
                ),
            ),
            Panel(
                "Prefill saved a second",
                "Seconds of computing that loads save in a second, over all engines.",
                "s",
                (
                    Query(
                        f"sum by (instance) ({names.rate('saved_prefill_seconds')})", "{{instance}}"
                    ),
                ),
            ),
            Panel(
                "Blocks a hit",
                "Blocks that were loaded for a request with a hit.",
                "short",
                tuple(
                    Query(names.quantile(share, "hit_blocks"), f"p{share * 100:g}")
                    for share in (0.5, 0.9)
                ),
            ),
        ),
    )


def _latency(names: Names) -> Row:
    def quantiles(name: str) -> tuple[Query, ...]:
        return tuple(
            Query(names.quantile(share, name), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)
        )

    return Row(
        "Latency",
        (
            Panel(
                "Load",
                "From the order of a load to the step that finds it done on all ranks.",
                "s",
                quantiles("load_seconds"),
            ),
            Panel(
                "Fetch from lower tiers",
                "From the beginning of a fetch to the last block that the tier gave it.",
                "s",
                tuple(
                    Query(
                        names.quantile(share, "fetch_seconds", "tier"),
                        f"{{{{tier}}}} p{share * 100:g}",
                    )
                    for share in (0.5, 0.95)
                ),
            ),
            Panel(
                "Store",
                "From the order of a store to the step that makes its blocks loadable.",
                "s",
                quantiles("store_seconds"),
            ),
        ),
    )


def _links(names: Names) -> Row:
    by = "sum by (link, direction)"
    size = f"{by} ({names.rate('copied_bytes')})"
    seconds = f"{by} ({names.rate('copy_seconds')})"
    return Row(
        "Links",
        (
            Panel(
                "Traffic",
                "Bytes copied in a second, of all ranks together.",
                "Bps",
                (Query(size, "{{link}} {{direction}}"),),
            ),
            Panel(
                "Rate of one copy",
                "Bytes of a copy by its seconds, without waiting.",
                "Bps",
                (Query(f"{size} / ({seconds} > 0)", "{{link}} {{direction}}"),),
            ),
            Panel(
                "Ways over the GPU's link",
                "Bytes in a second by the way they went; fallback is slower than the best way.",
                "Bps",
                (
                    Query(f"sum by (way) ({names.rate('way_bytes')})", "{{way}}"),
                    Query(f"sum ({names.rate('fallback_bytes')})", "fallback"),
                ),
            ),
            Panel(
                "Queues",
                "Transfers, reads and writes that run or wait.",
                "short",
                (Query(f"sum by (link) ({names.series('queue_length')})", "{{link}}"),),
            ),
            Panel(
                "Bytes that wait to be written",
                "By tier.",
                "bytes",
                (Query(f"sum by (tier) ({names.series('queue_bytes')})", "{{tier}}"),),
            ),
        ),
    )


def _room(names: Names) -> Row:
    used, room = (f"sum by (tier) ({names.series(each)})" for each in ("bytes", "capacity_bytes"))
    blocks = names.series("blocks"), names.series("capacity_blocks")
    return Row(
        "Room",
        (
            Panel(
                "Occupancy",
                "Share of the tier's room that holds blocks.",
                "percentunit",
                (Query(f"{used} / ({room} > 0)", "{{tier}}"),),
            ),
            Panel(
                "Bytes",
                "Blocks that can be loaded, and the room for them.",
                "bytes",
                (Query(used, "{{tier}}"), Query(room, "{{tier}} room")),
            ),
            Panel(
                "Blocks",
                "Blocks that can be loaded, the room for them, and pins.",
                "short",
                (
                    Query(f"sum by (tier) ({blocks[0]})", "{{tier}}"),
                    Query(f"sum by (tier) ({blocks[1]})", "{{tier}} room"),
                    Query(f"sum ({names.series('pinned_blocks')})", "pinned in host"),
                ),
            ),
            Panel(
                "Eviction policy",
                "Engines by the policy that evicts from their host memory and from their disk.",
                "none",
                (
                    Query(
                        f"sum by (tier, policy) ({names.series('eviction_policies')}) > 0",
                        "{{tier}}: {{policy}}",
                    ),
                ),
                Shape.NUMBER,
            ),
            Panel(
                "Hits and those of LRU",
                "Blocks a second that the tier had, and would have had with LRU; the credit of the "
                "policy's guard, and engines in the order of LRU.",
                "short",
                (
                    Query(
                        f"sum by (tier, policy) ({names.rate('guard_hit_blocks')})",
                        "{{tier}}, hits: {{policy}}",
                    ),
                    Query(
                        f"sum by (tier) ({names.series('guard_credit_blocks')})", "{{tier}}, credit"
                    ),
                    Query(
                        f"sum by (tier) ({names.series('guard_fallbacks')})",
                        "{{tier}}, in the order of LRU",
                    ),
                    Query(f"sum by (tier) ({names.rate('guard_switches')})", "{{tier}}, switches"),
                ),
            ),
            Panel(
                "Blocks that come and go",
                "In a second. Evictions as fast as stores, with few hits, mean too little room.",
                "short",
                (
                    Query(f"sum by (tier) ({names.rate('stored_blocks')})", "stored in {{tier}}"),
                    Query(f"sum by (tier) ({names.rate('evicted_blocks')})", "evicted: {{tier}}"),
                    Query(f"sum by (tier) ({names.rate('expired_blocks')})", "expired: {{tier}}"),
                ),
            ),
            Panel(
                "Blocks not stored",
                "For lack of room, of a place in a queue or of write budget; pins over the limit.",
                "short",
                (
                    Query(f"sum by (tier) ({names.rate('dropped_blocks')})", "{{tier}}"),
                    Query(f"sum ({names.rate('refused_pin_blocks')})", "pins"),
                ),
            ),
        ),
    )


def _failures(names: Names) -> Row:
    circuits = names.series("circuits", state="open|probing|connecting")
    return Row(
        "Failures",
        (
            Panel(
                "Failures",
                "In the window of the rate, by cause and tier.",
                "short",
                (
                    Query(
                        f"sum by (cause, tier) ({names.increase('failures')})", "{{cause}} {{tier}}"
                    ),
                    Query(f"sum by (tier) ({names.increase('late_questions')})", "late: {{tier}}"),
                ),
            ),
            Panel(
                "Circuits that are not closed",
                "Drives or stores that FlexKV does not read or write, or tries again.",
                "short",
                (
                    Query(
                        f"sum by (tier, direction, state) ({circuits})",
                        "{{tier}} {{direction}} {{state}}",
                    ),
                ),
            ),
            Panel(
                "Health",
                "Engines that are ok, and those that are degraded or off, with the reason.",
                "short",
                (
                    Query(
                        f"sum by (state, reason, tier) ({names.series('health')}) > 0",
                        "{{state}} {{reason}} {{tier}}",
                    ),
                ),
            ),
            Panel(
                "Rare events",
                "Circuits that opened, resets, parameters not understood.",
                "short",
                (
                    Query(
                        f"sum by (tier) ({names.increase('circuit_openings')})", "opened: {{tier}}"
                    ),
                    Query(f"sum by (cause) ({names.increase('resets')})", "resets: {{cause}}"),
                    Query(f"sum ({names.increase('ignored_parameters')})", "ignored parameters"),
                    Query(f"sum by (result) ({names.increase('hints')})", "hints {{result}}"),
                ),
            ),
        ),
    )
