# SPDX-License-Identifier: Apache-2.0
"""An error before each line that FlexKV executes between vLLM's calls and its guards' ends: no
token is computed on a wrong byte, and afterwards no lease, copy or request that waits is left."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from disk_world import delay_reads
from engine_world import BLOCK_TOKENS, MakeWorld, World, random_prompt
from injection import SOURCES
from traffic import Traffic, make_stems

from flexkv.engine.boundary import Guard
from flexkv.engine.scheduler import fetches, storing
from flexkv_vllm.compat.core import binds_pool, fails_by_request
from packages.line_errors import SHARE, LineErrors

if TYPE_CHECKING:
    from offloading_world import MakeOffloadingWorld

pytestmark = pytest.mark.skipif(
    not (binds_pool() and fails_by_request()), reason="not all guards are reached in this vLLM"
)

SPARED = ("boundary.py",)
"""Files whose lines are spared: the guard's own."""

WORLDS = math.inf if SHARE == 1 else 3
"""The most worlds of a test: an error while stores are fenced ends all copies of a world."""

REQUESTS = 12
"""In a round; rounds follow as long as one lets a new line fail."""

SPARED_NOW = 0.6
"""Share of a line's executions that pass before it fails, so that much is under way then."""


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> LineErrors:
    """Errors where a guard of the boundary catches them."""
    depth = [0]
    leave = Guard.__exit__

    def enter(_: Guard) -> None:
        depth[0] += 1

    def exit_(guard: Guard, *error: object) -> bool:
        depth[0] -= 1
        return leave(guard, *error)  # type: ignore[arg-type]

    monkeypatch.setattr(Guard, "__enter__", enter)
    monkeypatch.setattr(Guard, "__exit__", exit_)
    rng = random.Random(2)
    return LineErrors(
        SOURCES,
        lambda file, _: file.endswith(SPARED),
        lambda _: depth[0] > 0,
        lambda: rng.random() < SPARED_NOW,
    )


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


def slowed(world: World, rng: random.Random) -> World:
    world.slow_down(rng)
    delay_reads(world, rng)
    return world


ONE_GROUP: dict[str, Any] = {"num_blocks": 40}
GROUPS: dict[str, Any] = {"num_blocks": 60, "windows": (70,)}


@pytest.mark.parametrize(
    ("groups", "mode", "policy"),
    [
        (ONE_GROUP, "layerwise", "lru"),
        (ONE_GROUP, "ahead", "auto"),
        (GROUPS, "async", "lru"),
        (GROUPS, "ahead", "auto"),
    ],
    ids=["layerwise", "steps ahead", "groups", "groups, steps ahead"],
)
def test_an_error_before_any_line_loses_nothing(
    request: pytest.FixtureRequest,
    errors: LineErrors,
    groups: dict[str, Any],
    mode: str,
    policy: str,
) -> None:
    request.getfixturevalue("monkeypatch").setattr(fetches, "LOOKAHEAD_SECONDS", math.inf)
    make_world: MakeWorld = request.getfixturevalue("make_world")
    rng = random.Random(1)
    ahead = mode == "ahead"

    def make() -> World:
        world = make_world(
            slots=40,
            disk_slots=200,
            budget=96,
            events=True,
            lag=random.Random(3) if ahead else None,
            settings={"load_mode": "async" if ahead else mode, "eviction_policy": policy},
            **groups,
        )
        return slowed(world, rng)

    fail_everywhere(errors, make, rng, restart_rate=0.1)


@pytest.mark.parametrize("windows", [(), (70,)], ids=["one group", "groups"])
def test_an_error_with_one_request_tears_no_store_of_another(
    make_world: MakeWorld, windows: tuple[int, ...]
) -> None:
    """Each line that adds blocks to the stores of a step fails for the first of three requests that
    fill blocks in this step."""
    errors = LineErrors(
        [Path(storing.__file__)],
        lambda _, function: function != "_add",
        every_line=True,
    )
    world = make_world(windows=windows, budget=2048, slots=400, num_blocks=400)
    rng, hits = random.Random(1), -1
    while hits < len(errors.hit):
        hits = len(errors.hit)
        prompts = [random_prompt(rng, 6 * BLOCK_TOKENS) for _ in range(3)]
        for prompt in prompts:
            world.add(prompt, 1)
        while not world.is_idle():
            errors.arm()
            try:
                world.step()
            finally:
                errors.disarm()
        world.settle()
        world.forget()
        for prompt in prompts:
            world.generate([*prompt, 1])
        world.check_outputs()
        world.forget()
    assert len(errors.hit) > 15


@pytest.mark.parametrize("groups", [ONE_GROUP, GROUPS], ids=["one group", "groups"])
def test_nor_does_one_behind_vllms_offloading_connector(
    request: pytest.FixtureRequest, errors: LineErrors, groups: dict[str, Any]
) -> None:
    pytest.importorskip("vllm.v1.kv_offload.config", reason="vLLM is older than 0.26")
    make_world: MakeOffloadingWorld = request.getfixturevalue("make_offloading_world")
    rng = random.Random(1)

    def make() -> World:
        world = make_world(slots=40, disk_slots=200, budget=96, events=True, **groups)
        return slowed(world, rng)

    fail_everywhere(errors, make, rng, restart_rate=0.0)
