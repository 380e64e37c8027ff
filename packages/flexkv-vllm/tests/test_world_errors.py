# SPDX-License-Identifier: Apache-2.0
"""An error before each line that FlexKV executes between vLLM's calls and its guards' ends: no
token is computed on a wrong byte, and afterwards no lease, copy or request that waits is left."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_world import delay_reads
from engine_world import MakeWorld, World
from injection import SOURCES
from traffic import Traffic, make_stems

from flexkv.adapter.guard import Guard
from flexkv_vllm.compat.core import binds_pool, fails_by_request
from packages.line_errors import SHARE, LineErrors

pytestmark = pytest.mark.skipif(
    not (binds_pool() and fails_by_request()), reason="not all guards are reached in this vLLM"
)

SPARED = ("guard.py", "disk/index.py", "disk/slot_map.py")
"""Files whose lines are spared: the guard's own, and those that only write elements of arrays,
which cannot fail."""

WORLDS = math.inf if SHARE == 1 else 3
"""The most worlds of a test: an error while stores are fenced ends all copies of a world."""

REQUESTS = 12
"""In a round; rounds follow as long as one lets a new line fail."""


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> LineErrors:
    """Errors where a guard of the edge catches them."""
    depth = [0]
    leave = Guard.__exit__

    def enter(_: Guard) -> None:
        depth[0] += 1

    def exit_(guard: Guard, *error: object) -> bool:
        depth[0] -= 1
        return leave(guard, *error)  # type: ignore[arg-type]

    monkeypatch.setattr(Guard, "__enter__", enter)
    monkeypatch.setattr(Guard, "__exit__", exit_)
    return LineErrors(SOURCES, lambda file, _: file.endswith(SPARED), lambda: depth[0] > 0)


def fail_everywhere(
    errors: LineErrors, make: Callable[[], World], rng: random.Random, **options: float
) -> None:
    """Traffic, in which each line fails once, until no new line is reached."""
    worlds, new = 0, 1
    while new and worlds < WORLDS:
        worlds += 1
        before = len(errors.hit)
        world = make()
        traffic = _traffic(world, errors, rng, **options)
        try:
            _run(world, traffic, errors)
            world.close()
        except BaseException as error:
            error.add_note(f"after errors before {_named(errors, before)}")
            raise
        new = len(errors.hit) - before
    assert len(errors.hit) > 40


def _traffic(world: World, errors: LineErrors, rng: random.Random, **options: float) -> Traffic:
    step = world.step

    def armed_step() -> None:
        errors.arm()
        try:
            step()
        finally:
            errors.disarm()

    world.step = armed_step  # type: ignore[method-assign]
    return Traffic(world, rng, make_stems(rng, 4), **options)  # type: ignore[arg-type]


def _run(world: World, traffic: Traffic, errors: LineErrors) -> None:
    hits = -1
    while hits < len(errors.hit):
        hits = len(errors.hit)
        traffic.run(REQUESTS, until=[])
        world.settle()
        world.check_outputs()


def _named(errors: LineErrors, start: int) -> list[str]:
    return [f"{Path(file).name}:{line}" for file, line in errors.hit[start:]]


@pytest.mark.parametrize("windows", [(), (70,)], ids=["one group", "groups"])
def test_an_error_before_any_line_loses_nothing(
    make_world: MakeWorld,
    monkeypatch: pytest.MonkeyPatch,
    errors: LineErrors,
    windows: tuple[int, ...],
) -> None:
    rng = random.Random(1)
    monkeypatch.setattr("flexkv.adapter.fetches.LOOKAHEAD_SECONDS", math.inf)
    mode = "async" if windows else "layerwise"

    def make() -> World:
        world = make_world(
            num_blocks=60 if windows else 40,
            slots=40,
            disk_slots=200,
            budget=96,
            events=True,
            windows=windows,
            settings={"load_mode": mode},
        )
        world.slow_down(rng)
        delay_reads(world, rng)
        return world

    fail_everywhere(errors, make, rng, restart_rate=0.1)
