# SPDX-License-Identifier: Apache-2.0
"""Worlds with a disk below a small arena: how they are filled, and what happens to their disk."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine_world import World, random_prompt
from kv_pages import BLOCK_TOKENS
from patience import wait_until

from flexkv.tiers.disk.drive import THREADS
from flexkv.tiers.job import Priority, Urgency
from packages.inside import below_of, index_of
from packages.inside_tiers import read_jobs, set_read_jobs, split_runs, store_of
from packages.tier_blocks import ready_blocks

PROMPT_BLOCKS = 6


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_prompt(rng, PROMPT_BLOCKS * BLOCK_TOKENS + 5) for _ in range(count)]


def fill(world: World, texts: Sequence[list[int]]) -> None:
    """Have `texts` stored, as far as there is room, and written; vLLM itself has nothing then."""
    for text in texts:
        world.generate(text)
        world.settle()
    world.forget()


def hits(world: World, text: list[int]) -> int:
    """Blocks of `text` that are loaded for it."""
    return world.external_tokens[world.generate(text)] // BLOCK_TOKENS


def keep_in_engine(world: World, turns: int) -> list[bool]:
    """Serve `turns` prompts behind four blocks that vLLM's own prefix cache always has; returns
    which of these are on disk then."""
    rng = random.Random(30)
    shared = random_prompt(rng, 4 * BLOCK_TOKENS)
    world.generate(shared + random_prompt(rng, 1), max_tokens=1)
    world.settle()
    keys = list(ready_blocks(index_of(world.cache)))
    assert len(keys) == 4
    for _ in range(turns):
        world.generate(shared + random_prompt(rng, 2 * BLOCK_TOKENS))
        world.settle()
    found: list[bool] = below_of(world.cache).tiers[0].contains(keys)
    return found


def settle_fetches(world: World) -> None:
    """Until nothing is read from disk, without a step of the engine."""
    fetcher = below_of(world.cache).fetcher
    wait_until(lambda: not fetcher.reads, world.poll)


def drive_of(world: World) -> Any:
    (drive,) = below_of(world.cache).tiers[0].drives
    return drive


def slabs(directory: Path) -> list[Path]:
    """The files that the blocks are in."""
    return sorted((directory / "disk").glob("*/slab-*"))


def flip_a_byte(rng: random.Random, files: Sequence[Path]) -> None:
    path = rng.choice(files)
    place = rng.randrange(path.stat().st_size)
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, place)[0]
        os.pwrite(fd, bytes([byte ^ 0xFF]), place)
    finally:
        os.close(fd)


def delay_reads(world: World, rng: random.Random) -> None:
    store = store_of(drive_of(world))
    read = store.read

    def late(*args: Any) -> Any:
        time.sleep(rng.choice([0.0, 0.0, 0.001, 0.003]))
        return read(*args)

    store.read = late


def read_block_by_block(world: World) -> None:
    """From now on a fetch arrives in as many parts as it has blocks."""
    split_runs(drive_of(world))


def read_a_block_a_step(world: World) -> None:
    """From now on a step, or a poll without one, lets no more than about one block arrive, however
    fast the disk is: a fetch of several blocks lasts for several steps."""
    read_block_by_block(world)
    drive = drive_of(world)
    read = type(store_of(drive)).read.__get__(store_of(drive))
    queue, turn, ended = threading.Lock(), threading.Event(), threading.Event()

    def in_turn(*args: Any) -> Any:
        with queue:
            turn.wait()
            turn.clear()
            if ended.is_set():
                turn.set()
        return read(*args)

    def giving_a_turn(act: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            turn.set()
            act()

        return both

    def end() -> None:
        ended.set()
        turn.set()

    store_of(drive).read = in_turn
    world.step = giving_a_turn(world.step)  # type: ignore[method-assign]
    world.poll = giving_a_turn(world.poll)  # type: ignore[method-assign]
    world.closing.callback(end)


class Hang:
    """From now on a world's disk reads block by block, and gives no more than the `free` that it is
    asked for first until `end`; that of an earlier hang ends here.

    It gives these once the turn of their request has come: what a prefetch brings before says
    nothing of how long the rest takes.
    """

    def __init__(self, world: World, free: int = 0) -> None:
        self._ended = threading.Event()
        self._wanted = threading.Event()
        self._asked = 0
        self._begun: list[None] = []  # by threads of the link
        self._counters = world.cache.counters
        self._last = self._counters.fetched_blocks + free
        drive = drive_of(world)
        read = type(store_of(drive)).read.__get__(store_of(drive))
        reading = read_jobs(drive)
        raise_priority = type(drive.link).raise_priority.__get__(drive.link)
        numbers = itertools.count()

        def late(*args: Any) -> Any:
            self._wanted.wait()
            return read(*args)

        def hanging(*args: Any) -> Any:
            self._begun.append(None)
            self._ended.wait()
            return read(*args)

        def asked(*blocks: Any) -> Any:
            # Its threads may call `read` in another order.
            hangs = next(numbers) >= free
            self._asked += hangs
            store_of(drive).read = hanging if hangs else late
            *_, urgency = blocks
            self._want(urgency.priority)
            return reading(*blocks)

        def raised(jobs: Any, urgency: Urgency) -> None:
            self._want(urgency.priority)
            raise_priority(jobs, urgency)

        set_read_jobs(drive, asked)
        drive.link.raise_priority = raised
        read_block_by_block(world)
        world.closing.callback(self.end)

    def _want(self, priority: Priority) -> None:
        if priority is Priority.LOAD:
            self._wanted.set()

    @property
    def begun(self) -> bool:
        """Whether every read that was asked for hangs, or as many as the link has threads, and all
        that came before was seen: time that passes now passes without anything. A read that begins
        later would hang for no time yet."""
        hanging = min(self._asked, THREADS)
        return 0 < hanging <= len(self._begun) and self._counters.fetched_blocks == self._last

    def end(self) -> None:
        """Everything is read again."""
        self._wanted.set()
        self._ended.set()
