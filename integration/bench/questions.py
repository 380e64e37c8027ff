# SPDX-License-Identifier: Apache-2.0
"""Questions to a shared store under load: how many requests hit, and how long they wait.

The store is one in memory whose calls take a given time, however many questions they have. Each
request is for another block, which the store has. No engine runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from flexkv import KVCache
from flexkv.client import FetchId
from flexkv.eviction import LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.epochs import Epoch
from flexkv.tiers.job import Outcome
from flexkv.tiers.questions import CALLS, Found
from flexkv.tiers.remote import NamedQuestion, OpenStore, RemoteLimits, RemoteTier
from flexkv.types.admission import ADMISSIONS
from flexkv.types.changes import Medium
from integration.bench.rows import Goal, Row, milliseconds

CALL_SECONDS = 0.06
DEADLINE_SECONDS = 0.2
CAPACITY = CALLS / CALL_SECONDS
"""Questions a second, if each had a call of its own."""
LOADS = (0.25, 1, 2, 4)
"""Requests a second, as multiples of the capacity."""
LOAD_SECONDS = 10.0
BURST = 128
BURST_CALL_SECONDS = 0.03
BURST_DEADLINE_SECONDS = 0.05
OUTAGE_SECONDS = 60.0
TIMEOUT_SECONDS = 5.0
OUTAGE_RATE = 20.0
_SLOT = 4096
_SLOTS = 4096
_STEP_SECONDS = 0.002
Say = Callable[[str], None]


class PacedStore:
    """A `flexkv.tiers.remote.BlockStore` and its record. It has every block, until it is gone.

    Attributes:
        seconds: that a call of `find` takes.
        gone: whether calls fail after `TIMEOUT_SECONDS`.
    """

    prefix = "paced"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.gone = False
        self._record = Epoch.first().to_bytes()

    def register(self, address: int, size: int) -> None:
        """Do nothing."""

    def open(self) -> None:
        """Do nothing."""

    def read(self) -> bytes:
        return self._record

    def create(self, record: bytes) -> None:
        """Do nothing."""

    def replace(self, record: bytes) -> None:
        self._record = record

    def find(
        self, questions: Sequence[NamedQuestion], answer: Callable[[int, Found], None]
    ) -> None:
        if self.gone:
            time.sleep(TIMEOUT_SECONDS)
            raise ConnectionError("the store is gone")
        time.sleep(self.seconds)
        for number, question in enumerate(questions):
            answer(number, [True] * sum(map(len, question)))

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Outcome]:
        return [Outcome.DONE] * len(names)

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Outcome]:
        return [Outcome.DONE] * len(names)

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Request:
    """Times are in seconds since the first request."""

    came: float
    fetch: FetchId | None
    hit: bool = False
    waited: float = 0.0


@dataclass(slots=True)
class _Engine:
    """What an engine does with the cache: requests come, and each step polls."""

    cache: KVCache
    requests: list[_Request] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _waiting: list[_Request] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def come(self) -> None:
        """A request for a block that nobody has asked for."""
        key = b"block %026d" % next(self._numbers)
        request = _Request(self.now, self.cache.fetch([key]))
        self.requests.append(request)
        self._waiting.append(request)

    def step(self) -> None:
        self.cache.poll()
        for request in list(self._waiting):
            fetch = request.fetch
            if fetch is not None and not self.cache.fetch_state(fetch).done:
                continue
            request.waited = self.now - request.came
            if fetch is not None:
                request.hit = self.cache.end_fetch(fetch).arrived == 1
            self._waiting.remove(request)

    def run(self, rate: float, until: float) -> None:
        """Requests at this rate a second, until that time."""
        due = self.now
        while self.now < until:
            while due <= self.now:
                self.come()
                due += 1 / rate
            self.step()
            time.sleep(_STEP_SECONDS)

    def finish(self) -> None:
        """Steps until no request waits."""
        while self._waiting:
            self.step()
            time.sleep(_STEP_SECONDS)


@contextmanager
def _engine(store: PacedStore, deadline: float) -> Iterator[_Engine]:
    arena = Arena.create(ArenaSpec(BlockFormat(1, (_SLOT,)), _SLOTS), threads=1)
    limits = RemoteLimits(deadline, TIMEOUT_SECONDS)
    opened = OpenStore(store, store, limits, "objects")
    tier = RemoteTier(Medium.OBJECTS, opened, "0" * 32, _SLOT)
    cache = KVCache(arena, LRUPolicy(), [AttachedTier(tier, ADMISSIONS["second_hit"])])
    yield _Engine(cache)
    cache.close()
    arena.close()


def question_rows(say: Say) -> list[Row]:
    """Rows for each load, for a burst, and for an outage."""
    rows = []
    for load in LOADS:
        rate = load * CAPACITY
        say(f"questions: {rate:.0f} requests a second")
        with _engine(PacedStore(CALL_SECONDS), DEADLINE_SECONDS) as engine:
            engine.run(rate, LOAD_SECONDS)
            engine.finish()
            what = f"hits at {rate:.0f} requests a second, {load:g} times what single calls answer"
            rows.append(_hit_row(what, engine.requests))
    say("questions: a burst")
    with _engine(PacedStore(BURST_CALL_SECONDS), BURST_DEADLINE_SECONDS) as engine:
        for _ in range(BURST):
            engine.come()
        engine.finish()
        rows.append(_hit_row(f"hits of {BURST} requests at once", engine.requests))
    say("questions: an outage")
    return [*rows, *_outage_rows()]


def _outage_rows() -> list[Row]:
    store = PacedStore(BURST_CALL_SECONDS)
    store.gone = True
    with _engine(store, BURST_DEADLINE_SECONDS) as engine:
        engine.run(OUTAGE_RATE, OUTAGE_SECONDS)
        engine.finish()
        outage = engine.requests[:]
        store.gone = False
        ended = engine.now
        while not any(request.hit for request in engine.requests):
            engine.run(OUTAGE_RATE, engine.now + 0.5)
        first = next(request for request in engine.requests if request.hit)
        engine.finish()
    waits = [request.waited for request in outage]
    rate = f"{OUTAGE_RATE:g} requests a second"
    return [
        Row(
            what=f"first hit after an outage of {OUTAGE_SECONDS:g} s, {rate}",
            value=first.came + first.waited - ended,
            unit="s",
            goal=Goal("<=", 6.0),
            detail="the circuit tries the store every 5 s",
        ),
        Row(
            what=f"mean wait of a request during that outage, {rate}",
            value=statistics.mean(waits) * 1e3,
            unit="ms",
            goal=Goal("<=", 5.0),
            detail=f"longest {milliseconds(max(waits))}, {len(waits)} requests",
            samples={"waits": waits},
        ),
    ]


def _hit_row(what: str, requests: Sequence[_Request]) -> Row:
    waits = sorted(request.waited for request in requests)
    hits = sum(request.hit for request in requests)
    return Row(
        what=what,
        value=hits / len(requests),
        unit="ratio",
        goal=Goal(">=", 0.99),
        detail=(
            f"{hits} of {len(requests)}; wait {milliseconds(statistics.mean(waits))}, 99th "
            f"percentile {milliseconds(waits[len(waits) * 99 // 100])}"
        ),
        samples={"waits": waits},
    )
