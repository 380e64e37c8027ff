# SPDX-License-Identifier: Apache-2.0
"""Replay a trace of requests and print hit rate, saved time of prefill and disk writes by gigabytes
of cache; then compare policies and admissions, and name the settings to use. TRACE is JSONL as of
Mooncake or Qwen-Bailian, a log of vLLM or SGLang with token ids, or a recording of an engine with
FlexKV (FLEXKV_TRACE). No engine, GPU or cache is needed or touched. Exit code 0."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from flexkv.cli.common import Command, add_json, number, print_json
from flexkv.cli.plan_plot import check_plot, draw
from flexkv.cli.plan_report import Report, as_json, print_report, setting_gib
from flexkv.eviction import POLICIES
from flexkv.plan.curve import LRUCurve
from flexkv.plan.fields import AUTO, UNITS
from flexkv.plan.model import KV_DTYPES, ModelCache, read_model
from flexkv.plan.read import FORMS, STANDARD_INPUT, ReadOptions, TraceFile, read_trace
from flexkv.plan.saving import LoadCost, PrefillCost, Savings
from flexkv.plan.sizing import GIB, size_up
from flexkv.types.admission import ADMISSIONS
from flexkv.types.deadline import call_beside
from flexkv.types.errors import ConfigError, TraceError
from flexkv.types.texts import exact, size

QUIET_SECONDS = 10.0
"""Seconds without a line about the progress if standard error is no terminal."""

_MOST_TOKENS = 1 << 20
_MOST_USES = 1 << 40
_MOST_DRIVE_WRITES = 1000.0
_USES = 2_000_000
"""The most uses of blocks in a replay by default: 2 s without a disk, and 6 to 34 s with one, as
measured on one core."""
_LOAD_GIB, _DISK_GIB = 20.0, 4.0
"""GiB a second of loads by default: PCIe 4.0 with 16 lanes and one NVMe drive, about."""
_DRIVE_WRITES = 1.0

_Show: TypeAlias = Callable[[str, float | None], None]
"""Shows the step that the command is at, and its finished share; None if unknown."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help=f"the trace, or {STANDARD_INPUT} for standard input; may be compressed by gzip",
    )
    parser.add_argument(
        "--format",
        default=AUTO,
        metavar="NAME",
        type=_one_of("--format", FORMS),
        help=f"format of the trace: {', '.join(FORMS)}; default: {AUTO}, which looks at the file",
    )
    parser.add_argument(
        "--block-tokens",
        metavar="N",
        type=_whole("--block-tokens", _MOST_TOKENS),
        help="tokens of a block; default: what the trace says, 16 for logs with token ids",
    )
    parser.add_argument(
        "--time-unit",
        default=AUTO,
        metavar="UNIT",
        type=_one_of("--time-unit", (AUTO, *UNITS)),
        help=f"unit of the trace's times: {', '.join(UNITS)}; default: that of the format; "
        "for times since 1970, the unit that gives a date of today",
    )
    parser.add_argument(
        "--sessions-per-hour",
        metavar="N",
        type=_rate("--sessions-per-hour"),
        help="sessions that start in an hour, for traces that name times within a session only",
    )
    token = parser.add_argument_group("the size of a token (a recording says it itself)")
    token.add_argument(
        "--model", metavar="PATH", help="config.json of the model, or the directory with it"
    )
    token.add_argument(
        "--kv-dtype",
        default="auto",
        metavar="NAME",
        type=_one_of("--kv-dtype", KV_DTYPES),
        help=f"dtype of the engine's KV cache: {', '.join(KV_DTYPES)}; default: auto",
    )
    token.add_argument(
        "--token-bytes",
        metavar="N",
        type=number("--token-bytes", 1, float(GIB)),
        help="bytes of a token in the KV cache, over all ranks",
    )
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--memory-gb",
        default=(),
        metavar="LIST",
        type=_sizes,
        help="sizes in GiB to show, separated by commas",
    )
    machine.add_argument(
        "--max-memory-gb",
        metavar="GIB",
        type=_gib("--max-memory-gb"),
        help="the most memory to name",
    )
    machine.add_argument(
        "--max-disk-gb",
        metavar="GIB",
        type=_gib("--max-disk-gb"),
        help="the most disk to name; 0 for none",
    )
    machine.add_argument(
        "--engine-gb",
        default=0.0,
        metavar="GIB",
        type=_gib("--engine-gb"),
        help="the engine's own KV cache (its prefix cache); default: 0. Its hits are not counted",
    )
    machine.add_argument(
        "--prefill-rate",
        metavar="TOKENS",
        type=_rate("--prefill-rate"),
        help="prompt tokens that the engine computes a second, on average over all prompts; "
        "default: as a recording measured",
    )
    machine.add_argument(
        "--load-rate",
        default=_LOAD_GIB,
        metavar="GIB",
        type=_rate("--load-rate"),
        help="GiB a second from host memory to the engine, over all ranks; "
        f"default: {_LOAD_GIB:g}. Loading is taken off the time that hits save",
    )
    machine.add_argument(
        "--disk-rate",
        default=_DISK_GIB,
        metavar="GIB",
        type=_rate("--disk-rate"),
        help=f"GiB a second from disk to host memory; default: {_DISK_GIB:g}",
    )
    machine.add_argument(
        "--drive-writes-per-day",
        default=_DRIVE_WRITES,
        metavar="N",
        type=number("--drive-writes-per-day", 1e-3, _MOST_DRIVE_WRITES),
        help="how many times a day the advised disk may be written as a whole, as the drive's "
        f"data sheet says (DWPD); default: {_DRIVE_WRITES:g}",
    )
    compared = parser.add_argument_group("what is compared")
    compared.add_argument(
        "--policies",
        default=[*POLICIES],
        metavar="LIST",
        type=_names("--policies", POLICIES),
        help="eviction policies of host memory, separated by commas, or none; "
        f"default: {','.join(POLICIES)}",
    )
    compared.add_argument(
        "--admissions",
        default=[*ADMISSIONS],
        metavar="LIST",
        type=_names("--admissions", ADMISSIONS),
        help="admissions of the disk, separated by commas, or none; "
        f"default: {','.join(ADMISSIONS)}",
    )
    compared.add_argument(
        "--replay-blocks",
        default=_USES,
        metavar="N",
        type=_whole("--replay-blocks", _MOST_USES),
        help="replay a sample of the conversations if all prompts and answers together have more "
        "blocks; policies at the advised memory are replayed on the whole trace up to eight times "
        f"as many. Default: {_USES}",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the curves: .png, .svg or .pdf")
    add_json(parser)


def _gib(option: str) -> Callable[[str], float]:
    return number(option, 0, float(1 << 20))


def _rate(option: str) -> Callable[[str], float]:
    return number(option, 1e-3, 1e9)


def _sizes(text: str) -> list[float]:
    most = 1 << 20
    allowed = f"numbers from 0 to {most}, separated by commas"
    return [number("--memory-gb", 0, most, allowed)(part) for part in text.split(",")]


def _whole(option: str, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if 1 <= (value := int(text)) <= most:
                return value
        raise ConfigError(f"{text!r} from {option}; allowed: a whole number from 1 to {most}")

    return read


def _names(option: str, known: Collection[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = [part.strip() for part in text.split(",")]
        if names == ["none"]:
            return []
        for name in names:
            if name not in known or names.count(name) > 1:
                allowed = f"{', '.join(known)}, each once and separated by commas, or none"
                raise ConfigError(f"{name!r} from {option}; allowed: {allowed}")
        return names

    return read


def _one_of(option: str, known: Collection[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise ConfigError(f"{text!r} from {option}; allowed: {', '.join(known)}")
        return text

    return read


def _run(args: argparse.Namespace) -> int:
    if args.model is not None and args.token_bytes is not None:
        raise TraceError("--model and --token-bytes are both given; allowed: one of them")
    if args.plot is not None:
        call_beside(args.plot, functools.partial(check_plot, args.plot))
    model = None
    if args.model is not None:
        reading = functools.partial(read_model, args.model, args.kv_dtype)
        model = call_beside(args.model, reading)
    with shown_progress() as show:
        report = _report(args, model, show)
    if args.plot is not None:
        draw(args.plot, report)
    if args.json:
        print_json(as_json(report))
    else:
        print_report(report)
    return 0


@contextlib.contextmanager
def shown_progress() -> Iterator[_Show]:
    """Shows how far the command is, on standard error: a bar on a terminal, else a line from time
    to time, first after `QUIET_SECONDS`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        last = time.monotonic()

        def print_line(name: str, done: float | None) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= QUIET_SECONDS:
                last = now
                share = "" if done is None else f": {100 * done:.0f} %"
                print(f"flexkv plan: {name}{share}", file=sys.stderr, flush=True)

        yield print_line
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def move(name: str, done: float | None) -> None:
            total = None if done is None else 1.0
            bar.update(task, description=name, total=total, completed=done or 0.0)

        yield move


def _report(args: argparse.Namespace, model: ModelCache | None, show: _Show) -> Report:
    how = ReadOptions(args.format, args.block_tokens, args.time_unit, args.sessions_per_hour)
    reading = functools.partial(
        read_trace, args.trace, how, functools.partial(show, "reading the trace")
    )
    read = call_beside(args.trace, reading)
    trace = read.trace
    block_bytes = _block_bytes(read, args.token_bytes, model)
    most_memory, most_disk = args.max_memory_gb, args.max_disk_gb
    if most_memory is not None and not _blocks(most_memory, block_bytes):
        raise TraceError(
            f"'{exact(most_memory)}' from --max-memory-gb is less than a block; allowed: at least "
            f"{size(round(block_bytes))}, in GiB"
        )
    cost = _cost(read, args.prefill_rate, model)
    savings = None
    if cost is not None:
        gib = block_bytes / GIB
        load = LoadCost(gib / args.load_rate, gib / args.disk_rate)
        savings = Savings(cost, load, trace.block_tokens, max(trace.lengths))
    show("one pass for LRU of all sizes", None)
    engine_blocks = _blocks(args.engine_gb, block_bytes)
    curve = LRUCurve(trace, savings, engine_blocks)
    sizing = size_up(
        trace,
        curve,
        savings,
        most_memory=None if most_memory is None else _blocks(most_memory, block_bytes),
        most_disk=None if most_disk is None else _blocks(most_disk, block_bytes),
        drive_writes=args.drive_writes_per_day,
        sizes=[_blocks(each, block_bytes) for each in args.memory_gb],
        engine_blocks=engine_blocks,
        policies=args.policies,
        admissions=args.admissions,
        most_uses=args.replay_blocks,
        settable=functools.partial(_settable, block_bytes),
        progress=lambda name, done: show(f"replaying {name}", done),
    )
    return Report(
        read,
        block_bytes,
        model,
        cost,
        curve,
        sizing,
        most_memory,
        most_disk,
        args.drive_writes_per_day,
    )


def _block_bytes(read: TraceFile, given: float | None, model: ModelCache | None) -> float:
    trace, token_bytes = read.trace, given
    if model is not None:
        token_bytes = model.token_bytes(trace.prompt_tokens / len(trace.requests))
    if token_bytes is not None:
        return token_bytes * trace.block_tokens
    if trace.block_bytes:
        return float(trace.block_bytes)
    raise TraceError(
        f"the trace {trace.name!r} does not say how many bytes a token takes; allowed: --model "
        "with the model's config.json, or --token-bytes"
    )


def _cost(read: TraceFile, rate: float | None, model: ModelCache | None) -> PrefillCost | None:
    trace = read.trace
    if rate is not None:
        # Attention makes a token at this position as costly again as all else.
        even = None if model is None else model.attention_tokens
        tokens = trace.prompt_tokens
        pairs = sum(each.prompt_tokens**2 for each in trace.requests) / 2
        per_token = tokens / rate / (tokens + (pairs / even if even else 0.0))
        source = f"{exact(rate)} tokens a second, as given"
        if even:
            source += f"; attention costs as much as all else at token {even:,.0f}"
        return PrefillCost(per_token, per_token / even if even else 0.0, source)
    if trace.prefill is not None:
        return PrefillCost(*trace.prefill, "as measured where the trace was recorded")
    return None


def _blocks(gib: float, block_bytes: float) -> int:
    # A size that was computed from blocks, and printed, has these blocks.
    return int(gib * GIB / block_bytes + 1e-6)


def _settable(block_bytes: float, blocks: int, most: int | None) -> int:
    found = _blocks(setting_gib(blocks, block_bytes), block_bytes)
    return found if most is None else min(found, most)


COMMAND = Command(
    "plan",
    "replay a trace: what memory, disk and policies would bring",
    __doc__,
    _add_arguments,
    _run,
)
