# SPDX-License-Identifier: Apache-2.0
"""Requests of made-up users, for comparing eviction policies. Deterministic."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import count

from flexkv.plan.trace import Trace, TracedRequest

BLOCK_TOKENS = 512


class _Users:
    """What a kind of user sends, in the order of time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._due: list[tuple[float, int, Callable[[float], TracedRequest]]] = []
        self._numbers = count()
        self._blocks = count()

    def blocks(self, number: int) -> list[int]:
        """So many blocks that no prompt had before."""
        return [next(self._blocks) for _ in range(number)]

    def at(self, seconds: float, send: Callable[[float], TracedRequest]) -> None:
        """Have `send` make a request then."""
        heapq.heappush(self._due, (seconds, next(self._numbers), send))

    def trace(self, name: str, requests: int) -> Trace:
        """The first so many requests."""
        return Trace(name, "", BLOCK_TOKENS, list(self._requests(requests)), next(self._blocks))

    def _requests(self, most: int) -> Iterator[TracedRequest]:
        for _ in range(most):
            seconds, _number, send = heapq.heappop(self._due)
            yield send(seconds)


def _request(seconds: float, blocks: list[int], output_tokens: int) -> TracedRequest:
    # One token more than its blocks: an engine computes the last token in any case.
    return TracedRequest(seconds, tuple(blocks), (), BLOCK_TOKENS * len(blocks) + 1, output_tokens)


def returning_chats(requests: int = 12_000) -> Trace:
    """A chat begins each second; half of them end after one prompt, the others go on eight times
    on average, after pauses of two minutes on average, and grow by one to four blocks."""
    users = _Users(1)
    rng = users.rng

    def begin(seconds: float) -> TracedRequest:
        users.at(seconds + rng.expovariate(1.0), begin)
        own = users.blocks(rng.randint(2, 12))
        stays = rng.random() < 0.5
        return go_on(seconds, own, stays)

    def go_on(seconds: float, own: list[int], stays: bool) -> TracedRequest:
        prompt = list(own)
        if stays and rng.random() < 7 / 8:
            own += users.blocks(rng.randint(1, 4))
            pause = rng.expovariate(1 / 120)
            users.at(seconds + pause, lambda then: go_on(then, own, True))
        return _request(seconds, prompt, rng.randint(100, 600) if stays else rng.randint(1, 40))

    users.at(0.0, begin)
    return users.trace("returning chats", requests)


def hot_system_prompt(requests: int = 12_000) -> Trace:
    """All prompts begin with one of four system prompts of 20 blocks, of which the first has 70 %;
    3 to 20 blocks follow that nobody sends again."""
    users = _Users(2)
    rng = users.rng
    systems = [users.blocks(20) for _ in range(4)]

    def send(seconds: float) -> TracedRequest:
        users.at(seconds + rng.expovariate(2.0), send)
        system = rng.choices(systems, (70, 15, 10, 5))[0]
        return _request(seconds, system + users.blocks(rng.randint(3, 20)), rng.randint(10, 400))

    users.at(0.0, send)
    return users.trace("hot system prompt", requests)


def scan(requests: int = 12_000) -> Trace:
    """Chats as in `returning_chats` with pauses of a minute, and from minute 20 to 40 of each hour
    a batch job that sends three prompts of 10 blocks a second, each of them once."""
    users = _Users(3)
    rng = users.rng

    def begin(seconds: float) -> TracedRequest:
        users.at(seconds + rng.expovariate(0.5), begin)
        return go_on(seconds, users.blocks(rng.randint(2, 12)))

    def go_on(seconds: float, own: list[int]) -> TracedRequest:
        prompt = list(own)
        if rng.random() < 0.8:
            own += users.blocks(rng.randint(1, 4))
            users.at(seconds + rng.expovariate(1 / 60), lambda then: go_on(then, own))
        return _request(seconds, prompt, rng.randint(50, 600))

    def batch(seconds: float) -> TracedRequest:
        minute = seconds / 60 % 60
        later = seconds + 1 / 3 if 20 <= minute < 40 else seconds + (20 - minute) % 60 * 60
        users.at(later, batch)
        return _request(seconds, users.blocks(10), 16)

    users.at(0.0, begin)
    users.at(1200.0, batch)
    return users.trace("a scan", requests)


def agents(requests: int = 12_000) -> Trace:
    """Agents of three kinds, each with a prompt of 12 blocks, make 20 steps on average, 3 to 30 s
    apart; each step adds one or two blocks to the context."""
    users = _Users(4)
    rng = users.rng
    kinds = [users.blocks(12) for _ in range(3)]

    def begin(seconds: float) -> TracedRequest:
        users.at(seconds + rng.expovariate(0.25), begin)
        return step(seconds, rng.choice(kinds) + users.blocks(2))

    def step(seconds: float, context: list[int]) -> TracedRequest:
        prompt = list(context)
        if rng.random() < 0.95:
            context += users.blocks(rng.randint(1, 2))
            users.at(seconds + rng.uniform(3, 30), lambda then: step(then, context))
        return _request(seconds, prompt, rng.randint(20, 200))

    users.at(0.0, begin)
    return users.trace("agents", requests)


def sudden_change(requests: int = 12_000) -> Trace:
    """Made to mislead a policy that learns. Prompts of 4 and of 16 blocks come at random. In the
    first half those of 16 are sent again after 20 s, in the second half those of 4."""
    users = _Users(5)
    rng = users.rng
    half = requests / 2 * 2 / 3  # seconds: two prompts of three are new

    def begin(seconds: float) -> TracedRequest:
        users.at(seconds + rng.expovariate(1.0), begin)
        is_long = rng.random() < 0.5
        prompt = users.blocks(16 if is_long else 4)
        if is_long is (seconds < half):
            users.at(seconds + 20, lambda then: _request(then, prompt, 100))
        return _request(seconds, prompt, 100)

    users.at(0.0, begin)
    return users.trace("a sudden change", requests)


def loop(requests: int = 12_000) -> Trace:
    """Made for a policy that evicts what was used longest ago to find nothing: 30 prompts of 10
    blocks, one after the other, again and again."""
    users = _Users(6)
    prompts = [users.blocks(10) for _ in range(30)]

    def send(seconds: float) -> TracedRequest:
        users.at(seconds + 1.0, send)
        return _request(seconds, prompts[int(seconds) % len(prompts)], 100)

    users.at(0.0, send)
    return users.trace("a loop", requests)


def random_prompts(requests: int = 12_000) -> Trace:
    """Nothing to learn: each second one of 60 prompts of 4 blocks, all of them as likely."""
    users = _Users(7)
    rng = users.rng
    prompts = [users.blocks(4) for _ in range(60)]

    def send(seconds: float) -> TracedRequest:
        users.at(seconds + 1.0, send)
        return _request(seconds, rng.choice(prompts), rng.randint(1, 500))

    users.at(0.0, send)
    return users.trace("random prompts", requests)


def moving_set(requests: int = 12_000) -> Trace:
    """Made for a policy that evicts what was used longest ago: each second one of 100 prompts of
    10 blocks, of which another one is replaced after every 20 requests on average."""
    users = _Users(8)
    rng = users.rng
    prompts = [users.blocks(10) for _ in range(100)]

    def send(seconds: float) -> TracedRequest:
        users.at(seconds + 1.0, send)
        if rng.random() < 1 / 20:
            prompts[rng.randrange(len(prompts))] = users.blocks(10)
        return _request(seconds, rng.choice(prompts), rng.randint(1, 500))

    users.at(0.0, send)
    return users.trace("a moving set", requests)
