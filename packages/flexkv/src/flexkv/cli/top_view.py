# SPDX-License-Identifier: Apache-2.0
"""The view of `flexkv top`: a panel for each source."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flexkv.cli.top_metrics import Change, Reading
from flexkv.cli.top_sources import Source
from flexkv.eviction import POLICIES
from flexkv.figures.definitions import HEALTH, METRICS, STATES, TIERS
from flexkv.figures.health_samples import health_text, problems_of, state_of
from flexkv.figures.tenant_samples import TENANT_METRICS, tenants_in
from flexkv.service.state import (
    ENGINES,
    FOUND_BLOCKS,
    GRANTED_BLOCKS,
    PROMPT_BLOCKS,
    STALLED_BLOCKS,
)
from flexkv.tiers.circuit import word_of
from flexkv.tiers.disk.inspect import FolderState
from flexkv.types.texts import printable, size
from flexkv.types.troubles import HealthState

_WINDOW_SECONDS = 10.0
"""Seconds over which rates are computed. An engine reports with its steps, which may be seconds
long."""

_FAILURES = 6
"""The most failures that are listed."""

_LINKS = next(metric for metric in METRICS if metric.name == "copied_bytes").combinations
_NONE = "-"
_INDENT = 2
_WIDE = 1 << 12
"""Columns in which any table has room."""
_SERVICE = "service"
_STYLES = {HealthState.OK: "green", HealthState.DEGRADED: "yellow", HealthState.OFF: "red"}


class EngineHistory:
    """The scrapes of an engine in the last seconds, and its latest failures. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readings: deque[Reading] = deque()
        self._failures: deque[tuple[str, str]] = deque(maxlen=_FAILURES)

    def take(self, reading: Reading) -> Reading:
        """Add a scrape, and the failures since the scrape before. Returns the scrape."""
        with self._lock:
            readings = self._readings
            change = Change(readings[-1] if readings else None, reading)
            when = time.strftime("%H:%M:%S") if readings else "before"
            for cause, tier, count in change.failures():
                self._failures.append((when, f"{count} x {cause}{f' of {tier}' if tier else ''}"))
            readings.append(reading)
            while len(readings) > 2 and readings[1].at < reading.at - _WINDOW_SECONDS:
                readings.popleft()
        return reading

    @property
    def change(self) -> Change | None:
        """The changes over the last seconds; None before the first scrape."""
        with self._lock:
            readings = list(self._readings)
        if not readings:
            return None
        return Change(readings[0] if len(readings) > 1 else None, readings[-1])

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Time of day and text of the failures, the latest first. The time of failures from before
        the first scrape is `before`."""
        with self._lock:
            return list(self._failures)[::-1]


class Rows:
    """A table of rows with named cells. Where there is no room for a column each, each row is a
    block of lines: its first cell, then each other cell behind its name. Nothing is cut off.
    `justify` is for all columns but the first."""

    def __init__(self, *names: str, justify: Literal["left", "right"] = "right") -> None:
        self._names = names
        self._justify = justify
        self._rows: list[list[Text]] = []

    def add(self, *cells: str | Text) -> None:
        """Add a row, with a cell for each name."""
        self._rows.append([Text(each) if isinstance(each, str) else each for each in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table()
        wanted = Measurement.get(console, options.update(width=_WIDE), table).maximum
        if wanted <= options.max_width:
            yield table
            return
        for row in self._rows:
            yield Text(row[0].plain, style="bold")
            yield Padding(self._lines(row), (0, 0, 0, _INDENT))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(self._names[0], no_wrap=True)
        for name in self._names[1:]:
            table.add_column(name, justify=self._justify, no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table

    def _lines(self, row: list[Text]) -> Text:
        return Text("\n").join(
            Text(f"{name} ").append_text(cell)
            for name, cell in zip(self._names[1:], row[1:], strict=True)
            if cell.plain != _NONE
        )


def show_engine(source: Source[Reading], history: EngineHistory) -> RenderableType:
    """Make the panel of one engine. `history` is what `source` has taken."""
    change = history.change
    if change is None:
        return Panel(_state(source), title=_plain(source.name), title_align="left")
    new = change.new
    title = ", ".join(filter(None, (source.name, *sorted(new.engines), *sorted(new.models))))
    about = [f"FlexKV {', '.join(sorted(new.versions))}"]
    for tier in TIERS:
        about += _eviction(change, tier)
    parts: list[RenderableType] = [
        *_health(new),
        _summary(change),
        _tiers(change),
        *_tenants(change),
        _links(change),
    ]
    if history.failures:
        parts.append(_failures(history.failures))
    if not source.gives_figures:
        parts.insert(0, _state(source))
    parts.append(_plain(", ".join(about), style="dim"))
    return Panel(Group(*parts), title=_plain(title), title_align="left")


def _health(reading: Reading) -> list[Text]:
    """A line with the worst health of the engines; none if they do not report it."""
    if not any(name.startswith(f"{HEALTH.name}:") for name in reading.values):
        return []
    problems = problems_of(reading.values)
    return [Text(f"health {health_text(problems)}", style=_STYLES[state_of(problems)])]


def show_directory(source: Source[Sequence[FolderState]]) -> RenderableType:
    """Make the panel of one cache directory."""
    states = source.look.last
    parts: list[RenderableType] = []
    if not source.gives_figures:
        parts.append(_state(source))
        if source.is_silent:
            change = "the drive, the network or the driver behind it hangs (dmesg)"
            parts.append(Text(change, style="yellow"))
    if states is not None:
        table = Rows("folder", "used by", "full", "bytes", "hits", "damaged", "today", "circuits")
        for each in states:
            circuits = _circuits_of(each)
            table.add(
                _plain(each.path.rpartition("/")[2][:16]),
                _NONE if each.owner is None else str(each.owner),
                _share(each.used_slots, each.slots),
                size(each.used_bytes),
                f"{each.hit_blocks:,}",
                f"{each.damaged_blocks:,}",
                size(each.written_bytes_day),
                Text(circuits, style=_style(circuits)),
            )
        parts.append(table)
    return Panel(Group(*parts), title=_plain(source.name), title_align="left")


def _state(source: Source[Reading] | Source[Sequence[FolderState]]) -> Text:
    look = source.look
    old = "; the figures are old" if look.last is not None else ""
    if look.error is None:
        silent = f"{source.name} has not answered for {source.silent_seconds:.0f} s"
        return _plain(f"{silent}{old}", style="red" if source.is_silent else "yellow")
    for_seconds = time.monotonic() - look.since
    again = f", for {for_seconds:.0f} s now{old}" if old else ""
    return _plain(f"{look.error}{again}", style="red")


def _summary(change: Change) -> Text:
    if _SERVICE in change.new.engines:
        return _service_summary(change)
    asked = change.growth("query_tokens", "host")
    hits = sum(change.growth("hit_tokens", tier) for tier in TIERS)
    all_asked = change.total("query_tokens", "host")
    all_hits = sum(change.total("hit_tokens", tier) for tier in TIERS)
    saved = change.rate("saved_prefill_seconds")
    loads = [_seconds(change.quantile(share, "load_seconds")) for share in (0.5, 0.99)]
    return Text(
        f"hit rate {_share(hits, asked)} now, {_share(all_hits, all_asked)} since its start   "
        f"prefill saved {change.total('saved_prefill_seconds'):,.1f} s"
        + ("" if saved is None else f", {saved:.2f} s a second")
        + f"   loads p50 {loads[0]}, p99 {loads[1]}"
    )


def _service_summary(change: Change) -> Text:
    prompts, found = PROMPT_BLOCKS.name, FOUND_BLOCKS.name
    granted, stalled = (change.total(each.name) for each in (GRANTED_BLOCKS, STALLED_BLOCKS))
    return Text(
        f"engines {change.total(ENGINES.name):.0f}   blocks of prompts found "
        f"{_share(change.growth(found), change.growth(prompts))} now, "
        f"{_share(change.total(found), change.total(prompts))} since its start   "
        f"granted {granted:,.0f}, stalled {stalled:,.0f}"
    )


def _tenants(change: Change) -> list[Rows]:
    """What tenants with shares have; none if there are none."""
    names = tenants_in(change.new.values)
    table = Rows("tenant", "blocks", "share")
    for name in names:
        blocks, share = (change.total(metric.name, name) for metric in TENANT_METRICS)
        table.add(_plain(name), f"{blocks:,.0f}", f"{share:,.0f}")
    return [table] if names else []


def _eviction(change: Change, tier: str) -> list[str]:
    """The eviction policy of a tier, what it brings, whether its guard has fallen back to lru, and
    the blocks that have left because of their age."""
    used = (each for each in POLICIES if change.total("eviction_policies", tier, each))
    found = [f"{tier} evicts by {each}" for each in used]
    lru, hits = (change.total("guard_hit_blocks", tier, each) for each in ("lru", "used"))
    if lru:
        found.append(f"hits {hits / lru:.2f} of those of lru")
    if change.total("guard_fallbacks", tier):
        found.append("in the order of lru now")
    expired = change.total("expired_blocks", tier)
    if expired:
        found.append(f"{expired:,.0f} blocks expired in {tier}")
    return found


def _tiers(change: Change) -> Rows:
    table = Rows(
        "tier", "hit rate", "now", "tokens/s", "full", "bytes", "evicted/s", "dropped/s", "circuits"
    )
    for tier in TIERS:
        room = change.total("capacity_bytes", tier)
        asked, hits = (change.total(name, tier) for name in ("query_tokens", "hit_tokens"))
        circuits = _circuits(change, tier)
        if tier != TIERS[0] and not (room or hits or circuits):
            continue  # not configured
        used = change.total("bytes", tier)
        recent = change.growth("hit_tokens", tier), change.growth("query_tokens", tier)
        table.add(
            tier,
            _share(hits, asked),
            _share(*recent),
            _number(change.rate("hit_tokens", tier)),
            _share(used, room),
            f"{size(int(used))} of {size(int(room))}" if room else _NONE,
            _number(change.rate("evicted_blocks", tier)) if room else _NONE,
            _number(change.rate("dropped_blocks", tier)),
            Text(circuits or _NONE, style=_style(circuits)),
        )
    return table


def _style(circuits: str) -> str:
    """The style of a text with states of circuits: red if a device gets no jobs."""
    return "red" if "off" in circuits or "connecting" in circuits else ""


def _circuits_of(folder: FolderState) -> str:
    """The states of the circuits of a folder's owner."""
    if folder.reads is None or folder.writes is None:
        return _NONE
    return f"r {word_of(folder.reads)}, w {word_of(folder.writes)}"


def _circuits(change: Change, tier: str) -> str:
    """The states of a tier's circuits; empty if it has none."""
    found = []
    for direction in ("read", "write"):
        counts = {state: change.total("circuits", tier, direction, state) for state in STATES}
        words = {word_of(state): n for state, n in counts.items() if n}
        states = [f"{int(n)} {word}" if n > 1 else word for word, n in words.items()]
        if states:
            found.append(f"{direction[0]} {'+'.join(states)}")
    return ", ".join(found)


def _links(change: Change) -> Rows:
    table = Rows("link", "bytes/s", "one copy", "p50", "p99", "total")
    for link, direction in _LINKS:
        total = change.total("copied_bytes", link, direction)
        if not total:
            continue
        rate = change.rate("copied_bytes", link, direction)
        seconds = change.total("copy_seconds", link, direction)
        times = [_seconds(_latency(change, share, link, direction)) for share in (0.5, 0.99)]
        table.add(
            f"{link} {direction}",
            _NONE if rate is None else f"{size(int(rate))}/s",
            f"{size(int(total / seconds))}/s" if seconds else _NONE,
            *times,
            size(int(total)),
        )
    return table


def _latency(change: Change, share: float, link: str, direction: str) -> float | None:
    if direction in ("load", "store"):
        return change.quantile(share, f"{direction}_seconds")
    return change.quantile(share, "fetch_seconds", link) if direction == "read" else None


def _failures(failures: Sequence[tuple[str, str]]) -> Rows:
    table = Rows("failures", "what", justify="left")
    for when, what in failures:
        table.add(when, Text(what, style="red"))
    return table


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else _NONE


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _plain(text: str, style: str = "") -> Text:
    """Text of others, as `printable` makes it."""
    return Text(printable(text), style=style)
