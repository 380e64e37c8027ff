# SPDX-License-Identifier: Apache-2.0
"""Returning conversations in an engine that is busy with prefill, on cores that others use too.

Three long prompts are always in the queue, and a process for each core computes beside the engine.
What FlexKV measures then is slow and irregular; it must go on loading hits, and load them when all
is quiet again. Every conversation that may be loaded returns together with one that may not, so
that both wait in the same queue, and the two are compared. An engine that loads always and one with
the defaults take turns.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from statistics import median
from typing import Any

from integration.bench.rows import Goal, Row, milliseconds, ratio_row
from integration.bench.setup import Bench
from integration.harness.answers import Completion, Generation
from integration.harness.checkpoint import BENCH
from integration.harness.engine import Engine
from integration.harness.prompts import random_tokens

QUEUED = 3
LONG = 2048
CONVERSATION = 1024
NEW_TOKENS = 64
IDLE_HIT = 8190
DEFAULT, ALWAYS, NEVER = "default", "always_load", "never"

Pairs = dict[str, list[tuple[Completion, Completion]]]
"""For each way to start an engine what it answered: loaded as it chooses, and computed."""

_NUMBERS = itertools.count()


def saturated_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """Rows for conversations under pressure, and for hits once that is over."""
    busy: Pairs = defaultdict(list)
    idle: Pairs = defaultdict(list)
    for start in range(1, bench.pairs + 1):
        for kind, settings in ((DEFAULT, {}), (ALWAYS, {"always_load": True})):
            say(f"start {start} of {bench.pairs}: an engine with {settings or 'the defaults'}")
            with bench.engine(bench.flexkv(**settings)) as engine:
                busy[kind] += _converse(bench, engine)
                idle[kind] += _rest(bench, engine)
    saturated = f"of {CONVERSATION:,} tokens, engine saturated"
    rested = f"of {IDLE_HIT:,} tokens, idle afterwards"
    return [
        _against_the_better(saturated, busy),
        # While steps are full, the defaults load only what gains more than the load's own delay.
        _loaded(saturated, busy[DEFAULT], CONVERSATION, None),
        ratio_row(
            f"TTFT of host hits {rested}, default ÷ {ALWAYS}",
            Goal("<=", 1.05),
            (DEFAULT, [ours.ttft for ours, _ in idle[DEFAULT]]),
            (ALWAYS, [ours.ttft for ours, _ in idle[ALWAYS]]),
        ),
        ratio_row(
            f"TTFT of host hits {rested}, default ÷ computed",
            None,
            (DEFAULT, [ours.ttft for ours, _ in idle[DEFAULT]]),
            (NEVER, [computed.ttft for _, computed in idle[DEFAULT]]),
        ),
        _loaded(rested, idle[DEFAULT], IDLE_HIT, Goal(">=", 1.0)),
    ]


def _converse(bench: Bench, engine: Engine) -> list[tuple[Completion, Completion]]:
    """Conversations return, two at a time, one of which is not loaded."""
    known = [bench.fresh_prompt(CONVERSATION) for _ in range(2 * bench.samples)]
    for prompt in known:
        engine.generate(prompt, max_tokens=1)
    engine.reset_prefix_cache()
    pairs = []
    with _busy_cores(), _full_queue(engine):
        for number in range(0, len(known), 2):
            may_load = [True, False] if number % 4 else [False, True]
            returning = {
                may: _submit(engine, prompt + bench.fresh_prompt(NEW_TOKENS), may)
                for prompt, may in zip(known[number : number + 2], may_load, strict=True)
            }
            pairs.append((returning[True].result(), returning[False].result()))
    return pairs


def _rest(bench: Bench, engine: Engine) -> list[tuple[Completion, Completion]]:
    """Hits one after the other, after what was measured under pressure."""
    prompt = bench.fresh_prompt(IDLE_HIT)
    engine.generate(prompt, max_tokens=1)
    pairs = []
    for _ in range(bench.samples):
        answers = []
        for may_load in (True, False):
            engine.reset_prefix_cache()
            answers.append(_submit(engine, prompt, may_load).result())
        pairs.append((answers[0], answers[1]))
    return pairs


def _submit(engine: Engine, prompt: list[int], may_load: bool) -> Generation:
    params = None if may_load else {"flexkv.load": False}
    return engine.submit(prompt, max_tokens=1, transfer_params=params)


@contextlib.contextmanager
def _full_queue(engine: Engine) -> Iterator[None]:
    """Long prompts are always queued: for each that ends another comes."""
    over = threading.Event()

    def keep_full() -> None:
        running: set[Future[Any]] = set()
        while not over.is_set():
            while len(running) < QUEUED:
                prompt = random_tokens(f"queued {next(_NUMBERS)}", LONG, BENCH.vocab)
                running.add(engine.submit(prompt, max_tokens=1).future)
            _, running = wait(running, return_when=FIRST_COMPLETED)
        wait(running)

    feeder = threading.Thread(target=keep_full, name="full-queue")
    feeder.start()
    try:
        yield
    finally:
        over.set()
        feeder.join()


@contextlib.contextmanager
def _busy_cores() -> Iterator[None]:
    """A process for each core computes, without an end."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _against_the_better(what: str, pairs: Pairs) -> Row:
    """How much longer the defaults take than the better of loading always and never.

    Engines differ by their neighbours on the machine, so each is compared with what it computed
    beside, which arrived at the same time.
    """
    ratios = {
        kind: [ours.ttft / computed.ttft for ours, computed in answers]
        for kind, answers in pairs.items()
    }
    default, always = median(ratios[DEFAULT]), median(ratios[ALWAYS])
    seconds = median(computed.ttft for _, computed in pairs[DEFAULT])
    return Row(
        what=f"TTFT of host hits {what}, default ÷ the better of loading always and never",
        value=default / min(always, 1.0),
        unit="ratio",
        goal=Goal("<=", 1.05),
        detail=(
            f"medians of pairs: {DEFAULT} ÷ computed {default:.3f}, {ALWAYS} ÷ computed "
            f"{always:.3f}; computed {milliseconds(seconds)}"
        ),
        samples=ratios,
        unit_of_samples="ratio",
    )


def _loaded(
    what: str, pairs: list[tuple[Completion, Completion]], length: int, goal: Goal | None
) -> Row:
    loaded = [(ours.cached_tokens or 0) >= 0.9 * length for ours, _ in pairs]
    return Row(
        what=f"host hits {what}, that are loaded",
        value=sum(loaded) / len(loaded),
        unit="share",
        goal=goal,
        detail=f"{sum(loaded)} of {len(loaded)}",
    )
