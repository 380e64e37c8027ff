# SPDX-License-Identifier: Apache-2.0
"""The service's CPU while eight engines have prompts that only the disk has."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from flexkv.client import FetchId
from integration.bench.rows import Goal, Row
from integration.bench.service_calls import BLOCKS, ENGINES, Side, prompts_on_disk, served
from integration.bench.service_process import ServiceProcess
from packages.flexkv.tests.service.served import Scheduler

_PROMPTS = 32
"""More than memory holds, and fewer than the disk does."""
_EACH_SECOND = 2
"""Prompts of each engine."""
_SECONDS = 15.0
_STEP_SECONDS = 0.01


class _Engine:
    """Fetches and loads one prompt after the other."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._keys: Sequence[bytes] = ()
        self._fetch: FetchId | None = None
        self.waiting: deque[Sequence[bytes]] = deque()
        self.fetched = self.loaded = self.done = 0

    def step(self) -> None:
        """As a step of its scheduler."""
        cache = self._side.cache
        cache.poll()
        if not self._keys and self.waiting:
            self._keys = self.waiting.popleft()
            self._fetch = cache.fetch(self._keys)
        if not self._keys:
            return
        if self._fetch is not None:
            if not cache.fetch_state(self._fetch).done:
                return
            self.fetched += cache.fetch_state(self._fetch).arrived
        found = self._keys[: cache.lookup(self._keys)]
        if found:
            self._side.load(found)
            self.loaded += len(found)
        if self._fetch is not None:
            cache.end_fetch(self._fetch)
        cache.record(found, prompt=self._keys)
        self._fetch, self._keys = None, ()
        self.done += 1


def load_row(say: Callable[[str], None]) -> Row:
    """CPU of all threads of the service."""
    say(f"service: {ENGINES} engines with prompts from disk")
    with served(1, disk=True) as (service, sides):
        prompts = prompts_on_disk(sides[0], _PROMPTS)
        others = [Scheduler(service.root, step_blocks=1) for _ in range(ENGINES - 1)]
        sides += [Side(each.cache, each.arena) for each in others]
        row = _measured(service, [_Engine(side) for side in sides], prompts)
        for each in others:
            each.close()
        return row


def _measured(
    service: ServiceProcess, engines: Sequence[_Engine], prompts: Sequence[list[bytes]]
) -> Row:
    begun, before, sent = time.monotonic(), service.cpu_seconds, 0
    while (now := time.monotonic()) - begun < _SECONDS:
        # All engines have a prompt at once: the worst case.
        while sent < (now - begun) * _EACH_SECOND * len(engines):
            engines[sent % len(engines)].waiting.append(prompts[sent % len(prompts)])
            sent += 1
        for engine in engines:
            engine.step()
        time.sleep(_STEP_SECONDS)
    seconds, spent = time.monotonic() - begun, service.cpu_seconds - before
    done, fetched, loaded = (
        sum(getattr(each, name) for each in engines) for name in ("done", "fetched", "loaded")
    )
    return Row(
        f"service: CPU with {ENGINES} engines, each {_EACH_SECOND} prompts of 1,312 disk blocks a "
        "second",
        spent / done * _EACH_SECOND * len(engines),
        "cores",
        Goal("<=", 0.5),
        f"CPU of a prompt, {spent / done * 1e3:.1f} ms, times {_EACH_SECOND * len(engines)}; "
        f"{done / seconds:.1f} of {sent / seconds:.1f} prompts a second ended; {loaded:,} of "
        f"{done * BLOCKS:,} blocks loaded, {fetched:,} of them by fetches, in blocks of 4 KiB",
    )
