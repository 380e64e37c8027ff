# SPDX-License-Identifier: Apache-2.0
"""What calls of a cache cost the scheduler's thread: a cache of its own beside the service's.

The service runs in a process of its own. No engine runs: the calls are those that one makes, and
the bytes of blocks are not copied. All arenas are full.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flexkv.cache import KVCache
from flexkv.client import CacheClient, Transfer
from flexkv.eviction import POLICIES
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.types.mover import Status
from flexkv.types.presence import Presence
from integration.bench.rows import Goal, Row
from integration.bench.service_process import ServiceProcess, service_process
from packages.flexkv.tests.service.served import FORMAT, Scheduler, until
from packages.inside import stores_of

BLOCKS = 1312
"""Of a prompt of 20,992 tokens."""
SLOTS = 16 * BLOCKS
REQUESTS = 64
"""That decode: a block of each fills in the step that is measured."""
ENGINES = 8
_REPEATS = 200
_STORES = 80
_PROMPTS = 8
"""That are fetched from a disk."""
STEP_SECONDS = 0.005
"""Between two steps: less than any model takes."""

Say = Callable[[str], None]


class Side:
    """A cache, and the board on which the copies of its only rank are reported.

    Args:
        has_room: whether a prompt can be stored whole now.
    """

    def __init__(
        self, cache: CacheClient, arena: Arena, has_room: Callable[[], bool] = lambda: True
    ) -> None:
        self.cache = cache
        self.has_room = has_room
        self.arena = arena

    def end(self, transfer: Transfer | None) -> None:
        """All ranks have copied it."""
        assert transfer is not None
        self.arena.board.report(transfer.cell, 0, Status.DONE)

    def rest(self) -> float:
        """Until nothing is under way. Returns seconds of this thread's CPU."""
        spent = 0.0
        while self.cache.busy:
            begun = time.thread_time()
            self.cache.poll()
            spent += time.thread_time() - begun
            time.sleep(0.001)
        return spent

    def fill(self) -> None:
        """Until each slot has a block, and then those of `keys`."""
        for _ in range(2 * SLOTS // BLOCKS):
            stored(self)

    def store(self, keys: Sequence[bytes], starts: Sequence[int]) -> float:
        """Store blocks. Returns seconds of this thread's CPU."""
        begun = time.thread_time()
        transfer = self.cache.store(keys, range(len(keys)), starts)
        spent = time.thread_time() - begun
        self.end(transfer)
        return spent + self.rest()

    def load(self, keys: Sequence[bytes]) -> None:
        """Load blocks, and see that it has ended."""
        self.end(self.cache.load(keys))
        self.cache.poll()


def call_rows(say: Say) -> list[Row]:
    """CPU of the scheduler's thread by the service, over that by a cache of the engine's own."""
    with embedded() as own, served(1) as (_, (one,)):
        rows = _compare(own, one, say)
    with embedded() as own, served(ENGINES) as (_, many):
        keys = stored(own)
        stored(many[0], keys)

        def all_look_up() -> None:
            for each in many:
                each.cache.lookup(keys)

        rows.append(
            _row(
                f"service: lookup of 1,312 blocks, {ENGINES} engines",
                Goal("<=", 1.0),
                *_in_turns(lambda: own.cache.lookup(keys), all_look_up),
                share=ENGINES,
            )
        )
    with served(1, disk=True) as (_, (one,)):
        rows += _disk_rows(one, say)
    return rows


def _disk_rows(one: Side, say: Say) -> list[Row]:
    """CPU of the scheduler's thread for blocks that left memory, and for those that are nowhere."""
    say("service: a disk")
    cache = one.cache
    prompts = prompts_on_disk(one, _PROMPTS)
    nowhere = new_keys(BLOCKS)
    asked = [_seconds(lambda: cache.fetch(nowhere)) for _ in range(_REPEATS)]
    return [
        Row(
            "service: a prompt of 1,312 blocks that no disk has",
            statistics.median(asked) * 1e6,
            "us",
            Goal("<=", 100),
            "CPU of the scheduler's thread: CacheClient.fetch, which sends nothing",
            {"served": asked},
        ),
        _fetch_row([_fetched(cache, keys) for keys in prompts]),
    ]


def prompts_on_disk(side: Side, count: int) -> list[list[bytes]]:
    """Prompts that are on the disk alone."""
    prompts = [stored(side) for _ in range(count)]
    for keys in prompts:
        while Presence.HOST in side.cache.presence(keys):
            stored(side)
        while set(side.cache.presence(keys)) != {Presence.BELOW}:
            side.cache.poll()
            time.sleep(0.001)
    return prompts


def _fetch_row(taken: Sequence[float]) -> Row:
    return Row(
        "service: fetch of 1,312 disk blocks",
        statistics.median(taken) * 1e6,
        "us",
        Goal("<=", 200),
        "CPU of the scheduler's thread, from the order to the end, with a poll each 5 ms",
        {"served": list(taken)},
    )


def _fetched(cache: CacheClient, keys: Sequence[bytes]) -> float:
    """Fetch a prompt. Returns seconds of this thread's CPU."""
    begun = time.thread_time()
    fetch = cache.fetch(keys)
    cache.poll()
    assert fetch is not None
    spent = time.thread_time() - begun
    is_there = False
    while not is_there:
        time.sleep(STEP_SECONDS)
        begun = time.thread_time()
        cache.poll()
        is_there = cache.fetch_state(fetch).arrived == len(keys)
        spent += time.thread_time() - begun
    begun = time.thread_time()
    cache.end_fetch(fetch)
    cache.poll()
    return spent + time.thread_time() - begun


def _compare(own: Side, other: Side, say: Say) -> list[Row]:
    say("service: one engine")
    keys = stored(own)
    stored(other, keys)
    rows = [
        _row(
            "service: lookup of 1,312 blocks, one engine",
            Goal("<=", 1.0),
            *_in_turns(lambda: own.cache.lookup(keys), lambda: other.cache.lookup(keys)),
        ),
        _row(
            "service: lease and release of 1,312 blocks",
            Goal("<=", 1.1),
            *_in_turns(lambda: own.load(keys), lambda: other.load(keys)),
        ),
    ]
    idle = [_seconds(lambda: other.cache.busy) for _ in range(_REPEATS)]
    rows.append(
        Row(
            "service: a step with nothing to do",
            statistics.median(idle) * 1e6,
            "us",
            Goal("<=", 20),
            "CacheClient.busy, which makes no system call",
            {"served": idle},
        )
    )
    stores: tuple[list[float], list[float]] = [], []
    for _ in range(_STORES):
        new = new_keys(REQUESTS)
        for side, taken in zip((own, other), stores, strict=True):
            taken.append(side.store(new, range(REQUESTS)))
        time.sleep(STEP_SECONDS)  # the service publishes, which the next step sees
    rows.append(_row("service: a decoding step stores 64 blocks", Goal("<=", 1.0), *stores))
    return rows


def stored(side: Side, keys: Sequence[bytes] | None = None) -> list[bytes]:
    """Store a prompt, a new one if none is given. Returns its keys."""
    made = list(keys or new_keys(BLOCKS))
    until(side.has_room, side.cache.poll)
    side.store(made, (0,))
    until(lambda: side.cache.lookup(made) == BLOCKS, side.cache.poll)  # a service publishes them
    return made


def new_keys(count: int) -> list[bytes]:
    """Keys that nobody has."""
    return [os.urandom(32) for _ in range(count)]


def _seconds(call: Callable[[], object]) -> float:
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def _in_turns(
    ours: Callable[[], object], theirs: Callable[[], object]
) -> tuple[list[float], list[float]]:
    taken: tuple[list[float], list[float]] = [], []
    for _ in range(_REPEATS):
        taken[0].append(_seconds(ours))
        taken[1].append(_seconds(theirs))
    return taken


def _row(
    what: str, goal: Goal, own: Sequence[float], served: Sequence[float], share: int = 1
) -> Row:
    mine, theirs = (statistics.median(each) * 1e6 for each in (own, served))
    theirs /= share
    return Row(
        what,
        theirs / mine,
        "x",
        goal,
        f"CPU of the scheduler's thread: {theirs:.0f} us by the service, {mine:.0f} us without",
        {"own": list(own), "served": list(served)},
    )


@contextmanager
def embedded() -> Iterator[Side]:
    """A cache of the engine's own, whose arena is full."""
    arena = Arena.create(ArenaSpec(FORMAT, SLOTS))
    cache = KVCache(arena, POLICIES["hazard"](SLOTS))
    side = Side(cache, arena)
    side.fill()
    yield side
    cache.close()
    arena.close()


@contextmanager
def served(engines: int, *, disk: bool = False) -> Iterator[tuple[ServiceProcess, list[Side]]]:
    """So many engines of one service, whose memory is full. It has a disk of eight times its memory
    if asked for."""
    gb = SLOTS * FORMAT.slot_bytes / (1 << 30)
    with (
        tempfile.TemporaryDirectory(prefix="flexkv-bench-") as folder,
        service_process(Path(folder), gb, 8 * gb if disk else 0) as service,
    ):
        made = [Scheduler(service.root, step_blocks=2 * BLOCKS)]
        stores = stores_of(made[0].cache)
        sides = [Side(made[0].cache, made[0].arena, lambda: len(stores.free) >= BLOCKS)]
        sides[0].fill()
        made += [Scheduler(service.root, step_blocks=1) for _ in range(engines - 1)]
        sides += [Side(each.cache, each.arena) for each in made[1:]]
        yield service, sides
        for each in made:
            each.close()
