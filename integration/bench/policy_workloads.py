# SPDX-License-Identifier: Apache-2.0
"""Requests of made-up users on which an eviction policy that learns may lose to LRU.

What comes back changes, or comes back rarely, or by the distance of its last use. Deterministic for
a seed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import count

from flexkv.plan.trace import Prefixes, Trace, TracedRequest

BLOCK_TOKENS = 512
REQUESTS = 20_000

Names = Sequence[Hashable]
"""Names of a prompt's blocks; equal names behind equal prefixes are the same block."""
Send = Callable[[float], TracedRequest]


class Crowd:
    """What users send, in the order of time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._due: list[tuple[float, int, Send]] = []
        self._numbers = count()
        self._fresh = count()
        self._prefixes = Prefixes()

    def new(self, blocks: int) -> list[Hashable]:
        """Names that no block had before."""
        return [next(self._fresh) for _ in range(blocks)]

    def at(self, seconds: float, send: Send) -> None:
        """Have `send` make a request then."""
        heapq.heappush(self._due, (seconds, next(self._numbers), send))

    def request(self, seconds: float, names: Names, output_tokens: int) -> TracedRequest:
        """One token more than its blocks: an engine computes the last token in any case."""
        tokens = BLOCK_TOKENS * len(names) + 1
        return TracedRequest(seconds, self._prefixes.follow(names), (), tokens, output_tokens)

    def once(self, seconds: float, names: Names, output_tokens: int) -> None:
        """Have a prompt sent then."""
        self.at(seconds, lambda then: self.request(then, names, output_tokens))

    def trace(self, name: str) -> Trace:
        """The first `REQUESTS` requests."""
        requests = list(self._requests())
        return Trace(name, "", BLOCK_TOKENS, requests, len(self._prefixes))

    def _requests(self) -> Iterator[TracedRequest]:
        for _ in range(REQUESTS):
            seconds, _number, send = heapq.heappop(self._due)
            yield send(seconds)


def _chats(
    crowd: Crowd,
    rate: float,
    *,
    system: Callable[[float], Names] = lambda seconds: (),
    stays: float = 0.5,
    pause: float = 120.0,
    start: tuple[int, int] = (2, 12),
    begin_at: float = 0.0,
    end_at: float = math.inf,
) -> None:
    """Chats begin at `rate` a second until `end_at`. A share of them goes on, eight times on
    average, after pauses of `pause` seconds on average."""
    rng = crowd.rng

    def begin(seconds: float) -> TracedRequest:
        then = seconds + rng.expovariate(rate)
        if then < end_at:
            crowd.at(then, begin)
        own = [*system(seconds), *crowd.new(rng.randint(*start))]
        return go_on(seconds, own, rng.random() < stays)

    def go_on(seconds: float, own: list[Hashable], stay: bool) -> TracedRequest:
        prompt = list(own)
        if stay and rng.random() < 7 / 8:
            own += crowd.new(rng.randint(1, 4))
            crowd.at(seconds + rng.expovariate(1 / pause), lambda then: go_on(then, own, True))
        return crowd.request(seconds, prompt, rng.randint(100 if stay else 1, 600))

    crowd.at(begin_at, begin)


def _prompts(
    crowd: Crowd, every: float, make: Callable[[float], tuple[Names, int]], begin_at: float = 0.0
) -> None:
    """A prompt of `make` each so many seconds."""

    def send(seconds: float) -> TracedRequest:
        crowd.at(seconds + every, send)
        return crowd.request(seconds, *make(seconds))

    crowd.at(begin_at, send)


def _always(names: Names, _: float) -> Names:
    return names


def _by_rank(rng: random.Random, ranks: int, power: float) -> int:
    """A rank by a power law."""
    top = (ranks ** (1 - power) - 1) * rng.random() + 1
    return min(ranks - 1, int(top ** (1 / (1 - power))) - 1)


def _document(number: int) -> list[Hashable]:
    return [("document", number, i) for i in range(3 + number * 7919 % 12)]


def documents(seed: int) -> Trace:
    """Questions about two of 20,000 documents, some of them asked for often."""
    crowd = Crowd(seed)

    def make(_: float) -> tuple[Names, int]:
        pair = [_document(_by_rank(crowd.rng, 20_000, 0.9)) for _ in range(2)]
        return ["system", *pair[0], *pair[1], *crowd.new(1)], crowd.rng.randint(50, 400)

    _prompts(crowd, 0.5, make)
    return crowd.trace("documents")


def drifting_documents(seed: int) -> Trace:
    """The same, but the documents that are asked for often change: nine ranks a minute."""
    crowd = Crowd(seed)

    def make(seconds: float) -> tuple[Names, int]:
        number = _by_rank(crowd.rng, 20_000, 0.99) + int(seconds / 20) * 3
        return ["system", *_document(number), *crowd.new(1)], crowd.rng.randint(50, 400)

    _prompts(crowd, 0.5, make)
    return crowd.trace("drifting documents")


def chats_beside_a_batch(seed: int) -> Trace:
    """Chats, and five prompts a second that nobody sends again."""
    crowd = Crowd(seed)
    _chats(crowd, 0.5, stays=0.8, pause=60)
    _prompts(crowd, 0.2, lambda _: (crowd.new(10), 16), begin_at=300)
    return crowd.trace("chats beside a batch")


def daily_prompts(seed: int) -> Trace:
    """Chats behind twelve system prompts, each of which has its hours of the day."""
    crowd = Crowd(seed)
    systems = [[("system", k, i) for i in range(crowd.rng.randint(4, 40))] for k in range(12)]

    def system(seconds: float) -> Names:
        hour = seconds / 3600
        away = [((hour - 2 * k + 12) % 24 - 12) ** 2 / 8 for k in range(12)]
        return crowd.rng.choices(systems, [0.02 + math.exp(-each) for each in away])[0]

    _chats(crowd, 0.12, system=system, stays=0.6, pause=180)
    return crowd.trace("daily prompts")


def a_flood(seed: int) -> Trace:
    """Chats of ten tenants; every half hour another floods the cache for a quarter of an hour."""
    crowd = Crowd(seed)
    for tenant in range(10):
        own = [("tenant", tenant, i) for i in range(8)]
        _chats(crowd, 0.08, system=partial(_always, own), stays=0.7, pause=90)
    common = [("flood", i) for i in range(8)]

    def flood(seconds: float) -> TracedRequest:
        is_on = int(seconds / 900) % 2 == 1
        crowd.at(seconds + (0.15 if is_on else 900 - seconds % 900), flood)
        return crowd.request(seconds, [*common, *crowd.new(20 if is_on else 1)], 64)

    crowd.at(0.0, flood)
    return crowd.trace("a flood")


def chats_then_documents(seed: int) -> Trace:
    """Chats that return; then none, and questions about documents."""
    crowd = Crowd(seed)
    _chats(crowd, 1, stays=0.7, end_at=2500)

    def make(_: float) -> tuple[Names, int]:
        number = _by_rank(crowd.rng, 8_000, 0.8)
        return ["system", *_document(number), *crowd.new(1)], crowd.rng.randint(50, 400)

    _prompts(crowd, 0.5, make, begin_at=2500)
    return crowd.trace("chats, then documents")


def nothing_then_chats(seed: int) -> Trace:
    """Prompts that never return; then chats that all do."""
    crowd = Crowd(seed)
    for number in range(8_000):
        crowd.once(0.5 * number, crowd.new(crowd.rng.randint(3, 20)), crowd.rng.randint(1, 300))
    _chats(crowd, 1, stays=1.0, pause=30, begin_at=4000)
    return crowd.trace("nothing, then chats")


def retries(seed: int, share: float = 1.0, begin_at: float = 3000.0, name: str = "") -> Trace:
    """Prompts of which none returns; then a share comes back once, within seconds."""
    crowd = Crowd(seed)

    def make(seconds: float) -> tuple[Names, int]:
        own = crowd.new(crowd.rng.randint(3, 20))
        if seconds > begin_at and crowd.rng.random() < share:
            crowd.once(seconds + crowd.rng.uniform(1, 20), own, 100)
        return own, crowd.rng.randint(1, 300)

    _prompts(crowd, 0.5, make)
    return crowd.trace(name or "retries from some time on")


def rare_retries(seed: int) -> Trace:
    """One of twenty prompts comes back once, within seconds."""
    return retries(seed, 0.05, 0.0, "rare retries")


def by_distance(seed: int) -> Trace:
    """Each prompt is one used at a distance drawn from a power law: what LRU expects."""
    crowd = Crowd(seed)
    stack: list[Names] = []

    def make(_: float) -> tuple[Names, int]:
        depth = int(crowd.rng.paretovariate(0.5))
        is_known = depth <= len(stack) and crowd.rng.random() < 0.8
        stack.append(stack.pop(-depth) if is_known else crowd.new(crowd.rng.randint(4, 24)))
        return stack[-1], crowd.rng.randint(1, 500)

    _prompts(crowd, 1.0, make)
    return crowd.trace("by distance")


def samples_beside_chats(seed: int) -> Trace:
    """An evaluation sends each prompt eight times within seconds, and never again; beside chats."""
    crowd = Crowd(seed)
    _chats(crowd, 0.5, stays=0.7, pause=90)

    def make(seconds: float) -> tuple[Names, int]:
        own = [*(("shots", i) for i in range(6)), *crowd.new(crowd.rng.randint(2, 10))]
        for sample in range(1, 8):
            crowd.once(seconds + sample * crowd.rng.uniform(0.05, 1), own, 500)
        return own, 500

    _prompts(crowd, 4.0, make, begin_at=500)
    return crowd.trace("samples beside chats")


def a_class_begins_to_return(seed: int) -> Trace:
    """Chats that fill the memory, beside prompts sent once; from a half on each of these comes back
    once, within seconds."""
    crowd = Crowd(seed)
    _chats(crowd, 0.4, stays=0.9, pause=200, start=(12, 30))

    def make(seconds: float) -> tuple[Names, int]:
        own = crowd.new(10)
        if seconds > 2500:
            crowd.once(seconds + crowd.rng.uniform(2, 20), own, 100)
        return own, 100

    _prompts(crowd, 0.5, make, begin_at=300)
    return crowd.trace("a class begins to return")


def turns_of_two_classes(seed: int) -> Trace:
    """Which of two kinds of prompts comes back changes every 20 minutes."""
    crowd = Crowd(seed)

    def make(seconds: float) -> tuple[Names, int]:
        is_long = crowd.rng.random() < 0.5
        own = crowd.new(16 if is_long else 6)
        if is_long == (int(seconds / 1200) % 2 == 0):
            crowd.once(seconds + crowd.rng.uniform(30, 90), own, 100)
        return own, 100

    _prompts(crowd, 0.5, make)
    return crowd.trace("turns of two classes")


WORKLOADS: tuple[Callable[[int], Trace], ...] = (
    documents,
    drifting_documents,
    chats_beside_a_batch,
    daily_prompts,
    a_flood,
    chats_then_documents,
    nothing_then_chats,
    retries,
    rare_retries,
    by_distance,
    samples_beside_chats,
    a_class_begins_to_return,
    turns_of_two_classes,
)
