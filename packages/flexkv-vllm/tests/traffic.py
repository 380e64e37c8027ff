# SPDX-License-Identifier: Apache-2.0
"""Random traffic: requests with shared prefixes, too many for the engine's blocks, and what may
happen to them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_world import World, random_prompt

from flexkv_vllm.weights import _pausing

SEEDS = pytest.mark.parametrize("seed", range(int(os.environ.get("TRAFFIC_SEEDS", "2"))))
"""Of random traffic. `nox -s nightly` tries more."""

ROUNDS = 20
"""At most. What disk threads are in time for is up to the machine; a round is nearly always enough,
and each begins with all that earlier ones have stored."""


def make_stems(rng: random.Random, count: int, longest: int = 299) -> list[list[int]]:
    return [random_prompt(rng, rng.randint(20, longest)) for _ in range(count)]


def preempted(world: World) -> int:
    return world.preemptions


def loaded(world: World) -> Any:
    """Blocks."""
    return world.cache.counters.loaded_blocks


def loads_more_than(blocks: int) -> Callable[[World], bool]:
    """Whether a world has loaded more blocks than these."""
    return lambda world: loaded(world) > blocks


def fetched(world: World) -> Any:
    """Blocks."""
    return world.cache.counters.fetched_blocks


def refused(world: World) -> int:
    """Copies."""
    return sum(mover.refused for mover in world.late_movers)


def _nothing() -> None:
    pass


@dataclass(slots=True)
class Traffic:
    """Requests whose prompts begin with a part of a stem, one after another.

    Attributes:
        stems: of the prompts.
        most_tokens: of an answer.
        most_steps: of the engine after each request.
        abort_rate: of requests that any unfinished one is aborted after.
        reset_rate: of requests that vLLM's own prefix cache is reset after.
        clear_rate: of those resets that reset FlexKV's, too, or reach it by a pause.
        restart_rate: of requests that vLLM's own prefix cache is reset after with all that run, as
            where an engine sleeps or its weights change: they begin anew.
        params: makes the parameters of a request.
        disturb: called after each request.
    """

    world: World
    rng: random.Random
    stems: Sequence[list[int]]
    most_tokens: int = 39
    most_steps: int = 3
    abort_rate: float = 0.2
    reset_rate: float = 0.05
    clear_rate: float = 0.3
    restart_rate: float = 0.05
    params: Callable[[], Any] = _nothing
    disturb: Callable[[], None] = _nothing
    _cleared: int = field(default=0, init=False)

    def run(self, requests: int, until: Sequence[Callable[[World], object]]) -> None:
        """Rounds of so many requests, each run to its end, until all of `until` was seen.

        Raises:
            AssertionError: something was not, or what a request said is wrong.
        """
        for number in range(ROUNDS):
            if number:
                self.world.settle()
            for _ in range(requests):
                self._add_one()
            self.world.run()
            self.world.check_outputs()
            unseen = [seen for seen in until if not seen(self.world)]
            if not unseen:
                break
        assert not unseen
        assert self.world.checked_bytes > 0

    def _add_one(self) -> None:
        world, rng = self.world, self.rng
        stem = rng.choice(self.stems)
        prompt = stem[: rng.randint(1, len(stem))] + random_prompt(rng, rng.randrange(30))
        world.add(prompt, max_tokens=rng.randint(1, self.most_tokens), params=self.params())
        for _ in range(rng.randint(0, self.most_steps)):
            world.step()
        # What vLLM does between two steps, in any order.
        happens = [
            (self.abort_rate, self._abort_one),
            (self.reset_rate, self._reset),
            (self.restart_rate, self._restart),
            (self.restart_rate, self._abort_one),
        ]
        rng.shuffle(happens)
        for rate, act in happens:
            if rng.random() < rate:
                act()
        self.disturb()

    def _abort_one(self) -> None:
        unfinished = [each for each in self.world.outputs if each in self.world.scheduler.requests]
        if unfinished:
            self.world.abort(self.rng.choice(unfinished))

    def _reset(self) -> None:
        clears = self._clears()
        with self._occasion(clears):
            self.world.scheduler.reset_prefix_cache(reset_connector=clears)

    def _restart(self) -> None:
        clears = self._clears()
        with self._occasion(clears):
            self.world.restart(reset_connector=clears)

    def _occasion(self, clears: bool) -> AbstractContextManager[None]:
        """Of the resets that reach FlexKV, every second one is a user's, and the others are those
        of pauses."""
        self._cleared += clears
        return _pausing(True) if clears and self._cleared % 2 else nullcontext()

    def _clears(self) -> bool:
        return self.rng.random() < self.clear_rate and self.world.may_reset_connector
