# SPDX-License-Identifier: Apache-2.0
"""Prints the results of `flexkv plan`, as text or as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.eviction import AUTO, FOLLOWING
from flexkv.plan.curve import LRUCurve, Point
from flexkv.plan.model import ModelCache
from flexkv.plan.read import TraceFile
from flexkv.plan.replay import Outcome
from flexkv.plan.saving import PrefillCost
from flexkv.plan.sizing import DAY_SECONDS, GIB, LEAST_SECONDS, LRU, Row, Sizing
from flexkv.types.texts import printable, size

_BAR = 16
"""Characters of the longest bar."""
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEAST_RATED = 10
_LEAST_REQUESTS, _MOST_REQUESTS, _MOST_TOKENS = 1 / 600, 300.0, 1e6
"""Requests and prompt tokens a second that one engine does not see: less than one request in ten
minutes, or more than it could compute."""
_LEAST_WRITES_GIB = 0.001
"""The least limit of writes to name."""


def setting_gib(blocks: int, block_bytes: float) -> float:
    """The least GiB to set so that `blocks` blocks fit: whole GiB, tenths or thousandths."""
    gib = blocks * block_bytes / GIB
    step = 1.0 if gib >= 10 else 0.1 if gib >= 1 else 0.001
    return round(math.ceil(gib / step - 1e-6) * step, 3)


@dataclass(frozen=True, slots=True)
class Report:
    """The results for a trace. `block_bytes` is over all ranks. The limits `most_memory` and
    `most_disk` are in GiB, None for none; `drive_writes` is how many times a day the disk may be
    written as a whole."""

    read: TraceFile
    block_bytes: float
    model: ModelCache | None
    cost: PrefillCost | None
    curve: LRUCurve
    sizing: Sizing
    most_memory: float | None
    most_disk: float | None
    drive_writes: float

    def gib(self, blocks: int) -> float:
        """GiB of `blocks` blocks over all ranks."""
        return blocks * self.block_bytes / GIB

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last."""
        return self.read.trace.seconds

    @property
    def scales(self) -> bool:
        """Whether the trace is long enough to scale its writes to a day."""
        return self.seconds >= LEAST_SECONDS

    def written_a_day(self, blocks: int) -> float | None:
        """GiB a day if `blocks` blocks are written during the trace; None if it is too short."""
        return self.gib(blocks) * DAY_SECONDS / self.seconds if self.scales else None

    @property
    def prefill_seconds(self) -> float | None:
        """Seconds to compute all prompts without a cache; None if the cost is unknown."""
        cost = self.cost
        if cost is None:
            return None
        return sum(cost.of_range(0, each.prompt_tokens) for each in self.read.trace.requests)

    @property
    def settings(self) -> dict[str, float | str]:
        """The settings to use, by the names of `CacheConfig`; empty if no prefix comes back. Sizes
        are in GiB."""
        sizing = self.sizing
        if not sizing.memory_blocks:
            return {}
        memory = self._setting(sizing.memory_blocks, self.most_memory)
        policy = AUTO if sizing.policy == FOLLOWING else sizing.policy
        found: dict[str, float | str] = {"cpu_cache_gb": memory, "eviction_policy": policy}
        best = sizing.best_admission
        if sizing.disk_blocks and best is not None:
            disk = self._setting(sizing.disk_blocks, self.most_disk)
            found["ssd_cache_gb"] = disk
            found["ssd_admission"] = best.setup.admission
            found["ssd_write_gb_per_day"] = max(
                _LEAST_WRITES_GIB, round(self.drive_writes * disk, 3)
            )
        return found

    def _setting(self, blocks: int, most: float | None) -> float:
        gib = setting_gib(blocks, self.block_bytes)
        return gib if most is None else min(gib, most)


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
    advised = sizing.advised
    return {
        "trace": {
            "name": trace.name,
            "format": trace.form,
            "requests": len(trace.requests),
            "skipped_requests": dict(trace.skipped),
            "made_starts": report.read.made_starts,
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
        "sizes": [
            _point_json(report, row.point)
            | {"policies": [_outcome_json(report, each) for each in row.outcomes]}
            for row in sizing.rows
        ],
        "knee": None if sizing.knee is None else _point_json(report, sizing.knee),
        "most": _point_json(report, sizing.most),
        "policies": [_outcome_json(report, each) for each in sizing.policies],
        "admissions": [_outcome_json(report, each) for each in sizing.admissions],
        "settings": report.settings,
        "advised": None if advised is None else _outcome_json(report, advised),
    }


def _point_json(report: Report, point: Point) -> dict[str, object]:
    return {
        "bytes": round(point.blocks * report.block_bytes),
        "blocks": point.blocks,
        "hit_rate": point.hit_rate,
        "saved_seconds": point.saved_seconds,
    } | _written_json(report, point.written_blocks)


def _outcome_json(report: Report, outcome: Outcome) -> dict[str, object]:
    setup = outcome.setup
    return {
        "policy": setup.policy,
        "memory_bytes": round(setup.memory_blocks * report.block_bytes),
        "admission": setup.admission if setup.disk_blocks else None,
        "disk_bytes": round(setup.disk_blocks * report.block_bytes),
        "hit_rate": outcome.hit_rate,
        "disk_hit_tokens": outcome.disk_tokens,
        "saved_seconds": outcome.saved_seconds,
        "replayed_share": outcome.share,
        "refused_bytes": round(outcome.refused_blocks * report.block_bytes),
    } | _written_json(report, outcome.written_blocks)


def _written_json(report: Report, blocks: int) -> dict[str, object]:
    a_day = report.written_a_day(blocks)
    return {
        "written_bytes": round(blocks * report.block_bytes),
        "written_bytes_day": None if a_day is None else round(a_day * GIB),
    }


def _print_trace(report: Report) -> None:
    trace, measured = report.read.trace, report.read.measured
    requests = f"{len(trace.requests):,} requests"
    print(f"{printable(trace.name)} ({trace.form})")
    _line("requests", f"{requests} in {_time(trace.seconds)}, {trace.prompt_tokens:,} tokens")
    for reason, count in trace.skipped.items():
        _line("skipped", f"{count:,} {'request' if count == 1 else 'requests'} {reason}")
    _print_rate(report)
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


def _print_rate(report: Report) -> None:
    trace = report.read.trace
    count, seconds = len(trace.requests), trace.seconds
    if report.read.made_starts:
        made = f"{report.read.made_starts:,} sessions"
        _line("starts", f"of {made} are not in the file; they are made at equal distances")
    if count < _LEAST_RATED:
        return
    if not seconds:
        _line("rate", "all requests have one time, so policies that learn from it learn nothing")
        return
    requests, tokens = count / seconds, trace.prompt_tokens / seconds
    text = f"{requests:,.3g} requests and {tokens:,.0f} prompt tokens a second"
    if requests > _MOST_REQUESTS or tokens > _MOST_TOKENS or requests < _LEAST_REQUESTS:
        text += ": is the unit of time right? See --time-unit"
    _line("rate", text)


def _print_sizes(report: Report) -> None:
    sizing = report.sizing
    names = [LRU, *(each.setup.policy for each in sizing.rows[0].outcomes)]
    heads = " ".join(f"{name:>9}" for name in names)
    print("\nMemory of each size: hit rates, and what the best policy saves")
    print("Disk writes: those of a disk of this size that takes all blocks")
    print(f"{'GiB':>10} {heads}  {'':{_BAR}} {'saved':>9} {'disk writes':>15}")
    most = max(_best(row).hit_rate for row in sizing.rows)
    for row in sizing.rows:
        point, best = row.point, _best(row)
        mark = ""
        if sizing.knee is not None and point.blocks == sizing.knee.blocks:
            mark = "  knee"
        rates = [_percent(point.hit_rate), *map(_rate, row.outcomes)]
        written = _written(report, point.written_blocks)
        print(
            f"{_gib(report.gib(point.blocks)):>10} {' '.join(f'{each:>9}' for each in rates)}  "
            f"{_bar(_share(best.hit_rate, most)):{_BAR}} {_saved(best.saved_seconds):>9} "
            f"{written:>15}{mark}"
        )
    if not report.scales:
        print(f"  (writes of the whole trace: {_time(report.seconds)} are too short to scale)")
    elif report.seconds < DAY_SECONDS:
        print(f"  (writes are those of {_time(report.seconds)}, scaled to a day)")
    _print_sampled([each for row in sizing.rows for each in row.outcomes])


def _best(row: Row) -> Point | Outcome:
    found: list[Point | Outcome] = [row.point, *row.outcomes]
    return max(found, key=lambda each: each.hit_rate)


def _print_policies(report: Report) -> None:
    sizing = report.sizing
    if not sizing.policies:
        return
    print(f"\nPolicies, memory of {_gib(report.gib(sizing.memory_blocks))} GiB")
    print(f"{'':>15} {'hit rate':>9} {'saved':>9}")
    for each in sizing.policies:
        mark = f"  {AUTO}" if each.setup.policy == FOLLOWING else ""
        print(f"{each.setup.policy:>15} {_rate(each):>9} {_saved(each.saved_seconds):>9}{mark}")
    _print_sampled(sizing.policies)


def _print_admissions(report: Report) -> None:
    sizing = report.sizing
    if not sizing.admissions:
        return
    memory, disk = (_gib(report.gib(n)) for n in (sizing.memory_blocks, sizing.tried_disk))
    print(f"\nAdmissions, memory of {memory} GiB and a disk of {disk} GiB")
    if sizing.write_blocks is not None:
        most = _gib(report.drive_writes * report.gib(sizing.tried_disk))
        print(f"At most {report.drive_writes:g} drive writes a day: {most} GiB")
    print(f"{'':>15} {'hit rate':>9} {'saved':>9} {'disk writes':>15}")
    for each in sizing.admissions:
        mark = "  limited" if each.refused_blocks else ""
        print(
            f"{each.setup.admission:>15} {_rate(each):>9} {_saved(each.saved_seconds):>9} "
            f"{_written(report, each.written_blocks):>15}{mark}"
        )
    _print_sampled(sizing.admissions)


def _print_sampled(outcomes: Sequence[Outcome]) -> None:
    shares = [each.share for each in outcomes if each.share < 1]
    if shares:
        print(f"  (~ estimated by conversations with {_percent(min(shares))} of the tokens)")


def _print_settings(report: Report) -> None:
    sizing = report.sizing
    print("\nSettings to use")
    for name, value in report.settings.items():
        print(f"  {name}: {value}")
    _print_advised(report)
    if sizing.policy == FOLLOWING:
        print(f"  ({AUTO} is {FOLLOWING} under vLLM's connector and SGLang's linker, else {LRU})")
    if sizing.knee is None:
        print("  (no knee: hits grow with the memory up to the size that hits nearly all)")
    elif sizing.memory_blocks < sizing.knee.blocks:
        print(f"  (the knee is at {_gib(report.gib(sizing.knee.blocks))} GiB of memory)")
    if sizing.disk_blocks:
        return
    if sizing.tried_disk:
        _print_refused_disk(report)
        return
    best = max(
        (each.hit_rate for each in sizing.policies),
        default=report.curve.at(sizing.memory_blocks).hit_rate,
    )
    gain = max(0.0, sizing.most.hit_rate - best)
    print(f"  (a disk would add at most {100 * gain:.1f} points, and survive restarts)")


def _print_advised(report: Report) -> None:
    advised = report.sizing.advised
    if advised is None:
        point = report.curve.at(report.sizing.memory_blocks)
        print(f"  These hit {_percent(point.hit_rate)} in the pass for {LRU}")
        return
    text = f"  Replayed with them, the trace has {_rate(advised)} hits"
    if advised.saved_seconds is not None:
        text += f", which save {_time(advised.saved_seconds)}"
    if advised.setup.disk_blocks:
        text += f"; {_written(report, advised.written_blocks)} are written"
    print(text)


def _print_refused_disk(report: Report) -> None:
    sizing = report.sizing
    disk = _gib(report.gib(sizing.tried_disk))
    print(f"  (no disk: one of {disk} GiB added {100 * sizing.disk_gain:.1f} points in its replay)")
    longest = max(report.read.trace.lengths)
    if longest > sizing.memory_blocks:
        most = _gib(report.gib(longest))
        print(f"  (a request takes up to {most} GiB; what memory lacks does not get to a disk)")
    point = sizing.disk_most
    if report.scales and any(each.refused_blocks for each in sizing.admissions):
        writes = point.written_blocks / sizing.tried_disk * DAY_SECONDS / report.seconds
        print(
            f"  (without a limit of writes, {_percent(point.hit_rate)} and {writes:.1f} drive "
            "writes a day; see --drive-writes-per-day)"
        )


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


def _rate(outcome: Outcome) -> str:
    return f"{'~' if outcome.share < 1 else ''}{_percent(outcome.hit_rate)}"


def _written(report: Report, blocks: int) -> str:
    a_day = report.written_a_day(blocks)
    return f"{_gib(report.gib(blocks))} GiB" if a_day is None else f"{_gib(a_day)} GiB/day"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
