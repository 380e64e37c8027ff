# SPDX-License-Identifier: Apache-2.0
"""Prints the results of `flexkv plan`, as text or as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.cli.common import printable, size
from flexkv.eviction import AUTO, FOLLOWING
from flexkv.plan.curve import LRUCurve, Point, a_day
from flexkv.plan.model import ModelCache
from flexkv.plan.plot import Curves
from flexkv.plan.prefill import PrefillCost
from flexkv.plan.read import TraceFile
from flexkv.plan.replay import Outcome
from flexkv.plan.sizing import GIB, Sizing

_BAR = 24
"""Characters of the longest bar."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class Report:
    """The results for a trace.

    Attributes:
        read: the trace, and the hits that its engine counted.
        block_bytes: bytes of a block over all ranks.
        model: the model whose configuration the user named; None without one.
        cost: cost of computing; None if unknown.
        curve: results of LRU caches of any size.
        sizing: the advice, from the curve and from replays.
        most_memory: the most memory to name, in GiB; None for no limit.
        most_disk: the most disk to name, in GiB; None for no limit.
    """

    read: TraceFile
    block_bytes: float
    model: ModelCache | None
    cost: PrefillCost | None
    curve: LRUCurve
    sizing: Sizing
    most_memory: float | None
    most_disk: float | None

    def gib(self, blocks: int) -> float:
        """GiB of `blocks` blocks over all ranks."""
        return blocks * self.block_bytes / GIB

    def written_a_day(self, blocks: int, seconds: float) -> float | None:
        """GiB a day if `blocks` blocks are written in `seconds`; None if the trace took no time."""
        return a_day(self.gib(blocks), seconds)

    @property
    def prefill_seconds(self) -> float | None:
        """Seconds to compute all prompts without a cache; None if the cost is unknown."""
        cost = self.cost
        if cost is None:
            return None
        return sum(cost.of_range(0, each.prompt_tokens) for each in self.read.trace.requests)

    @property
    def replayed_seconds(self) -> float:
        """Seconds from the first request to the last of those that policies and admissions were
        replayed on."""
        requests = self.read.trace.requests[: self.sizing.replayed]
        return requests[-1].seconds - requests[0].seconds

    @property
    def settings(self) -> dict[str, float | str]:
        """The settings to use, by the names of `CacheConfig`; empty if no prefix comes back. Sizes
        are in GiB."""
        sizing = self.sizing
        if not sizing.memory_blocks:
            return {}
        memory = _up(self.gib(sizing.memory_blocks), self.most_memory)
        found: dict[str, float | str] = {"cpu_cache_gb": memory}
        if sizing.policy is not None:
            found["eviction_policy"] = AUTO if sizing.policy == FOLLOWING else sizing.policy
        if sizing.disk_blocks:
            found["ssd_cache_gb"] = _up(self.gib(sizing.disk_blocks), self.most_disk)
        if sizing.admission is not None:
            found["ssd_admission"] = sizing.admission
        return found

    @property
    def curves(self) -> Curves:
        """The curves to draw; see `flexkv.plan.plot`."""
        points = [point for point in self.sizing.points if point.blocks]
        seconds = self.read.trace.seconds
        written = [self.written_a_day(point.written_blocks, seconds) for point in points]
        saved = [point.saved_seconds for point in points]
        return Curves(
            self.read.trace.name,
            [self.gib(point.blocks) for point in points],
            [100 * point.hit_rate for point in points],
            [each for each in saved if each is not None] if self.cost is not None else None,
            [each for each in written if each is not None] if seconds > 0 else None,
            self.gib(self.sizing.knee.blocks),
            [
                (each.setup.policy, self.gib(each.setup.memory_blocks), 100 * each.hit_rate)
                for each in self.sizing.policies
            ],
        )


def print_report(report: Report) -> None:
    """Print the results as text to standard output."""
    _print_trace(report)
    if not report.sizing.most.blocks:
        if report.curve.engine_tokens:
            print("\nThe engine's own cache hits all that comes back: FlexKV would add no hits.")
        else:
            print("\nNo prefix comes back: no cache of any size would have a hit.")
        return
    _print_sizes(report)
    _print_policies(report)
    _print_admissions(report)
    _print_settings(report)


def as_json(report: Report) -> dict[str, object]:
    """All figures as values of JSON: sizes in bytes, times in seconds, hit rates from 0 to 1."""
    trace, sizing, measured = report.read.trace, report.sizing, report.read.measured
    return {
        "trace": {
            "name": trace.name,
            "format": trace.form,
            "requests": len(trace.requests),
            "skipped_requests": trace.skipped,
            "seconds": trace.seconds,
            "prompt_tokens": trace.prompt_tokens,
            "block_tokens": trace.block_tokens,
            "block_bytes": report.block_bytes,
            "blocks": trace.blocks,
            "distinct_blocks": trace.distinct_blocks,
            "engine_hit_rate": _share(report.curve.engine_tokens, trace.prompt_tokens),
            "prefill_seconds": report.prefill_seconds,
        },
        "measured": None
        if measured is None
        else {
            "prompt_tokens": measured.prompt_tokens,
            "engine_hit_rate": _share(measured.engine_tokens, measured.prompt_tokens),
            "hit_rate": _share(measured.hit_tokens, measured.prompt_tokens),
        },
        "sizes": [_point_json(report, point) for point in sizing.points],
        "knee": _point_json(report, sizing.knee),
        "most": _point_json(report, sizing.most),
        "replayed_requests": sizing.replayed,
        "policies": [_outcome_json(report, each) for each in sizing.policies],
        "admissions": [_outcome_json(report, each) for each in sizing.admissions],
        "settings": report.settings,
    }


def _point_json(report: Report, point: Point) -> dict[str, object]:
    written = report.written_a_day(point.written_blocks, report.read.trace.seconds)
    return {
        "bytes": round(point.blocks * report.block_bytes),
        "blocks": point.blocks,
        "hit_rate": point.hit_rate,
        "saved_seconds": point.saved_seconds,
        "written_bytes_day": None if written is None else round(written * GIB),
    }


def _outcome_json(report: Report, outcome: Outcome) -> dict[str, object]:
    setup = outcome.setup
    written = report.written_a_day(outcome.written_blocks, report.replayed_seconds)
    return {
        "policy": setup.policy,
        "memory_bytes": round(setup.memory_blocks * report.block_bytes),
        "admission": setup.admission if setup.disk_blocks else None,
        "disk_bytes": round(setup.disk_blocks * report.block_bytes),
        "hit_rate": outcome.hit_rate,
        "disk_hit_tokens": outcome.disk_tokens,
        "saved_seconds": outcome.saved_seconds,
        "written_bytes_day": None if written is None else round(written * GIB),
    }


def _print_trace(report: Report) -> None:
    trace, measured = report.read.trace, report.read.measured
    requests = f"{len(trace.requests):,} requests"
    if trace.skipped:
        requests += f" ({trace.skipped:,} more have no token ids)"
    print(f"{printable(trace.name)} ({trace.form})")
    _line("requests", f"{requests} in {_time(trace.seconds)}, {trace.prompt_tokens:,} tokens")
    distinct = f"{trace.distinct_blocks:,} distinct"
    _line("blocks", f"{trace.blocks:,} of {trace.block_tokens} tokens, {distinct}")
    token = size(round(report.block_bytes / trace.block_tokens))
    model = "" if report.model is None else f" ({printable(report.model.name)})"
    _line("a token", f"{token}{model}; a block {size(round(report.block_bytes))}")
    if report.model is not None and report.model.stateful_layers:
        count = report.model.stateful_layers
        _line("", f"the states of {count} layers without attention are not counted")
    if report.cost is not None and report.prefill_seconds is not None:
        _line("prefill", f"{_time(report.prefill_seconds)} for all prompts, {report.cost.source}")
    if report.curve.engine_tokens:
        own = _percent(_share(report.curve.engine_tokens, trace.prompt_tokens))
        _line("engine", f"its own cache hits {own} of the tokens, which are not counted below")
    if measured is not None:
        own = _percent(_share(measured.engine_tokens, measured.prompt_tokens))
        hits = _percent(_share(measured.hit_tokens, measured.prompt_tokens))
        _line("measured", f"the engine itself hit {own} of the tokens, FlexKV {hits}")


def _print_sizes(report: Report) -> None:
    sizing = report.sizing
    seconds = report.read.trace.seconds
    print("\nLRU, from one pass: a cache of this size in memory, or on a disk that takes all")
    print(f"{'GiB':>10} {'hit rate':>9}  {'':{_BAR}} {'saved':>9} {'disk writes':>15}")
    for point in sizing.points:
        bar = _bar(point.hit_rate / sizing.most.hit_rate)
        mark = "  knee" if point.blocks == sizing.knee.blocks else ""
        written = _written(report.written_a_day(point.written_blocks, seconds))
        print(
            f"{_gib(report.gib(point.blocks)):>10} {_percent(point.hit_rate):>9}  {bar:{_BAR}} "
            f"{_saved(point.saved_seconds):>9} {written:>15}{mark}"
        )


def _print_policies(report: Report) -> None:
    sizing = report.sizing
    if not sizing.policies:
        return
    print(f"\nPolicies, memory of {_gib(report.gib(sizing.memory_blocks))} GiB{_part(report)}")
    print(f"{'':>15} {'hit rate':>9} {'saved':>9}")
    for each in sizing.policies:
        mark = "  auto" if each.setup.policy == FOLLOWING else ""
        print(
            f"{each.setup.policy:>15} {_percent(each.hit_rate):>9} "
            f"{_saved(each.saved_seconds):>9}{mark}"
        )


def _print_admissions(report: Report) -> None:
    sizing = report.sizing
    if not sizing.admissions:
        return
    memory, disk = (_gib(report.gib(n)) for n in (sizing.memory_blocks, sizing.disk_blocks))
    print(f"\nAdmissions, memory of {memory} GiB and a disk of {disk} GiB{_part(report)}")
    print(f"{'':>15} {'hit rate':>9} {'saved':>9} {'disk writes':>15}")
    for each in sizing.admissions:
        written = _written(report.written_a_day(each.written_blocks, report.replayed_seconds))
        print(
            f"{each.setup.admission:>15} {_percent(each.hit_rate):>9} "
            f"{_saved(each.saved_seconds):>9} {written:>15}"
        )


def _print_settings(report: Report) -> None:
    sizing = report.sizing
    print("\nSettings to use")
    for name, value in report.settings.items():
        print(f"  {name}: {value}")
    if sizing.policy == FOLLOWING:
        print(f"  (auto is {FOLLOWING} under vLLM's connector and SGLang's linker, else lru)")
    if sizing.memory_blocks < sizing.knee.blocks:
        print(f"  (the knee is at {_gib(report.gib(sizing.knee.blocks))} GiB of memory)")
    if not sizing.disk_blocks:
        gain = sizing.most.hit_rate - report.curve.at(sizing.memory_blocks).hit_rate
        print(f"  (a disk would add at most {100 * gain:.1f} points, and survive restarts)")


def _part(report: Report) -> str:
    requests = len(report.read.trace.requests)
    if report.sizing.replayed == requests:
        return ""
    return f", the first {report.sizing.replayed:,} of {requests:,} requests"


def _line(name: str, text: str) -> None:
    print(f"  {name:<10}{text}")


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _gib(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _saved(seconds: float | None) -> str:
    return "" if seconds is None else _time(seconds)


def _written(gib: float | None) -> str:
    return "" if gib is None else f"{_gib(gib)} GiB/day"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _up(gib: float, most: float | None) -> float:
    """A little more, so that as many blocks fit: whole GiB, or two digits; at most `most`."""
    step = 1.0 if gib >= 10 else 0.1 if gib >= 1 else 0.001
    rounded = round((int(gib / step) + 1) * step, 3)
    return rounded if most is None else min(rounded, most)
