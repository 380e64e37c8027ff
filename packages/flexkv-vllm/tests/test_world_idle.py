# SPDX-License-Identifier: Apache-2.0
"""What happens, and is reported, in an engine that serves no request."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from disk_world import drive_of
from engine_world import BLOCK_TOKENS, MakeWorld, World, random_prompt
from patience import wait_until
from subscriber import DISK, HOST, Subscriber, loadable
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from world_config import IN_TREE, PLUGIN

from flexkv.engine.scheduler.scheduled_step import STEP_ON_SECONDS
from flexkv.figures.definitions import sample
from packages.inside import below_of, index_of, tier_figures
from packages.inside_adapters import set_idle_clock
from packages.inside_tiers import store_of
from packages.tier_blocks import ready_blocks

pytestmark = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "has_pending_push_work"),
    reason="this vLLM steps for requests only",
)

BLOCKS = 5


class Clock:
    """In place of the time that passes without requests."""

    def __init__(self, world: World) -> None:
        self.now = 0.0
        set_idle_clock(world.side, lambda: self.now)


class Gate:
    """Writes to a world's disk begin only when it is opened."""

    def __init__(self, world: World) -> None:
        self._open = threading.Event()
        store = store_of(drive_of(world))
        write = store.write

        def waiting(*args: Any, **named: Any) -> Any:
            self._open.wait()
            return write(*args, **named)

        store.write = waiting
        world.closing.callback(self.open)

    def open(self) -> None:
        self._open.set()


def step_on(world: World) -> None:
    """As vLLM's loop does between requests."""
    wait_until(lambda: not world.scheduler.has_requests(), world.step)


def serve(world: World, prompt: list[int]) -> None:
    """One request, and no step after its last."""
    request = world.add(prompt, max_tokens=1)
    wait_until(lambda: request not in world.scheduler.requests, world.step)


def reported(world: World, *names: str) -> float:
    """The last value of a gauge that vLLM was given."""
    return next(each[sample(*names)] for each in reversed(world.stats) if sample(*names) in each)


def stored_keys(world: World, blocks: int) -> list[bytes]:
    keys = list(ready_blocks(index_of(world.cache)))
    assert len(keys) == blocks
    return keys


def test_capacities_are_reported_before_the_first_request(make_world: MakeWorld) -> None:
    world = make_world(slots=30, disk_slots=100)
    Clock(world)
    world.step()
    assert world.scheduler.has_requests(), "a rank may report what it copied a step later"
    step_on(world)
    assert reported(world, "capacity_blocks", "host") == 30
    ((_, disk, *_),) = tier_figures(world.cache)
    assert reported(world, "capacity_blocks", "disk") == disk.slots > 0
    assert len(world.stats) == 1
    assert not world.scheduler.has_requests()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_what_a_burst_left_is_written_and_its_queues_are_reported_empty(
    make_world: MakeWorld, asynchronous: bool
) -> None:
    rng = random.Random(1)
    world = make_world(disk_slots=100, ranks=2, lag=rng if asynchronous else None)
    Clock(world)
    gate = Gate(world)
    serve(world, random_prompt(rng, BLOCKS * BLOCK_TOKENS + 1))
    gate.open()
    step_on(world)
    keys = stored_keys(world, BLOCKS)
    assert below_of(world.cache).tiers[0].contains(keys) == [True] * BLOCKS
    assert reported(world, "blocks", "disk") == BLOCKS
    for queue in (("queue_length", "device"), ("queue_length", "disk"), ("queue_bytes", "disk")):
        assert reported(world, *queue) == 0
    stored = sum(each.get(sample("copied_bytes", "device", "store"), 0) for each in world.stats)
    assert stored == BLOCKS * BLOCK_TOKENS * 2 * 4 * 16


def test_a_disk_that_hangs_lets_the_engine_rest(make_world: MakeWorld) -> None:
    world = make_world(disk_slots=100)
    clock = Clock(world)
    gate = Gate(world)
    serve(world, random_prompt(random.Random(2), BLOCKS * BLOCK_TOKENS + 1))
    for _ in range(20):
        assert world.scheduler.has_requests()
        world.step()
    clock.now += STEP_ON_SECONDS
    assert not world.scheduler.has_requests()
    gate.open()


FEW = 3
"""Changes that one call returns."""


@pytest.fixture
def few_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexkv.cache._CHANGES", FEW)


def rest_long(world: World, clock: Clock) -> None:
    """For longer than the engine steps on after a request, until no step is needed."""
    world.settle()
    clock.now += STEP_ON_SECONDS
    step_on(world)


@pytest.mark.usefixtures("few_changes")
@pytest.mark.parametrize("entry", [PLUGIN, IN_TREE], ids=["plugin", "in-tree"])
def test_an_engine_at_rest_tells_all_events(make_world: MakeWorld, entry: str) -> None:
    """Of a burst of evictions, a reset, and of what the disk holds at the start."""
    rng = random.Random(4)
    options = {"entry": entry, "events": True, "slots": 20, "disk_slots": 100}
    world = make_world(**options)
    clock, subscriber = Clock(world), Subscriber(world)
    for _ in range(4):
        serve(world, random_prompt(rng, 10 * BLOCK_TOKENS + 1))
        rest_long(world, clock)
        subscriber.listen()
        assert subscriber.told == loadable(world)
    on_disk = subscriber.told[DISK]
    assert len(subscriber.told[HOST]) == 20
    assert len(on_disk) == 40
    world.close()

    again = make_world(**options)
    clock, subscriber = Clock(again), Subscriber(again)
    step_on(again)
    subscriber.listen()
    assert subscriber.told == {HOST: set(), DISK: on_disk}
    clock.now += STEP_ON_SECONDS
    assert again.connector.reset_cache()
    step_on(again)
    subscriber.listen()
    assert subscriber.told == {HOST: set(), DISK: set()}


@pytest.mark.usefixtures("few_changes")
def test_an_error_in_telling_events_lets_the_engine_rest(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(events=True)
    clock, subscriber = Clock(world), Subscriber(world)

    def broken(_: object) -> None:
        raise RuntimeError("broken by the test")

    with monkeypatch.context() as patch:
        patch.setattr(world.events, "_fill", broken)
        serve(world, random_prompt(random.Random(5), 4 * FEW * BLOCK_TOKENS + 1))
        rest_long(world, clock)
        subscriber.listen()
        assert subscriber.told[HOST] == set()
    serve(world, [1])
    rest_long(world, clock)

    def is_told() -> bool:
        world.step()
        subscriber.listen()
        return len(subscriber.told[HOST]) == 4 * FEW

    wait_until(is_told, lambda: None)
    assert subscriber.told == loadable(world)
