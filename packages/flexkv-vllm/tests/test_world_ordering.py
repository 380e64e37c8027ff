# SPDX-License-Identifier: Apache-2.0
"""A load follows the last step that uses its blocks, under vLLM's real scheduler; see
`late_device`."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_world import World, random_prompt
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from late_device import STREAM, DeviceWorld
from traffic import Traffic, loaded, make_stems, preempted
from world_config import IN_MULTI, IN_TREE, PLUGIN

from flexkv_kernels.host_memory import HostMemory
from packages.inside import lose_track
from packages.inside_adapters import loads_alone


@pytest.fixture(autouse=True, scope="module")
def pages_are_on_a_device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostMemory, "work_so_far", lambda _: STREAM)
        yield


def make_device_world(directory: Path, *, defers: bool = True, **options: Any) -> DeviceWorld:
    """With `defers`, vLLM gives blocks of an ended request away when no step writes to them any
    more, as releases since 0.31 do; older ones do at once."""
    world = DeviceWorld(directory, **options)
    if not defers:
        world.scheduler.defer_block_free = False
    return world


def follows_last_and_earlier_steps(world: World) -> bool:
    assert isinstance(world, DeviceWorld)
    return {min(step - follows, 2) for step, follows in world.ordered} >= {1, 2}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("defers", [False, True], ids=["at-once", "deferred"])
@pytest.mark.parametrize("stages", [1, 2])
def test_loads_follow_the_steps_that_use_their_blocks(
    tmp_path: Path, asynchronous: bool, defers: bool, stages: int
) -> None:
    rng = random.Random(stages)
    world = make_device_world(
        tmp_path,
        num_blocks=40,
        slots=(30, 100)[asynchronous],
        stages=stages,
        block_tokens=rng.choice([16, 32]),
        budget=96,
        lag=rng if asynchronous else None,
        defers=defers,
    )
    until = [preempted, loaded, follows_last_and_earlier_steps]
    Traffic(world, rng, make_stems(rng, 4)).run(120, until=until)
    assert all(follows < step for step, follows in world.ordered)
    world.close()


STEMS = make_stems(random.Random(0), 3, longest=200)
ACTIONS = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(0, 2),
        st.integers(1, 200),
        st.integers(0, 40),
        st.integers(1, 9),
    ),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 7)),
    st.tuples(st.just("reset"), st.booleans()),
    st.tuples(st.just("restart"), st.booleans()),
    st.tuples(st.just("lose")),
)


def act(world: DeviceWorld, name: str, *args: Any) -> None:
    unfinished = [each for each in world.outputs if each in world.scheduler.requests]
    match name:
        case "add":
            stem, length, more, max_tokens = args
            tail = random_prompt(random.Random(more), more)
            world.add(STEMS[stem][:length] + tail, max_tokens)
        case "step":
            for _ in range(args[0]):
                world.step()
        case "abort" if unfinished:
            world.abort(unfinished[args[0] % len(unfinished)])
        case "reset":
            world.scheduler.reset_prefix_cache(reset_connector=args[0])
        case "restart":
            world.restart(reset_connector=args[0])
        case "lose":
            # As after an error while FlexKV looked at a step.
            lose_track(world.side)


LAG = st.none() | st.randoms(use_true_random=False)
WORLDS = st.one_of(
    st.just({"settings": {"load_mode": "layerwise"}}),
    st.fixed_dictionaries({"lag": LAG, "stages": st.integers(1, 2), "defers": st.booleans()}),
)


# Without shrinking, which takes minutes: an example says what was wrong all the same.
@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    options=WORLDS,
    blocks=st.integers(18, 40),
    actions=st.lists(ACTIONS, min_size=40, max_size=120),
)
def test_no_load_overtakes_a_step_that_uses_its_blocks(
    options: dict[str, Any], blocks: int, actions: list[tuple[Any, ...]]
) -> None:
    """`DeviceRank` compares each order with the steps that its workers were told of, and each byte
    with what it must be."""
    with tempfile.TemporaryDirectory() as directory:
        world = make_device_world(
            Path(directory), num_blocks=blocks, slots=60, budget=64, context=272, **options
        )
        for action in actions:
            act(world, *action)
        world.run()
        world.check_outputs()
        world.close()


@pytest.mark.parametrize(("entry", "alone"), [(PLUGIN, True), (IN_TREE, True), (IN_MULTI, False)])
def test_beside_another_connector_loads_follow_everything(
    tmp_path: Path, entry: str, alone: bool
) -> None:
    world = World(tmp_path, entry=entry)
    for rank in world.ranks:
        worker: Any = rank
        assert loads_alone(worker.side) is alone
    world.close()
