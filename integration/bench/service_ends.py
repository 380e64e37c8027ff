# SPDX-License-Identifier: Apache-2.0
"""The steps of an engine's scheduler while the service hangs, is killed, and begins again.

A step looks a prompt up, loads it, stores a block for each of 64 requests, and polls. Steps of a
cache of the engine's own take turns with those of the service's, so other load meets both. Of a
step from which another process took the processor, and that did not wait, the CPU time counts.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable

from flexkv.client import Transfer
from flexkv.figures.definitions import BLOCKS as BLOCKS_METRIC
from flexkv.figures.definitions import sample
from flexkv.types.mover import Status
from integration.bench.rows import Goal, Row
from integration.bench.service_calls import (
    BLOCKS,
    REQUESTS,
    STEP_SECONDS,
    Side,
    embedded,
    new_keys,
    served,
    stored,
)
from integration.bench.service_process import ServiceProcess

_BEFORE_SECONDS, _STOPPED_SECONDS, _KILLED_SECONDS, _AFTER_SECONDS = 10.0, 10.0, 5.0, 15.0
_MILLISECONDS = 1e3


class _Steps:
    """Of one side.

    Args:
        side: the cache.
        keys: of the prompt that each step loads.
    """

    def __init__(self, side: Side, keys: list[bytes]) -> None:
        self._side = side
        self._keys = keys
        self.seconds: list[float] = []
        self.with_preemption: list[float] = []
        self.hits: list[bool] = []
        self.waits = 0

    def step(self) -> None:
        """Make one, and measure how long it takes."""
        cache, new = self._side.cache, new_keys(REQUESTS)
        before = resource.getrusage(resource.RUSAGE_THREAD)
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        found = cache.lookup(self._keys)
        load = cache.load(self._keys)
        store = cache.store(new, range(REQUESTS), range(REQUESTS))
        cache.poll()
        seconds, cpu = time.perf_counter() - begun, time.thread_time() - cpu_begun
        after = resource.getrusage(resource.RUSAGE_THREAD)
        waits = after.ru_nvcsw - before.ru_nvcsw
        self.waits += waits
        self.with_preemption.append(seconds)
        is_preempted = after.ru_nivcsw > before.ru_nivcsw
        self.seconds.append(cpu if is_preempted and not waits else seconds)
        self.hits.append(found == BLOCKS and load is not None)
        self._end(load)
        self._end(store)

    def _end(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            self._side.arena.board.report(transfer.cell, 0, Status.DONE)


def end_rows(say: Callable[[str], None]) -> list[Row]:
    """How long steps take, and what is found, whatever the service does."""
    with embedded() as own, served(1) as (service, (one,)):
        keys = stored(own)
        stored(one, keys)
        mine, theirs = _Steps(own, keys), _Steps(one, keys)
        rows = []

        def go_on(seconds: float) -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                mine.step()
                theirs.step()
                time.sleep(STEP_SECONDS)

        say("service: undisturbed")
        go_on(_BEFORE_SECONDS)
        rows += _rows("it is undisturbed", mine, theirs)
        say("service: stopped")
        service.stop()
        go_on(_STOPPED_SECONDS)
        service.go_on()
        go_on(1.0)
        rows += _rows("it is stopped for 10 s", mine, theirs)
        say("service: killed, and started again")
        ready = _ready(service)
        service.kill()
        go_on(_KILLED_SECONDS)
        rows += _rows("it is gone", mine, theirs)
        service.start()
        go_on(_AFTER_SECONDS)
        rows += _rows("it begins again", mine, theirs)
        rows.append(
            Row(
                "service: ready blocks after a restart, with a living engine ÷ before",
                _ready(service) / ready,
                "ratio",
                Goal(">=", 0.99),
                f"{ready:,.0f} blocks before",
            )
        )
    return rows


def _ready(service: ServiceProcess) -> float:
    return service.pool.figures[sample(BLOCKS_METRIC.name, "host")]


def _rows(when: str, mine: _Steps, theirs: _Steps) -> list[Row]:
    own, other = ([each * _MILLISECONDS for each in side.seconds] for side in (mine, theirs))
    p999 = statistics.quantiles(own, n=1000, method="inclusive")[-1]
    rows = [
        Row(
            f"service: longest step while {when} - embedded's p99.9",
            max(other) - p999,
            "ms",
            Goal("<=", 1.0),
            f"{len(other):,} steps of each: served median {statistics.median(other):.2f}, longest "
            f"{max(other):.2f}; embedded median {statistics.median(own):.2f}, p99.9 {p999:.2f}, "
            f"longest {max(own):.2f}; with the time that other processes took, the longest are "
            f"{_longest(theirs)} and {_longest(mine)}",
            {"own": own, "served": other},
            "ms",
        ),
        Row(
            f"service: steps that wait while {when}",
            theirs.waits,
            "times",
            Goal("<=", 0),
            f"embedded {mine.waits}; a step waits if its thread gives the processor up by itself",
        ),
        Row(
            f"service: host hits while {when}",
            statistics.mean(theirs.hits),
            "share",
            Goal(">=", 1.0),
            f"of {len(theirs.hits):,} lookups and loads of 1,312 blocks",
        ),
    ]
    for side in (mine, theirs):
        side.seconds.clear()
        side.with_preemption.clear()
        side.waits = 0
        side.hits.clear()
    return rows


def _longest(steps: _Steps) -> str:
    return f"{max(steps.with_preemption) * _MILLISECONDS:.2f} ms"
