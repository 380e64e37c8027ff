# SPDX-License-Identifier: Apache-2.0
"""Replay a trace of requests and print hit rate, saved time of prefill and disk writes by gigabytes
of cache; then compare policies and admissions, and name the settings to use. TRACE is JSONL as of
Mooncake or Qwen-Bailian, a log of vLLM or SGLang with token ids, or a recording of an engine with
FlexKV (FLEXKV_TRACE). No engine, GPU or cache is needed or touched. Exit code 0."""

from __future__ import annotations

import argparse
import functools

from flexkv.cli import plan_options
from flexkv.cli.common import Command, print_json
from flexkv.cli.plan_options import Options, read_options
from flexkv.cli.plan_progress import ProgressShown
from flexkv.cli.plan_report import Report, as_json, print_report, setting_gib
from flexkv.plan import plot
from flexkv.plan.curve import LRUCurve
from flexkv.plan.model import ModelCache, read_model
from flexkv.plan.read import ReadOptions, TraceFile, read_trace
from flexkv.plan.saving import LoadCost, PrefillCost, Savings
from flexkv.plan.sizing import GIB, Limits, size_up
from flexkv.types.deadline import call_beside
from flexkv.types.errors import TraceError
from flexkv.types.texts import exact, size


def _run(args: argparse.Namespace) -> int:
    options = read_options(args)
    if options.plot is not None:
        call_beside(options.plot, functools.partial(plot.check_plot, options.plot))
    model = None
    if options.model is not None:
        reading = functools.partial(read_model, options.model, options.kv_dtype)
        model = call_beside(options.model, reading)
    with ProgressShown() as progress:
        report = _report(options, model, progress)
    if options.plot is not None:
        plot.draw(options.plot, report.curves)
    if options.json:
        print_json(as_json(report))
    else:
        print_report(report)
    return 0


def _report(options: Options, model: ModelCache | None, progress: ProgressShown) -> Report:
    how = ReadOptions(
        options.form, options.block_tokens, options.time_unit, options.sessions_per_hour
    )
    reading = functools.partial(
        read_trace, options.trace, how, functools.partial(progress.show, "reading the trace")
    )
    read = call_beside(options.trace, reading)
    trace = read.trace
    block_bytes = _block_bytes(read, options, model)
    most_memory = options.most_memory
    if most_memory is not None and not _blocks(most_memory, block_bytes):
        raise TraceError(
            f"'{exact(most_memory)}' from --max-memory-gb is less than a block; allowed: at least "
            f"{size(round(block_bytes))}, in GiB"
        )
    cost = _cost(read, options.prefill_rate, model)
    savings = None
    if cost is not None:
        gib = block_bytes / GIB
        load = LoadCost(gib / options.load_rate, gib / options.disk_rate)
        longest = max(len(each.blocks) + len(each.answer) for each in trace.requests)
        savings = Savings(cost, load, trace.block_tokens, longest)
    progress.show("one pass for LRU of all sizes", None)
    engine_blocks = _blocks(options.engine, block_bytes)
    curve = LRUCurve(trace, savings, engine_blocks)
    most_disk = options.most_disk
    sizing = size_up(
        trace,
        curve,
        savings,
        limits=Limits(
            None if most_memory is None else _blocks(most_memory, block_bytes),
            None if most_disk is None else _blocks(most_disk, block_bytes),
            options.drive_writes,
        ),
        sizes=[_blocks(each, block_bytes) for each in options.sizes],
        engine_blocks=engine_blocks,
        policies=options.policies,
        admissions=options.admissions,
        most_uses=options.most_uses,
        settable=functools.partial(_settable, block_bytes),
        progress=lambda name, done: progress.show(f"replaying {name}", done),
    )
    return Report(
        read, block_bytes, model, cost, curve, sizing, most_memory, most_disk, options.drive_writes
    )


def _block_bytes(read: TraceFile, options: Options, model: ModelCache | None) -> float:
    trace, token_bytes = read.trace, options.token_bytes
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
    plan_options.add_arguments,
    _run,
)
