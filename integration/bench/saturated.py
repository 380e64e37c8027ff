# SPDX-License-Identifier: Apache-2.0
"""Returning conversations in an engine that is busy with prefill, on cores that others use too.

Three long prompts are always in the queue, and a process for each core computes beside the engine.
What FlexKV measures then is slow and irregular; it must go on loading hits, and load them when all
is quiet again. Every conversation that may be loaded returns together with one that may not, so
that both wait in the same queue. An engine that loads always and one with the defaults take turns.
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

from integration.bench.rows import Goal, Row, ratio_row
from integration.bench.setup import Bench
from integration.harness.checkpoint import BENCH
from integration.harness.engine import Completion, Engine, Generation
from integration.harness.prompts import random_tokens

QUEUED = 3
LONG = 2048
CONVERSATION = 1024
NEW_TOKENS = 64
IDLE_HIT = 8192
DEFAULT, ALWAYS, NEVER = "default", "always_load", "never"

Answers = dict[str, list[Completion]]

_NUMBERS = itertools.count()


def saturated_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """Rows for conversations under pressure, and for hits once that is over."""
    busy: Answers = defaultdict(list)
    idle: Answers = defaultdict(list)
    for start in range(1, bench.pairs + 1):
        for kind, settings in ((DEFAULT, {}), (ALWAYS, {"always_load": True})):
            say(f"start {start} of {bench.pairs}: an engine with {settings or 'the defaults'}")
            with bench.engine(bench.flexkv(**settings)) as engine:
                _converse(bench, engine, kind, busy)
                _rest(bench, engine, kind, idle)
    return [
        # While steps are full, the defaults load only what gains more than the load's own delay.
        *_rows(f"of {CONVERSATION:,} tokens, engine saturated", CONVERSATION, busy, None),
        *_rows(f"of {IDLE_HIT:,} tokens, idle afterwards", IDLE_HIT, idle, Goal(">=", 1.0)),
    ]


def _converse(bench: Bench, engine: Engine, kind: str, answers: Answers) -> None:
    """Conversations return, two at a time, one of which is not loaded."""
    known = [bench.fresh_prompt(CONVERSATION) for _ in range(2 * bench.samples)]
    for prompt in known:
        engine.generate(prompt, max_tokens=1)
    engine.reset_prefix_cache()
    with _busy_cores(), _full_queue(engine):
        for number in range(0, len(known), 2):
            modes = [kind, NEVER] if number % 4 else [NEVER, kind]
            returning = [
                _submit(engine, prompt + bench.fresh_prompt(NEW_TOKENS), mode)
                for prompt, mode in zip(known[number : number + 2], modes, strict=True)
            ]
            for generation, mode in zip(returning, modes, strict=True):
                answers[mode].append(generation.result())


def _rest(bench: Bench, engine: Engine, kind: str, answers: Answers) -> None:
    """Hits one after the other, after what was measured under pressure."""
    prompt = bench.fresh_prompt(IDLE_HIT)
    engine.generate(prompt, max_tokens=1)
    for _ in range(bench.samples):
        for mode in (kind, NEVER):
            engine.reset_prefix_cache()
            answers[mode].append(_submit(engine, prompt, mode).result())


def _submit(engine: Engine, prompt: list[int], mode: str) -> Generation:
    params = {"flexkv.load": False} if mode == NEVER else None
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


def _rows(what: str, length: int, answers: Answers, loads: Goal | None) -> list[Row]:
    ttft = {mode: [answer.ttft for answer in answers[mode]] for mode in (DEFAULT, ALWAYS, NEVER)}
    better = min((ALWAYS, NEVER), key=lambda mode: median(ttft[mode]))
    loaded = [(answer.cached_tokens or 0) >= 0.9 * length for answer in answers[DEFAULT]]
    return [
        ratio_row(
            f"TTFT of host hits {what}, default ÷ the better of loading always and never",
            Goal("<=", 1.05),
            (DEFAULT, ttft[DEFAULT]),
            (better, ttft[better]),
        ),
        ratio_row(
            f"TTFT of host hits {what}, default ÷ computed",
            None,
            (DEFAULT, ttft[DEFAULT]),
            (NEVER, ttft[NEVER]),
        ),
        Row(
            what=f"host hits {what}, that are loaded",
            value=sum(loaded) / len(loaded),
            unit="share",
            goal=loads,
            detail=f"{sum(loaded)} of {len(loaded)}",
        ),
    ]
