# SPDX-License-Identifier: Apache-2.0
"""The guard of the hazard policy: it counts what LRU would find, and falls back to LRU's order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from flexkv.eviction import LRUPolicy, RequestContext
from flexkv.index.block_index import block_index
from flexkv_kernels.hazard import HazardPolicy


@dataclass
class Request:
    """The first `asked` blocks of `chain` are the prompt, the others the answer."""

    now: float
    chain: list[bytes]
    asked: int


class Node:
    """Requests one after the other over an index."""

    def __init__(self, slots: int, policy: Any) -> None:
        self.index = block_index(slots, policy)
        self.policy = policy
        self.hits = 0
        self.requests = 0

    def run(self, request: Request) -> None:
        index, prompt = self.index, request.chain[: request.asked]
        found = index.lookup(prompt)
        self.hits += found
        context = RequestContext(request_id=str(self.requests))
        self.requests += 1
        index.began(prompt, context, request.now)
        index.hit(prompt[:found], context)
        index.publish(index.reserve_all(request.chain, range(len(request.chain)), (0,)))
        index.ended(context.request_id, 100, request.now)

    @property
    def state(self) -> Any:
        return self.policy.guard_state()

    @property
    def contents(self) -> set[bytes]:
        return {block.key for block in self.index.blocks}


def both(slots: int, requests: Iterable[Request]) -> tuple[Node, Node]:
    lru, hazard = Node(slots, LRUPolicy()), Node(slots, HazardPolicy(slots))
    for request in requests:
        lru.run(request)
        hazard.run(request)
        assert hazard.state.lru_hits == lru.hits
        assert hazard.state.hits == hazard.hits
    return lru, hazard


def history(seed: int, most: int) -> Iterator[Request]:
    """Prompts that repeat, extend, leave and cut earlier ones, of up to `most` blocks at a time;
    some with answers, which are new, and times that stand still and fall."""
    rng = random.Random(seed)
    chains: list[list[bytes]] = []
    now = 1000.0
    for _ in range(700):
        chain: list[bytes] = []
        if chains and rng.random() < 0.7:
            earlier = chains[-1 - min(int(rng.expovariate(0.1)), len(chains) - 1)]
            chain = earlier[: rng.choice([len(earlier), rng.randint(0, len(earlier))])]
        news = rng.randint(0 if chain else 1, most)
        chain = chain + [rng.randbytes(16) for _ in range(news)]
        chains.append(chain)
        now += rng.choice([0.0, 0.0, rng.expovariate(0.2), -rng.expovariate(0.1)])
        yield Request(now, chain, len(chain) - rng.choice([0, 0, news // 2]))


@pytest.mark.parametrize("slots", [1, 2, 7, 40, 150])
@pytest.mark.parametrize("seed", range(3))
def test_it_counts_what_lru_finds(slots: int, seed: int) -> None:
    lru, _ = both(slots, history(seed, 12))
    assert slots < 40 or lru.hits > 500, "the history has hits to count"


def prompt(name: object, blocks: int) -> list[bytes]:
    return [f"{name} {i}".encode() for i in range(blocks)]


def in_order(timed: list[tuple[float, list[bytes]]]) -> list[Request]:
    timed.sort(key=lambda each: each[0])
    return [Request(now, chain, len(chain)) for now, chain in timed]


def begin_to_return(rng: random.Random) -> list[Request]:
    """Chats that fill memory, beside prompts that come once; after a half, each of these comes
    again within seconds."""
    timed = []
    for i in range(1000):
        blocks, now = rng.randint(12, 30), 2.5 * i
        for turn in range(8):
            timed.append((now, prompt(f"chat {i}", blocks + 2 * turn)))
            now += rng.expovariate(1 / 200)
    for i in range(3000):
        timed.append((0.8 * i, prompt(i, 10)))
        if i > 1500:
            timed.append((0.8 * i + rng.uniform(2, 20), prompt(i, 10)))
    return in_order(timed)


def by_distance(rng: random.Random, seconds: float = 1.0) -> list[Request]:
    """Prompts come again by the distance of their last use, as LRU expects it."""
    stack: list[list[bytes]] = []
    timed = []
    for i in range(4000):
        depth = int(rng.paretovariate(0.6))
        found = depth <= len(stack) and rng.random() < 0.8
        chain = stack.pop(-depth) if found else prompt(i, rng.randint(1, 12))
        stack.append(chain)
        timed.append((seconds * i, chain))
    return in_order(timed)


def in_a_moment(rng: random.Random) -> list[Request]:
    """The same within seconds: no age tells prompts apart."""
    return by_distance(rng, 0.001)


@pytest.mark.parametrize("slots", [300, 600])
@pytest.mark.parametrize("make", [begin_to_return, by_distance, in_a_moment])
@pytest.mark.parametrize("seed", range(2))
def test_it_finds_hardly_less_than_lru(
    make: Callable[[random.Random], list[Request]], slots: int, seed: int
) -> None:
    """At most a hundredth of the hits, beside what it may have gained before."""
    lru, hazard = both(slots, make(random.Random(seed)))
    assert hazard.hits >= 0.99 * lru.hits - 0.05 * slots


def test_it_falls_back_to_the_order_of_use_and_returns() -> None:
    orders = []
    node = Node(100, HazardPolicy(100))
    for request in in_a_moment(random.Random(1)):
        node.run(request)
        orders.append(node.state.trusts_hazard)
        if not node.state.trusts_hazard:
            assert node.state.credit < 0.04 * 100
    assert orders[0]
    assert {True, False} == set(orders)
    switches = sum(before and not after for before, after in itertools.pairwise(orders))
    assert node.state.switches == switches


@pytest.mark.parametrize("seed", range(2))
def test_prompts_that_begin_to_return_are_found_within_2000_requests(seed: int) -> None:
    """After 6,000 of which none did. Memory holds the prompts of 13 s; a third returns by then."""
    rng = random.Random(seed)
    timed, again = [], set()
    for i in range(7200):
        chain, now = prompt(i, rng.randint(3, 20)), 0.5 * i
        timed.append((now, chain))
        if i > 6000:
            later = now + rng.uniform(1, 20)
            again.add(later)
            timed.append((later, chain))
    requests = in_order(timed)
    node = Node(300, HazardPolicy(300))
    found = wanted = 0
    for number, request in enumerate(requests):
        before = node.hits
        node.run(request)
        if 7000 < number < 8000 and request.now in again:
            found += node.hits - before
            wanted += request.asked
    assert found > 0.9 * wanted > 0


def test_with_a_clock_that_stands_still_the_order_is_that_of_lru() -> None:
    node = Node(300, HazardPolicy(300))
    for request in by_distance(random.Random(2), seconds=0.0):
        node.run(request)
        assert not node.state.trusts_hazard or node.requests < 50
    assert node.state.hits >= 0.999 * node.state.lru_hits


def test_a_falling_clock_counts_as_standing_still() -> None:
    rng = random.Random(5)
    requests = [Request(0.0, prompt(rng.randint(0, 300), 5), 5) for _ in range(3000)]
    now, latest = 0.0, -3.0
    standing, falling = Node(200, HazardPolicy(200)), Node(200, HazardPolicy(200))
    for each in requests:
        now += rng.uniform(-2, 3)
        latest = max(latest, now)
        standing.run(Request(latest, each.chain, 5))
        falling.run(Request(now, each.chain, 5))
        assert standing.contents == falling.contents


def test_a_block_of_a_lower_tier_is_no_hit_of_memory() -> None:
    """Its request found it below, as it would have with LRU."""
    node = Node(10, HazardPolicy(10))
    chain, index = prompt("a", 4), node.index
    node.run(Request(0.0, chain[:2], 2))
    index.publish(index.reserve_all(chain, range(2, 4), (0,), True))
    node.run(Request(1.0, chain, 4))
    assert (node.state.hits, node.state.lru_hits) == (2, 2)
    node.run(Request(2.0, chain, 4))
    assert (node.state.hits, node.state.lru_hits) == (6, 6)


def test_a_reset_counts_for_both() -> None:
    node = Node(10, HazardPolicy(10))
    node.run(Request(0.0, prompt("a", 4), 4))
    node.index.clear()
    node.index.sweep(10)
    node.run(Request(1.0, prompt("a", 4), 4))
    assert (node.state.hits, node.state.lru_hits) == (0, 0)


def test_a_newcomer_always_gets_a_slot() -> None:
    node = Node(50, HazardPolicy(50))
    for number in range(300):
        chain = prompt(number, 1 + number % 60)
        node.run(Request(float(number), chain, len(chain)))
        assert node.index.lookup(chain) == min(50, len(chain))
