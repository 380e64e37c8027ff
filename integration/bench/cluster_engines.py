# SPDX-License-Identifier: Apache-2.0
"""Shared stores below real engines: what they cost requests that find nothing, and what hits take.

All engines of a comparison live at the same time and answer one after another, in turns, so that a
drift of the machine hits all of them. The stores run on the same cores as the engines.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from integration.bench.cluster import Say, start_node
from integration.bench.rows import Goal, Row, milliseconds, ratio_row
from integration.bench.setup import Bench
from integration.harness import connector
from integration.harness.cores import keep_on
from integration.harness.engine import Engine
from integration.harness.mooncake_lender import MooncakeLender
from integration.harness.mooncake_master import MooncakeMaster
from integration.harness.s3_server import BUCKET, S3Server
from integration.harness.store_process import StoreProcess

MISS_LENGTH = 4090
HIT_LENGTHS = (4090, 8190)
TOKEN_BYTES = 4096
BLOCK_TOKENS = 128
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
"""Of the bench model."""
SEGMENT_GB = 3.0
ARENA_GB = 0.5
PATIENCE = {"mooncake_question_seconds": 0.25}
"""A late answer is a miss. What is measured is how long a hit takes, and not how often it becomes a
miss where stores and engines share their cores."""
TO_OPEN = 24
"""Requests after which the circuit of a store that is gone is open: it takes 16 failures."""
SHORT = 300

PLAIN, ALONE, MOONCAKE, OBJECTS = "no FlexKV", "no shared store", "Mooncake", "S3"
_PREFIX = "cache"
_QUIET_SECONDS = 0.5
_LATE_SECONDS = 120.0

Samples = dict[tuple[str, str, int], list[float]]


@dataclass(frozen=True, slots=True)
class _Side:
    """An engine of a comparison; `stored` counts what its store has got, and grows no more when
    nothing is being written."""

    name: str
    engine: Engine
    stored: Callable[[], int]

    def settle(self) -> None:
        """Wait until nothing more is written to the store."""
        late = time.monotonic() + _LATE_SECONDS
        held = -1
        while held != (held := self.stored()):
            if time.monotonic() > late:
                raise RuntimeError(f"{self.name} gets blocks without an end")
            time.sleep(_QUIET_SECONDS)


def cluster_engine_rows(bench: Bench, say: Say) -> list[Row]:
    """All rows about shared stores below engines."""
    samples: Samples = defaultdict(list)
    for pair in range(1, bench.pairs + 1):
        say(f"start {pair} of {bench.pairs}: engines with and without shared stores")
        _measure_misses(bench, samples)
        say(f"start {pair} of {bench.pairs}: two nodes")
        _measure_hits(bench, samples)
    return [*_cost_rows(samples), *_hit_rows(samples)]


def _measure_misses(bench: Bench, samples: Samples) -> None:
    """Prompts that nobody knows: with stores that answer, then with stores that are gone."""
    with (
        MooncakeMaster(segment_gb=SEGMENT_GB) as master,
        S3Server() as server,
        contextlib.ExitStack() as started,
    ):
        lender = started.enter_context(MooncakeLender(master.settings))
        mooncake = _flexkv(bench, MOONCAKE, **master.settings | {"mooncake_segment_gb": 0})
        objects = _flexkv(bench, OBJECTS, objects_url=f"s3://{BUCKET}/{_PREFIX}")
        objects.env.update(server.environ)

        def start(name: str, chosen: connector.Connector, stored: Callable[[], int]) -> _Side:
            return _Side(name, started.enter_context(bench.engine(chosen, forked=True)), stored)

        shared = [
            start(MOONCAKE, mooncake, lambda: master.metric("key_count")),
            start(OBJECTS, objects, lambda: server.requests("PUT", f"{_PREFIX}/blocks/")),
        ]
        others = [
            start(PLAIN, connector.NONE, int),
            start(ALONE, _flexkv(bench, ALONE), int),
        ]
        _take_turns(bench, [*others, *shared], "answers", samples)
        engines = [side.engine for side in (*others, *shared)]
        with _apart(engines, [master, lender, server]) as are_apart:
            if are_apart:
                _take_turns(bench, [*others, *shared], "apart", samples)
        master.kill()
        server.kill()
        for side in shared:
            for _ in range(TO_OPEN):
                side.engine.generate(bench.fresh_prompt(SHORT), max_tokens=1)
            _expect_open(side)
        alone = [_Side(side.name, side.engine, int) for side in shared]
        _take_turns(bench, [*others, *alone], "is gone", samples)
        for side in shared:
            _expect_open(side)


@contextlib.contextmanager
def _apart(engines: Sequence[Engine], stores: Sequence[StoreProcess]) -> Iterator[bool]:
    """Keep the last core for stores and this process, and the others for engines, so that engines
    share no processor time with the stores. False if there is one core only."""
    cores = os.sched_getaffinity(0)
    last = {max(cores)}
    if cores == last:
        yield False
        return
    behind = [os.getpid(), *(store.pid for store in stores)]
    before = [pid for engine in engines for pid in engine.pids()]
    keep_on(before, cores - last)
    keep_on(behind, last)
    yield True
    keep_on([*before, *behind], cores)


def _take_turns(bench: Bench, sides: list[_Side], state: str, samples: Samples) -> None:
    """A prompt each, in turns; the first round does not count."""
    for sample in range(bench.samples + 1):
        # Each comes first as often as the others.
        first = sample % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            answer = side.engine.generate(bench.fresh_prompt(MISS_LENGTH), max_tokens=1)
            if answer.cached_tokens:
                raise RuntimeError(f"{side.name}: {answer.cached_tokens} tokens were cached")
            if sample:
                samples[side.name, state, MISS_LENGTH].append(answer.ttft)
            side.settle()


def _expect_open(side: _Side) -> None:
    tier = side.name.lower() if side.name == MOONCAKE else "objects"
    labels = {"tier": tier, "direction": "read", "state": "closed"}
    if side.engine.counter("vllm:flexkv_circuits", **labels):
        raise RuntimeError(f"the circuit of {side.name} is closed, though its store is gone")


def _measure_hits(bench: Bench, samples: Samples) -> None:
    """Prompts that one engine computes and another one loads, beside Mooncake's own reads of as
    many bytes. All bytes are in memory that the first engine lends."""
    with (
        MooncakeMaster(segment_gb=SEGMENT_GB) as master,
        bench.engine(_flexkv(bench, "one", **master.settings, **PATIENCE), forked=True) as engine,
        bench.engine(
            _flexkv(bench, "other", **master.settings | PATIENCE | {"mooncake_segment_gb": 0}),
            forked=True,
        ) as other,
        contextlib.ExitStack() as readers,
    ):
        one = _Side("one", engine, lambda: master.metric("key_count"))
        read = {length: _reader(readers, master, length) for length in HIT_LENGTHS}
        for sample in range(bench.samples + 1):
            for length in HIT_LENGTHS:
                prompt = bench.fresh_prompt(length)
                one.engine.generate(prompt, max_tokens=1)
                one.settle()
                before = _hits(other)
                first = other.generate(prompt, max_tokens=1)
                hits = _hits(other) - before
                own = other.generate(prompt, max_tokens=1)
                alone = read[length]()
                if sample:  # the first one warms up
                    samples["hits", "", length].append(hits)
                    samples["first", "", length].append(first.ttft)
                    samples["own", "", length].append(own.ttft)
                    for way, seconds in alone.items():
                        samples["read", way, length].append(seconds)


def _hits(engine: Engine) -> float:
    return engine.counter("vllm:flexkv_hit_tokens", tier="mooncake")


def _reader(
    started: contextlib.ExitStack, master: MooncakeMaster, length: int
) -> Callable[[], dict[str, float]]:
    """What has Mooncake's own client read the bytes of a prompt, in each of its ways; it returns
    the seconds of each."""
    process = started.enter_context(start_node(master, "read", BLOCK_BYTES, length // BLOCK_TOKENS))
    _line(process)
    started.callback(_end, process)

    def read() -> dict[str, float]:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        found: dict[str, float] = json.loads(_line(process))
        return found

    return read


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a node of the benchmark ended with {process.wait()}")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate()


def _flexkv(bench: Bench, name: str, **settings: Any) -> connector.Connector:
    """FlexKV with its defaults, but for the size of the arena and a folder of its own."""
    runtime_dir = str(bench.folder / name.replace(" ", "-"))
    return connector.plugin(
        recompute=True, cpu_cache_gb=ARENA_GB, runtime_dir=runtime_dir, **settings
    )


def _cost_rows(samples: Samples) -> Iterator[Row]:
    def side(name: str, state: str) -> tuple[str, list[float]]:
        return name, samples[name, state, MISS_LENGTH]

    what = f"TTFT at {MISS_LENGTH:,} tokens, all misses"
    for name in (MOONCAKE, OBJECTS):
        yield ratio_row(
            f"{what}, with ÷ without {name} below FlexKV",
            Goal("<=", 1.02),
            side(name, "answers"),
            side(ALONE, "answers"),
        )
        if samples[name, "apart", MISS_LENGTH]:
            yield ratio_row(
                f"{what}, stores on a core of their own, with ÷ without {name} below FlexKV",
                Goal("<=", 1.02),
                side(name, "apart"),
                side(ALONE, "apart"),
            )
        yield ratio_row(
            f"{what}, FlexKV with {name} ÷ no FlexKV",
            None,
            side(name, "answers"),
            side(PLAIN, "answers"),
        )
        yield ratio_row(
            f"{what}, circuit of {name} open ÷ no FlexKV",
            Goal("<=", 1.1),
            side(name, "is gone"),
            side(PLAIN, "is gone"),
        )


def _hit_rows(samples: Samples) -> Iterator[Row]:
    for length in HIT_LENGTHS:
        first, own = (statistics.median(samples[name, "", length]) for name in ("first", "own"))
        ways = {
            way: taken
            for (name, way, at), taken in samples.items()
            if (name, at) == ("read", length)
        }
        way, read = min(
            ((way, statistics.median(taken)) for way, taken in ways.items()),
            key=lambda each: each[1],
        )
        size = length // BLOCK_TOKENS * BLOCK_BYTES
        hits = statistics.median(samples["hits", "", length])
        yield Row(
            what=(
                f"TTFT at {length:,} tokens, first request of another node ÷ "
                "(vLLM's own hit + bytes ÷ Mooncake's own get rate)"
            ),
            value=first / (own + read),
            unit="ratio",
            goal=Goal("<=", 1.2),
            detail=(
                f"{milliseconds(first)} ÷ ({milliseconds(own)} + {milliseconds(read)} at "
                f"{size / read / 1e9:.2f} GB/s in {way}), medians of "
                f"{len(samples['first', '', length])}; {hits:,.0f} tokens came from the other node"
            ),
            samples={name: samples[name, "", length] for name in ("first", "own")}
            | {f"read, {way}": taken for way, taken in ways.items()},
        )
