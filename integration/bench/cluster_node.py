# SPDX-License-Identifier: Apache-2.0
"""A node of the cluster benchmark, in a process of its own that prints one line of JSON.

`blocks` moves blocks between host memory and the memory of another node, by FlexKV's tier and by
Mooncake's own calls, in turns. `questions` asks which blocks are there, by both. `read` reads
blocks by Mooncake's own calls, once for each line of its input.
"""

from __future__ import annotations

import itertools
import json
import mmap
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from mooncake.store import MooncakeDistributedStore

from flexkv import KVCache
from flexkv.eviction import POLICIES, LRUPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.open_tiers import open_tiers
from flexkv.session.wire import SessionInfo
from flexkv.settings import CacheConfig
from flexkv.tiers.job import Outcome, Priority
from flexkv.tiers.remote import RemoteTier, address_of
from integration.harness.mooncake_lender import connect

MIB = 1 << 20
FINGERPRINT = "be" * 16
WAYS = ((1, 32 * MIB), (4, 8 * MIB), (8, 4 * MIB))
"""Threads, and bytes of a call: ways to call Mooncake, of which the fastest counts."""
QUESTIONS, QUESTION_BLOCKS = 200, 64
_POLL_SECONDS = 0.0005
"""Between two looks at what has ended. Looks five times as often took a sixth of the processor time
of FlexKV's calls on two busy cores; an engine looks once a step."""

Samples = dict[str, list[float]]


class FlexKV:
    """FlexKV's tier over an arena that holds `count` blocks twice: half of it may wait to be
    written."""

    def __init__(self, settings: dict[str, Any], size: int, count: int) -> None:
        self.arena = Arena.create(ArenaSpec(BlockFormat(1, (size,)), 2 * count), threads=2)
        tiers = open_tiers(
            CacheConfig(**settings), SessionInfo(FINGERPRINT, self.arena.spec), POLICIES["lru"]
        )
        tier = tiers[0].tier
        assert isinstance(tier, RemoteTier)
        self.tier = tier
        self.cache = KVCache(self.arena, LRUPolicy(), tiers)
        self.views = [self.arena.slot_view(slot) for slot in range(count)]

    def put(self, keys: Sequence[bytes]) -> None:
        """Write all blocks."""
        self._await(self.tier.write(keys, self.views), len(keys))

    def get(self, keys: Sequence[bytes]) -> None:
        """Read all blocks."""
        self._await(self.tier.read(keys, self.views, Priority.LOAD), len(keys))

    def has(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Ask about blocks."""
        self.tier.query(keys)
        while not (answers := self.tier.drain_answers()):
            time.sleep(0)
        has = answers[0].has
        if has is None:
            raise RuntimeError("the store did not answer")
        return has

    def _await(self, ticket: int, count: int) -> None:
        while count:
            for result in self.tier.poll():
                if (result.ticket, result.outcome) != (ticket, Outcome.DONE):
                    raise RuntimeError(f"a block ended with {result.outcome}")
                count -= 1
            time.sleep(_POLL_SECONDS)


class Mooncake:
    """Mooncake's own calls over a client.

    Args:
        client: set up.
        memory: address and bytes of what holds the blocks, which is registered.
        addresses: of the blocks.
        size: of a block, in bytes.
    """

    def __init__(
        self,
        client: MooncakeDistributedStore,
        memory: tuple[int, int],
        addresses: Sequence[int],
        size: int,
    ) -> None:
        self._size = size
        self._addresses = addresses
        if client.register_buffer(*memory) != 0:
            raise RuntimeError("Mooncake cannot register the memory of blocks")
        self._pool = ThreadPoolExecutor(max(threads for threads, _ in WAYS))

    def move(
        self, call: Callable[..., list[int]], names: Sequence[str], way: tuple[int, int]
    ) -> None:
        """Put or get all blocks in one of the WAYS."""
        threads, call_bytes = way
        step = max(1, call_bytes // self._size)
        parts = [range(i, min(i + step, len(names))) for i in range(0, len(names), step)]

        def run(first: int) -> None:
            for part in parts[first::threads]:
                codes = call(
                    [names[i] for i in part],
                    [self._addresses[i] for i in part],
                    [self._size] * len(part),
                )
                if any(code < 0 for code in codes):
                    raise RuntimeError(f"Mooncake ended with codes {codes}")

        list(self._pool.map(run, range(threads)))


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def keys_of(what: object, count: int) -> list[bytes]:
    """Keys that nothing else has."""
    return [f"{what} {i}".encode().ljust(32, b".") for i in range(count)]


def measure_blocks(settings: dict[str, Any], size: int, count: int, samples: int) -> Samples:
    """Seconds of each way to put and get `count` blocks of `size` bytes; the first round does not
    count."""
    node = FlexKV(settings, size, count)
    client = connect(settings, 0)
    spec = node.arena.spec
    memory = node.arena.address + spec.slots_offset, spec.slots_bytes
    peer = Mooncake(client, memory, [address_of(view) for view in node.views], size)
    found: Samples = defaultdict(list)
    for sample in range(samples + 1):
        taken: dict[str, float] = {}
        turns: list[tuple[int, int] | None] = [None, *WAYS]
        # Each comes behind each: eight threads of Mooncake's leave work for who comes next.
        random.Random(sample).shuffle(turns)
        for way in turns:
            keys = keys_of(sample, count)
            names = [f"{sample} {way} {i}" for i in range(count)]
            for verb in ("put", "get"):
                if way is None:
                    name, work = f"FlexKV {verb}", partial(getattr(node, verb), keys)
                else:
                    call = client.batch_put_from if verb == "put" else client.batch_get_into
                    name, work = f"Mooncake {verb} {way[0]}", partial(peer.move, call, names, way)
                taken[name] = timed(work)
            client.remove_all(True)
        for name, seconds in taken.items() if sample else ():
            found[name].append(seconds)
    node.cache.close()
    client.close()
    return found


def measure_questions(settings: dict[str, Any], samples: int) -> Samples:
    """Existence checks per second, by FlexKV's tier and by Mooncake's own call, one question after
    another, and two threads of Mooncake's at once."""
    node = FlexKV(settings, 4096, 2 * QUESTION_BLOCKS)
    client = connect(settings, 0)
    found: Samples = defaultdict(list)
    number = itertools.count()

    def ours() -> None:
        for _ in range(QUESTIONS):
            node.has(keys_of(next(number), QUESTION_BLOCKS))

    def theirs() -> None:
        for _ in range(QUESTIONS):
            folder = next(number)
            names = [f"flexkv/{FINGERPRINT}/{folder}/{i:064x}" for i in range(QUESTION_BLOCKS)]
            if any(client.batch_is_exist(names)):
                raise RuntimeError("a block is there that nobody has put")

    def both() -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: theirs(), range(2)))

    checks = QUESTIONS * QUESTION_BLOCKS
    for sample in range(samples + 1):
        rates = {
            "FlexKV": checks / timed(ours),
            "Mooncake": checks / timed(theirs),
            "Mooncake, two threads": 2 * checks / timed(both),
        }
        for name, rate in rates.items() if sample else ():
            found[name].append(rate)
    node.cache.close()
    client.close()
    return found


def read_when_told(settings: dict[str, Any], size: int, count: int) -> None:
    """Write `count` blocks of `size` bytes, then, for each line of input, read them all in each way
    and print the seconds of each."""
    client = connect(settings, 0)
    memory = mmap.mmap(-1, size * count)
    start = address_of(memoryview(memory))
    peer = Mooncake(client, (start, len(memory)), range(start, start + len(memory), size), size)
    names = [f"read {size} {count} {i}" for i in range(count)]
    peer.move(client.batch_put_from, names, WAYS[0])
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        taken = {
            f"{way[0]} threads of {way[1] // MIB} MiB": timed(
                partial(peer.move, client.batch_get_into, names, way)
            )
            for way in WAYS
        }
        print(json.dumps(taken), flush=True)
    client.close()


def main() -> None:
    """See the module."""
    role, settings, *numbers = sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:])
    settings["mooncake_segment_gb"] = 0
    if role == "read":
        read_when_told(settings, *numbers)
        return
    measure = measure_blocks if role == "blocks" else measure_questions
    print(json.dumps(measure(settings, *numbers)), flush=True)


if __name__ == "__main__":
    main()
