# SPDX-License-Identifier: Apache-2.0
"""An error between two objects that change one after the other loses no lease, copy or order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from disk_world import fill, prompts
from engine_world import MakeWorld, World, random_prompt
from injection import InjectedError
from kv_pages import BLOCK_TOKENS

from flexkv.engine.scheduler import loads, storing
from packages.inside_adapters import fetches_of_loads, side_stores, worker_copies

BLOCKS = 5


def failing_once(call: Callable[..., Any], errors: list[int], after: bool) -> Callable[..., Any]:
    """The call, which raises once: before it does anything, or when it has done all."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if errors:
            if after:
                call(*args, **kwargs)
            raise InjectedError(f"{errors.pop()}")
        return call(*args, **kwargs)

    return wrapped


def stored(world: World) -> list[int]:
    prompt = random_prompt(random.Random(4), BLOCKS * BLOCK_TOKENS + 3)
    world.generate(prompt)
    world.forget()
    return prompt


@pytest.mark.parametrize("mode", ["async", "layerwise"])
@pytest.mark.parametrize(("module", "name"), [(loads, "CopyOrder"), (loads, "_Running")])
def test_a_load_that_is_not_ordered_after_all_is_not_lost(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, mode: str
) -> None:
    world = make_world(settings={"load_mode": mode})
    prompt = stored(world)
    errors = [1]
    monkeypatch.setattr(module, name, failing_once(getattr(module, name), errors, after=True))
    world.generate(prompt)
    assert errors == []
    world.check_outputs()
    world.assert_at_rest()
    world.forget()
    assert world.external_tokens[world.generate(prompt)] > 0


def test_a_store_that_is_not_ordered_after_all_is_not_lost(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    errors = [1]
    running = failing_once(storing._Running, errors, after=True)
    monkeypatch.setattr(storing, "_Running", running)
    stored(world)
    assert errors == []
    world.assert_at_rest()
    assert stored(world)
    world.assert_at_rest()


def test_an_error_between_the_ends_of_two_fetches_keeps_none(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(slots=8, disk_slots=100)
    texts = prompts(8, 4)
    fill(world, texts)
    errors = [1]
    fetches = fetches_of_loads(world.side)
    end = failing_once(fetches._ended, errors, after=False)
    monkeypatch.setattr(fetches, "_ended", end)
    world.generate(texts[0])
    assert errors == []
    world.check_outputs()
    world.assert_at_rest()


def test_a_transfer_whose_end_is_not_handled_is_seen_again(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    prompt = stored(world)
    errors = [1]
    stores = side_stores(world.side)
    monkeypatch.setattr(stores, "ended", failing_once(stores.ended, errors, after=False))
    world.generate(prompt)
    assert errors == []
    world.assert_at_rest()


@pytest.mark.parametrize("after", [True, False])
def test_a_steps_orders_are_not_lost(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    world = make_world()
    prompt = stored(world)
    errors = [1]
    side = world.side
    taken = failing_once(side._take_orders, errors, after)
    for _ in range(2):
        errors[:] = [1]
        monkeypatch.setattr(side, "_take_orders", taken)
        assert world.external_tokens[world.generate(prompt)] == BLOCKS * BLOCK_TOKENS
        assert errors == []
        world.check_outputs()
        world.assert_at_rest()
        world.forget()


def test_a_load_that_has_begun_is_waited_for_after_an_error(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the engine would give its blocks to others while it writes to them."""
    world = make_world()
    prompt = stored(world)
    world.slow_down(random.Random(7), polls=(5, 6))
    errors = [1]
    copies = worker_copies(world.ranks[0].side)  # type: ignore[attr-defined]
    monkeypatch.setattr(copies, "begun", failing_once(copies.begun, errors, after=False))
    assert world.external_tokens[world.generate(prompt)] == BLOCKS * BLOCK_TOKENS
    assert errors == []
    assert world.cache.counters.failed_loads == 0
    world.check_outputs()
    world.assert_at_rest()
