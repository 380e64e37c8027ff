# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with a batch of long prompts, new and seen before: with FlexKV, without a connector,
with vLLM's own OffloadingConnector and with LMCache."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from integration.bench.rows import Goal, Row, ratio_row
from integration.gpu import goals
from integration.gpu.results import Log
from integration.gpu.serving_batches import (
    FLEXKV,
    FULL,
    LMCACHE,
    NATIVE,
    NEW,
    NONE,
    QUICK,
    SEEN,
    Batch,
    Batches,
    Workload,
    measure,
)
from integration.gpu.timing import median_row
from integration.harness import connector

_PROMPTS = {NEW: "new", SEEN: "seen before"}


def serving_rows(quick: bool, log: Log) -> Iterator[Row]:
    """All rows, or none and the reason where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        log.note("vLLM is not installed: not measured")
        return
    load = QUICK if quick else FULL
    contenders = {
        NONE: connector.NONE,
        FLEXKV: connector.plugin(cpu_cache_gb=load.gigabytes),
        NATIVE: connector.native_offloading(load.gigabytes),
    }
    if importlib.util.find_spec("lmcache") is None:
        log.note("LMCache is not installed: not measured")
    else:
        contenders[LMCACHE] = connector.lmcache(load.gigabytes)
    with tempfile.TemporaryDirectory(prefix="flexkv-serving-") as folder:
        yield from rows(load, measure(load, contenders, Path(folder), log))


def rows(load: Workload, measured: Iterator[tuple[str, Batches]]) -> Iterator[Row]:
    """Figures of each contender as soon as it was measured, and FlexKV against each other one."""
    what = f"batch of {load.batch}, {load.prompt_tokens:,} tokens in, {load.new_tokens:,} out"
    for name, batches in measured:
        for kind in (NEW, SEEN):
            if (name, kind) in batches:
                yield from _figures(load, name, kind, batches[name, kind], what)
        if name == FLEXKV:
            yield from _against_none(load, batches, what)
        elif name != NONE:
            yield from _against_peer(load, name, batches, what)


def _figures(load: Workload, name: str, kind: str, found: list[Batch], what: str) -> Iterator[Row]:
    side = f"{name}, prompts {_PROMPTS[kind]}, {what}"
    yield median_row(f"TTFT of {side}", None, [1e3 * batch.ttft for batch in found], "ms", "")
    yield median_row(f"TPOT of {side}", None, [1e3 * batch.tpot for batch in found], "ms", "")
    rates = _per_minute(load, found)
    yield median_row(f"requests a minute of {side}", None, rates, "a minute", "")


def _against_none(load: Workload, batches: Batches, what: str) -> Iterator[Row]:
    computed = batches[NONE, NEW]
    for kind, ttft, rate in ((SEEN, goals.WARM_TTFT, goals.WARM_RATE), (NEW, None, None)):
        ours = batches[FLEXKV, kind]
        side = f"prompts {_PROMPTS[kind]} ÷ {NONE}, {what}"
        yield _ttft_row(f"TTFT of {side}", ttft, NONE, ours, computed)
        yield _rate_row(f"requests a minute of {side}", rate, load, NONE, ours, computed)


def _against_peer(load: Workload, peer: str, batches: Batches, what: str) -> Iterator[Row]:
    no_worse = Goal("<=", 1.0), Goal(">=", 1.0)
    for kind, (ttft, rate) in ((SEEN, (goals.PEER_TTFT, goals.PEER_RATE)), (NEW, no_worse)):
        ours, theirs = batches[FLEXKV, kind], batches[peer, kind]
        side = f"prompts {_PROMPTS[kind]} ÷ {peer}, {what}"
        yield _ttft_row(f"TTFT of {side}", ttft, peer, ours, theirs)
        yield ratio_row(
            f"TPOT of {side}",
            Goal("<=", 1.0),
            (FLEXKV, [batch.tpot for batch in ours]),
            (peer, [batch.tpot for batch in theirs]),
        )
        yield _rate_row(f"requests a minute of {side}", rate, load, peer, ours, theirs)


def _ttft_row(
    what: str, goal: Goal | None, name: str, ours: list[Batch], theirs: list[Batch]
) -> Row:
    first = (FLEXKV, [batch.ttft for batch in ours])
    return ratio_row(what, goal, first, (name, [batch.ttft for batch in theirs]))


def _rate_row(  # noqa: PLR0917
    what: str,
    goal: Goal | None,
    load: Workload,
    name: str,
    ours: list[Batch],
    theirs: list[Batch],
) -> Row:
    by_name = {FLEXKV: _per_minute(load, ours), name: _per_minute(load, theirs)}
    first, second = (statistics.median(rates) for rates in by_name.values())
    return Row(
        what=what,
        value=first / second,
        unit="ratio",
        goal=goal,
        detail=f"{FLEXKV} {first:.4g} ÷ {name} {second:.4g}",
        samples=by_name,
        unit_of_samples="requests a minute",
    )


def _per_minute(load: Workload, found: list[Batch]) -> list[float]:
    return [60 * load.batch / batch.seconds for batch in found]
