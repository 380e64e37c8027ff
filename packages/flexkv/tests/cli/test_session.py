# SPDX-License-Identifier: Apache-2.0
"""`flexkv release` and `flexkv clear session` over the door of a toy engine at rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_engine import BLOCK, ToyRequest
from toy_world import ToyWorld

from packages.flexkv.tests.cli.stores import Flexkv
from packages.inside import index_of

SYSTEM = [*range(2 * BLOCK)]
ONE = [*SYSTEM, *range(100, 100 + 3 * BLOCK)]
OTHER = [*SYSTEM, *range(200, 200 + 3 * BLOCK)]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., ToyWorld]]:
    made: list[ToyWorld] = []

    def make(**options: Any) -> ToyWorld:
        made.append(ToyWorld(tmp_path, **options))
        made[-1].engine.side.show(made[-1].config.session_root, "toy")
        return made[-1]

    yield make
    for each in made:
        each.close()


def say(world: ToyWorld, prompt: list[int], session: str, **options: Any) -> ToyRequest:
    salt = options.pop("cache_salt", None)
    params = {"flexkv.session": session} | options
    request = world.generate(
        prompt, max_tokens=2 * BLOCK, kv_transfer_params=params, cache_salt=salt
    )
    world.settle()
    return request


def tiers(world: ToyWorld, request: ToyRequest) -> list[int]:
    """Whole blocks of a request, its answer included, in each tier."""
    keys = [*request.block_hashes]
    return [sum(map(bool, has)) for has in world.engine.cache.where(keys).values()]


def test_a_conversation_is_removed_with_its_answers_while_others_stay(
    flexkv: Flexkv, make_world: Callable[..., ToyWorld], tmp_path: Path
) -> None:
    world, run = make_world(disk_slots=64), tmp_path / "run"
    one, other = say(world, ONE, "a"), say(world, OTHER, "b")
    salted = say(world, ONE, "a", cache_salt="tenant")
    (count, _), rest = tiers(world, one), tiers(world, other)
    assert count > 5
    ended = flexkv("clear", "session", "a", run, "--yes")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith(f": removed {count - 2} blocks\n")
    assert tiers(world, one) == [2, 2]
    assert tiers(world, other) == rest
    assert tiers(world, salted)[0] > 5
    ended = flexkv("clear", "session", "a", run, "--salt", "tenant", "--yes")
    assert ended.code == 0
    assert tiers(world, salted) == [0, 0]
    again = flexkv("clear", "session", "a", run, "--yes")
    assert (again.code, again.out.endswith(": knows no such conversation\n")) == (1, True)


def test_a_released_conversation_is_retained_no_longer_and_evicted_first(
    flexkv: Flexkv, make_world: Callable[..., ToyWorld], tmp_path: Path
) -> None:
    world, run = make_world(slots=64), tmp_path / "run"
    one = say(world, ONE, "a")
    other = say(world, OTHER, "b", **{"flexkv.retain_seconds": 1000})
    assert index_of(world.engine.cache).pinned_blocks > 0
    before = tiers(world, one), tiers(world, other)
    ended = flexkv("release", "b", run)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith(f": released {before[1][0]} blocks\n")
    assert index_of(world.engine.cache).pinned_blocks == 0
    number = 0
    while tiers(world, other)[0] > len(SYSTEM) // BLOCK:
        assert number < 100
        say(world, [1000 + number] * (4 * BLOCK), f"c{number}")
        number += 1
    # The other one was used later.
    assert tiers(world, one)[0] > len(SYSTEM) // BLOCK
    assert flexkv("release", "none", run).code == 1


@pytest.mark.parametrize("command", [("release",), ("clear", "session", "--yes")])
def test_a_name_that_no_conversation_can_have_is_refused(
    flexkv: Flexkv, make_world: Callable[..., ToyWorld], tmp_path: Path, command: tuple[str, ...]
) -> None:
    make_world()
    for name, length in (("", 0), ("x" * 4097, 4097)):
        ended = flexkv(*command, name, tmp_path / "run")
        assert ended.code == 2
        assert f"has {length} characters; allowed: 1 to 4096" in ended.err


def test_nothing_is_removed_without_a_yes(
    flexkv: Flexkv, make_world: Callable[..., ToyWorld], tmp_path: Path
) -> None:
    world = make_world()
    one = say(world, ONE, "a")
    assert flexkv("clear", "session", "a", tmp_path / "run").code != 0
    assert tiers(world, one)[0] > 5
