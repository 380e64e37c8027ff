# SPDX-License-Identifier: Apache-2.0
"""Replay a trace of requests and print hit rate, saved time of prefill and disk writes by gigabytes
of cache; then compare policies and admissions, and name the settings to use. TRACE is Mooncake's
JSONL, a log of vLLM or SGLang with token ids, or a recording of an engine with FlexKV
(FLEXKV_TRACE). No engine, GPU or cache is needed or touched. Exit code 0."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Collection

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from flexkv.cli.common import print_json, size
from flexkv.cli.plan_report import Report, as_json, print_report
from flexkv.eviction import POLICIES
from flexkv.plan import plot
from flexkv.plan.curve import LRUCurve
from flexkv.plan.model import KV_DTYPES, read_model
from flexkv.plan.prefill import PrefillCost
from flexkv.plan.read import AUTO, FORMS, TraceFile, read_trace
from flexkv.plan.sizing import GIB, Limits, size_up
from flexkv.types.admission import ADMISSIONS
from flexkv.types.deadline import call_beside
from flexkv.types.errors import TraceError

NAME = "plan"
HELP = "replay a trace: what memory, disk and policies would bring"

_MOST_GIB = float(1 << 20)
_MOST_TOKENS = 1 << 20
_MOST_RATE = 1e9
_REPLAYED_BLOCKS = 400_000
"""The most blocks to replay by default. All four policies and three admissions take 7 to 13 s of
CPU time for them, and the curve of a million blocks takes a second: measured on two traces of chats
in blocks of 16 tokens, on one core."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    parser.add_argument("trace", metavar="TRACE", help="the trace; may be compressed by gzip")
    parser.add_argument(
        "--format",
        default=AUTO,
        metavar="NAME",
        help=f"format of the trace: {', '.join(FORMS)}; default: {AUTO}, which looks at the file",
    )
    parser.add_argument(
        "--block-tokens",
        metavar="N",
        help="tokens of a block; default: what the trace says, 16 for logs with token ids",
    )
    token = parser.add_argument_group("the size of a token (a recording says it itself)")
    token.add_argument(
        "--model", metavar="PATH", help="config.json of the model, or the directory with it"
    )
    token.add_argument(
        "--kv-dtype",
        default="auto",
        metavar="NAME",
        help=f"dtype of the engine's KV cache: {', '.join(KV_DTYPES)}; default: auto",
    )
    token.add_argument(
        "--token-bytes", metavar="N", help="bytes of a token in the KV cache, over all ranks"
    )
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--memory-gb", metavar="LIST", help="sizes in GiB to show, separated by commas"
    )
    machine.add_argument("--max-memory-gb", metavar="GIB", help="the most memory to name")
    machine.add_argument("--max-disk-gb", metavar="GIB", help="the most disk to name; 0 for none")
    machine.add_argument(
        "--engine-gb",
        metavar="GIB",
        help="the engine's own KV cache (its prefix cache); default: 0. Its hits are not counted",
    )
    machine.add_argument(
        "--prefill-rate",
        metavar="TOKENS",
        help="prompt tokens that the engine computes a second; default: as a recording measured",
    )
    compared = parser.add_argument_group("what is compared")
    compared.add_argument(
        "--policies",
        metavar="LIST",
        help="eviction policies of host memory, separated by commas, or none; "
        f"default: {','.join(POLICIES)}",
    )
    compared.add_argument(
        "--admissions",
        metavar="LIST",
        help="admissions of the disk, separated by commas, or none; "
        f"default: {','.join(ADMISSIONS)}",
    )
    compared.add_argument(
        "--replay-blocks",
        metavar="N",
        help="compare policies and admissions on the first requests with at most N blocks "
        f"together; default: {_REPLAYED_BLOCKS}",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the curves: .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    _one_of("--format", args.format, FORMS)
    _one_of("--kv-dtype", args.kv_dtype, KV_DTYPES)
    block_tokens = _whole("--block-tokens", args.block_tokens, _MOST_TOKENS)
    token_bytes = _number("--token-bytes", args.token_bytes, 1, float(GIB))
    sizes = _sizes(args.memory_gb)
    most_memory = _number("--max-memory-gb", args.max_memory_gb, 0, _MOST_GIB)
    most_disk = _number("--max-disk-gb", args.max_disk_gb, 0, _MOST_GIB)
    engine = _number("--engine-gb", args.engine_gb, 0, _MOST_GIB) or 0.0
    rate = _number("--prefill-rate", args.prefill_rate, 1e-3, _MOST_RATE)
    replayed = _whole("--replay-blocks", args.replay_blocks, 1 << 40) or _REPLAYED_BLOCKS
    policies = list(POLICIES)
    if args.policies is not None:
        policies = _names("--policies", args.policies, POLICIES)
    admissions = _names("--admissions", args.admissions, ADMISSIONS)
    if args.plot is not None:
        call_beside(args.plot, functools.partial(plot.check_plot, args.plot))
    if args.model is not None and token_bytes is not None:
        raise TraceError("--model and --token-bytes are both given; allowed: one of them")
    model = None
    if args.model is not None:
        model = call_beside(args.model, functools.partial(read_model, args.model, args.kv_dtype))
    with _progress() as progress:
        task = progress.add_task("reading the trace", total=None)
        read = call_beside(
            args.trace, functools.partial(read_trace, args.trace, args.format, block_tokens)
        )
        trace = read.trace
        if model is not None:
            mean = trace.prompt_tokens / len(trace.requests)
            token_bytes = model.token_bytes(mean)
        block_bytes = _block_bytes(read, token_bytes)
        if most_memory is not None and not _blocks(most_memory, block_bytes):
            raise TraceError(
                f"{args.max_memory_gb!r} from --max-memory-gb is less than a block; allowed: at "
                f"least {size(round(block_bytes))}, in GiB"
            )
        cost = _cost(read, rate)
        progress.update(task, description="one pass for LRU of all sizes")
        engine_blocks = _blocks(engine, block_bytes)
        curve = LRUCurve(trace, cost, engine_blocks)
        sizing = size_up(
            trace,
            curve,
            cost,
            limits=Limits(
                None if most_memory is None else _blocks(most_memory, block_bytes),
                None if most_disk is None else _blocks(most_disk, block_bytes),
            ),
            sizes=[_blocks(each, block_bytes) for each in sizes],
            engine_blocks=engine_blocks,
            policies=policies,
            admissions=admissions,
            most_replayed=replayed,
            progress=lambda name, done: progress.update(
                task, description=f"replaying {name}", total=1.0, completed=done
            ),
        )
    report = Report(read, block_bytes, model, cost, curve, sizing, most_memory, most_disk)
    if args.plot is not None:
        plot.draw(args.plot, report.curves)
    if args.json:
        print_json(as_json(report))
    else:
        print_report(report)
    return 0


def _block_bytes(read: TraceFile, token_bytes: float | None) -> float:
    if token_bytes is not None:
        return token_bytes * read.trace.block_tokens
    if read.trace.block_bytes:
        return float(read.trace.block_bytes)
    raise TraceError(
        f"the trace {read.trace.name!r} does not say how many bytes a token takes; allowed: "
        "--model with the model's config.json, or --token-bytes"
    )


def _cost(read: TraceFile, rate: float | None) -> PrefillCost | None:
    if rate is not None:
        return PrefillCost(1.0 / rate, 0.0, f"{rate:g} tokens a second, as given")
    if read.trace.prefill is not None:
        return PrefillCost(*read.trace.prefill, "as measured where the trace was recorded")
    return None


def _blocks(gib: float, block_bytes: float) -> int:
    return int(gib * GIB / block_bytes)


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _sizes(text: str | None) -> list[float]:
    if text is None:
        return []
    allowed = f"numbers from 0 to {_MOST_GIB:.0f}, separated by commas"
    found = [_number("--memory-gb", part, 0, _MOST_GIB, allowed) for part in text.split(",")]
    return [each for each in found if each is not None]


def _names(option: str, text: str | None, known: Collection[str]) -> list[str]:
    if text is None:
        return list(known)
    names = [part.strip() for part in text.split(",")]
    if names == ["none"]:
        return []
    for name in names:
        if name not in known or names.count(name) > 1:
            allowed = f"{', '.join(known)}, each once and separated by commas, or none"
            raise TraceError(f"{name!r} from {option}; allowed: {allowed}")
    return names


def _one_of(option: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise TraceError(f"{value!r} from {option}; allowed: {', '.join(known)}")


def _whole(option: str, text: str | None, most: int) -> int | None:
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= most:
        raise TraceError(f"{text!r} from {option}; allowed: a whole number from 1 to {most}")
    return value


def _number(
    option: str, text: str | None, least: float, most: float, allowed: str = ""
) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        allowed = allowed or f"a number from {least:g} to {most:g}"
        raise TraceError(f"{text!r} from {option}; allowed: {allowed}")
    return value
