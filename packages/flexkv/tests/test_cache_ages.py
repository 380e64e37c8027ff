# SPDX-License-Identifier: Apache-2.0
"""A greatest age of blocks: older ones are found nowhere, also after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ages_clock import AgesClock
from toy_engine import BLOCK, ToyRequest
from toy_world import ToyWorld

from flexkv import CacheConfig, ConfigError
from flexkv.client import Hold, TransferEnd
from flexkv.figures.definitions import sample
from flexkv.types.presence import Presence
from packages.inside import index_of
from packages.patience import wait_until

PROMPT = [*range(3 * BLOCK)]
OTHER = [*range(100, 100 + 3 * BLOCK)]
AGE = 600

MakeWorld = Callable[..., ToyWorld]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> AgesClock:
    return AgesClock(monkeypatch)


@pytest.fixture
def make_world(tmp_path: Path, clock: AgesClock) -> Iterator[MakeWorld]:
    made: list[ToyWorld] = []

    def make(**options: Any) -> ToyWorld:
        settings = {"slots": 32, "disk_slots": 64, "max_age_seconds": AGE}
        made.append(ToyWorld(tmp_path, **(settings | options)))
        return made[-1]

    yield make
    made[-1].close()


def tiers(world: ToyWorld, prompt: list[int]) -> list[int]:
    """Blocks of a prompt in each tier."""
    keys = ToyRequest("q", prompt, 1).block_hashes
    return [sum(map(bool, has)) for has in world.engine.cache.where(keys).values()]


def expired(world: ToyWorld) -> list[float]:
    """Blocks that were too old for host memory and for the disk."""
    shared = world.engine.cache.figures().shared
    return [shared.get(sample("expired_blocks", tier), 0) for tier in ("host", "disk")]


def test_a_block_that_is_too_old_is_nowhere(make_world: MakeWorld, clock: AgesClock) -> None:
    world = make_world()
    world.generate(PROMPT)
    world.settle()
    assert tiers(world, PROMPT) == [3, 3]
    clock.pass_by(AGE / 2)
    assert world.hits(PROMPT) == 3
    world.generate(OTHER)
    world.settle()
    clock.pass_by(AGE / 2)
    assert tiers(world, PROMPT) == [0, 0]
    assert world.hits(PROMPT) == 0
    assert world.hits(OTHER) == 3
    world.settle()
    assert tiers(world, PROMPT) == [3, 3]  # computed again


def test_a_block_that_is_present_can_be_loaded_a_second_later(
    make_world: MakeWorld, clock: AgesClock
) -> None:
    world = make_world(disk_slots=0)
    world.generate(PROMPT)
    world.settle()
    cache, keys = world.engine.cache, ToyRequest("q", PROMPT, 1).block_hashes
    clock.pass_by(AGE / 2)
    while Presence.HOST in cache.presence(keys):
        clock.pass_by(1)
        transfer = cache.load(keys)
        assert transfer is not None
        cache.end_transfer(transfer.id, TransferEnd.CANCEL)


@pytest.mark.parametrize("disk_slots", [0, 64])
def test_old_blocks_free_their_slots(
    make_world: MakeWorld, clock: AgesClock, disk_slots: int
) -> None:
    world = make_world(disk_slots=disk_slots)
    world.generate(PROMPT)
    world.settle()
    world.engine.cache.hold(Hold.PIN, ToyRequest("q", PROMPT, 1).block_hashes)
    names = ["blocks:host"] if not disk_slots else ["blocks:host", "blocks:disk"]
    figures = world.engine.cache.figures
    assert [figures().shared[name] for name in names] == [3] * len(names)
    clock.pass_by(AGE)
    assert world.engine.cache.busy
    assert expired(world) == [0, 0]
    world.settle()
    assert [figures().shared[name] for name in names] == [0] * len(names)
    assert expired(world) == [3, 3 if disk_slots else 0]
    assert not world.engine.cache.busy


def test_a_restart_makes_no_block_younger(make_world: MakeWorld, clock: AgesClock) -> None:
    world = make_world()
    world.generate(PROMPT)
    world.settle()
    clock.pass_by(AGE - 200)
    world.restart()
    assert tiers(world, PROMPT) == [0, 3]
    assert world.hits(PROMPT) == 3  # host memory has them now, too
    clock.pass_by(200)
    assert tiers(world, PROMPT) == [0, 0]
    assert world.hits(PROMPT) == 0


def test_what_became_too_old_while_no_engine_ran_is_erased(
    make_world: MakeWorld, clock: AgesClock
) -> None:
    world = make_world()
    world.generate(PROMPT)
    world.settle()
    world.close()
    clock.pass_by(AGE)
    world = make_world()
    assert tiers(world, PROMPT) == [0, 0]
    assert expired(world) == [0, 3]
    world.close()
    assert tiers(make_world(max_age_seconds=None), PROMPT) == [0, 0]


def test_a_block_that_is_written_late_has_the_time_of_its_store(
    make_world: MakeWorld, clock: AgesClock
) -> None:
    world = make_world(slots=16, ssd_admission="on_evict")
    world.generate(PROMPT)
    world.settle()
    assert tiers(world, PROMPT) == [3, 0]
    clock.pass_by(AGE - 200)
    for number in range(6):
        world.generate([200 + number] * (4 * BLOCK))
        world.settle()
    assert tiers(world, PROMPT)[1] == 3
    world.restart()
    assert tiers(world, PROMPT) == [0, 3]
    clock.pass_by(200)
    assert tiers(world, PROMPT) == [0, 0]


def test_a_use_makes_no_block_younger(make_world: MakeWorld, clock: AgesClock) -> None:
    world = make_world(slots=16)
    world.generate(PROMPT)
    for _ in range(4):
        clock.pass_by(AGE / 5)
        assert world.hits(PROMPT) == 3
        world.settle()
    # A record is written again once half of all slots were written since.
    for number in range(12):
        world.generate([200 + number] * (4 * BLOCK))
        world.settle()
    world.hits(PROMPT)
    world.restart()
    clock.pass_by(AGE / 5)
    assert tiers(world, PROMPT) == [0, 0]


def test_a_clock_that_falls_makes_no_block_younger(make_world: MakeWorld, clock: AgesClock) -> None:
    world = make_world()
    world.generate(PROMPT)
    world.settle()
    clock.pass_by(AGE - 200)
    world.generate(OTHER)
    world.settle()
    clock.day -= 100_000
    world.restart()
    assert tiers(world, PROMPT) == [0, 3]
    clock.pass_by(200)
    assert tiers(world, PROMPT) == [0, 0]
    assert tiers(world, OTHER) == [0, 3]


def test_blocks_of_an_unknown_time_leave_at_a_start(make_world: MakeWorld) -> None:
    world = make_world(max_age_seconds=None)
    world.generate(PROMPT)
    world.settle()
    world.close()
    assert tiers(make_world(), PROMPT) == [0, 0]


def test_blocks_leave_an_idle_engine(
    make_world: MakeWorld, clock: AgesClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv.operators.engine_door._POLL_SECONDS", 0.01)
    world = make_world()
    world.generate(PROMPT)
    world.settle()
    world.engine.side.show(world.config.session_root, "toy")
    clock.pass_by(AGE)
    wait_until(lambda: not len(index_of(world.engine.cache)))


@pytest.mark.parametrize(
    "store",
    [
        {"objects_url": "s3://bucket/path"},
        {"mooncake_master": "a:1", "mooncake_metadata": "http://a:2/metadata"},
    ],
)
def test_a_shared_store_is_refused(store: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"max_age_seconds is 600, and .* allowed: one of them"):
        CacheConfig(max_age_seconds=AGE, **store)  # type: ignore[arg-type]
