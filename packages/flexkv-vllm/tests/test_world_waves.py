# SPDX-License-Identifier: Apache-2.0
"""Prompts on disk that are larger than host memory, under vLLM's real scheduler; every byte is
checked."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from disk_world import drive_of, fill, flip_a_byte, hits, prompts, read_a_block_a_step, slabs
from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from patience import wait_until
from traffic import SEEDS, Traffic, fetched, make_stems
from vllm.v1.request import RequestStatus

from flexkv.engine.scheduler.loads import Loads
from flexkv_vllm.compat.core import fails_by_request
from packages.inside import index_of
from packages.inside_tiers import store_of
from packages.tier_blocks import ready_blocks

BLOCKS = 14
LONG, OTHER = (random_prompt(random.Random(i), BLOCKS * BLOCK_TOKENS + 5) for i in (14, 15))
WINDOWS = [(), (70,)] if fails_by_request() else [()]
"""Of models without and with several KV cache groups."""


class Loaded(list[bytes]):
    """The keys that a world loads from now on, in order."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        load = world.cache.load

        def noted(keys: Sequence[bytes]) -> Any:
            transfer = load(keys)
            self.extend(keys if transfer is not None else ())
            return transfer

        monkeypatch.setattr(world.cache, "load", noted)


def on_disk(make_world: MakeWorld, *texts: list[int], **settings: Any) -> list[list[bytes]]:
    """Write prompts to disk by an engine with enough host memory. Returns the keys of each."""
    keys = list[list[bytes]]()
    for text in texts:
        world = make_world(slots=4 * BLOCKS, disk_slots=300, num_blocks=80, **settings)
        fill(world, [text])
        keys.append(list(ready_blocks(index_of(world.cache))))
        fill(world, prompts(16, 10))
        world.close()
    return keys


def small_world(make_world: MakeWorld, slots: int, **settings: Any) -> World:
    return make_world(slots=slots, disk_slots=300, num_blocks=80, **settings)


@pytest.mark.parametrize("admission", ["write_through", "on_evict"])
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 13])
def test_a_prompt_larger_than_host_memory_loads_whole(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, slots: int, admission: str
) -> None:
    settings = {"ssd_admission": admission}
    (keys,) = on_disk(make_world, LONG, settings=settings)
    world = small_world(make_world, slots, settings=settings)
    for _ in range(2):
        loaded = Loaded(world, monkeypatch)
        request_id = world.generate(LONG)
        assert sorted(loaded) == sorted(keys)
        assert world.external_tokens[request_id] == BLOCKS * BLOCK_TOKENS
        world.settle()
        fill(world, prompts(17, 2))
    assert world.cache.counters.fetched_blocks >= 2 * BLOCKS - slots
    world.check_outputs()


@pytest.mark.skipif(not fails_by_request(), reason="one KV cache group for connectors")
@pytest.mark.parametrize("windows", [(40,), (16, 200)], ids=str)
@pytest.mark.parametrize("slots", [1, 2, 5, 13])
def test_blocks_of_several_groups_load_whole_in_parts(
    make_world: MakeWorld, slots: int, windows: tuple[int, ...]
) -> None:
    on_disk(make_world, LONG, windows=windows)
    world = small_world(make_world, slots, windows=windows)
    for _ in range(2):
        request_id = world.generate(LONG)
        assert world.external_tokens[request_id] == BLOCKS * BLOCK_TOKENS
        world.settle()
        fill(world, prompts(17, 2))
    world.check_outputs()
    world.assert_at_rest()


@pytest.mark.parametrize("own", [0, 1, 3, 7])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_load_in_parts_begins_inside_a_block(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, slots: int, own: int
) -> None:
    """vLLM has so many blocks of the prompt itself; each of FlexKV's is three of them."""
    text = random_prompt(random.Random(20), 8 * 48 + 5)
    (keys,) = on_disk(make_world, text, block_tokens=48)
    world = small_world(make_world, slots, block_tokens=48)
    if own:
        world.generate(text[: own * BLOCK_TOKENS + 1], params={"flexkv.load": False})
    loaded = Loaded(world, monkeypatch)
    request_id = world.generate(text)
    assert loaded == keys[own // 3 :]
    assert world.external_tokens[request_id] == 8 * 48 - own * BLOCK_TOKENS
    world.check_outputs()


@pytest.mark.parametrize("slots", [3, 8, 12])
def test_a_prompt_larger_than_host_memory_gets_to_disk_whole(
    make_world: MakeWorld, slots: int
) -> None:
    """Each turn stores what follows the blocks that were loaded for it, a part at least."""
    world = small_world(make_world, slots)
    found = [0]
    while found[-1] < BLOCKS:
        found.append(hits(world, LONG))
        fill(world, prompts(19, 1))
        assert found[-1] > found[-2] or len(found) == 2
    world.check_outputs()


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@SEEDS
def test_random_traffic_over_a_small_memory_never_computes_on_a_wrong_byte(
    make_world: MakeWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    asynchronous: bool,
    seed: int,
    windows: tuple[int, ...],
) -> None:
    """Prompts have up to twice as many blocks as there are slots. Bytes on disk change."""
    rng = random.Random(seed)
    went_on, next_part = list[int](), Loads.next_slots

    def noted(*args: Any) -> Any:
        slots = next_part(*args)
        went_on.extend([slots] if slots else ())
        return slots

    monkeypatch.setattr(Loads, "next_slots", noted)
    world = make_world(
        ranks=1 + seed % 2,
        num_blocks=40 * (1 + len(windows)),  # each prompt fits, or vLLM would never compute it
        slots=4 + 4 * (seed % 2),
        disk_slots=200,
        budget=96,
        lag=rng if asynchronous else None,
        settings={"always_load": True},
        windows=windows,
    )
    world.slow_down(rng, failure_rate=0.02)
    stems = make_stems(rng, 4, longest=400)

    def disturb() -> None:
        if rng.random() < 0.05:
            flip_a_byte(rng, slabs(tmp_path))

    traffic = Traffic(world, rng, stems, most_steps=8, clear_rate=0.1, disturb=disturb)
    traffic.run(30, until=[fetched, lambda _: went_on])
    world.settle()
    world.assert_untracked()


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("slots", range(1, 9))
def test_two_prompts_larger_than_host_memory_do_not_hold_each_other_up(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, slots: int, after: int
) -> None:
    """Each loads what it gets slots for, and computes the rest; one of them loads whole."""
    settings = {"always_load": True}
    first, second = on_disk(make_world, LONG, OTHER)
    world = small_world(make_world, slots, settings=settings)
    loaded = Loaded(world, monkeypatch)
    one = world.add(LONG)
    for _ in range(after):
        world.step()
    other = world.add(OTHER)
    world.run()
    assert sorted(each for each in loaded if each in first) == sorted(first)
    of_other = [each for each in loaded if each in second]
    assert of_other == second[: len(of_other)]
    assert world.external_tokens[one] == BLOCKS * BLOCK_TOKENS
    assert len(world.outputs[other]) == 4
    world.check_outputs()
    world.assert_at_rest()


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_an_abort_between_two_parts_gives_everything_back(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    on_disk(make_world, LONG)
    world = small_world(make_world, slots)
    request_id, loaded = begin_load(world, monkeypatch)
    world.abort(request_id)
    world.run()
    world.assert_at_rest()
    count = len(loaded)
    assert world.external_tokens[world.generate(LONG)] == BLOCKS * BLOCK_TOKENS
    assert len(loaded) == count + BLOCKS
    world.check_outputs()


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_the_rest_is_computed_if_nothing_gives_slots_back(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """As if requests that the engine has no blocks for held them: to wait would be a deadlock."""
    on_disk(make_world, LONG)
    world = small_world(make_world, slots, settings={"always_load": True})
    request_id, loaded = begin_load(world, monkeypatch)
    index, names = index_of(world.cache), itertools.count()
    poll, taken = world.cache.poll, list[Any]()

    def take_all() -> Any:
        ended = poll()
        while (block := index.reserve(b"%d" % next(names), None)) is not None:
            taken.append(block)
        return ended

    monkeypatch.setattr(world.cache, "poll", take_all)
    wait_until(lambda: world.outputs[request_id], world.step)
    assert 0 < len(loaded) < BLOCKS
    monkeypatch.setattr(world.cache, "poll", poll)
    index.abandon(taken)
    world.run()
    world.check_outputs()
    world.assert_at_rest()


def begin_load(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Loaded]:
    """Begin to load `LONG`, as far as the first part."""
    loaded = Loaded(world, monkeypatch)
    request_id = world.add(LONG)
    wait_until(lambda: loaded, world.step)
    assert len(loaded) < BLOCKS
    assert world.requests[request_id].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return request_id, loaded


@pytest.mark.parametrize("slots", [1, 3, 6])
def test_the_rest_of_a_prompt_that_proves_unreadable_is_computed(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slots: int
) -> None:
    (keys,) = on_disk(make_world, LONG)
    world = small_world(make_world, slots)
    request_id, loaded = begin_load(world, monkeypatch)
    (slab,) = slabs(tmp_path)
    slab.write_bytes(bytes(slab.stat().st_size))
    world.run()
    # What one part has loaded, and the next has read by then.
    assert 0 < len(loaded) <= 2 * slots
    assert loaded == keys[: len(loaded)]
    assert world.cache.counters.damaged_fetches > 0
    assert len(world.outputs[request_id]) == 4
    world.check_outputs()
    world.assert_at_rest()


@pytest.mark.parametrize("slots", [1, 3, 6])
def test_a_part_that_the_drive_does_not_read_is_not_asked_for_again(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    on_disk(make_world, LONG)
    world = small_world(make_world, slots)
    request_id, loaded = begin_load(world, monkeypatch)

    def fail(*args: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(store_of(drive_of(world)), "read", fail)
    world.run()
    assert 0 < len(loaded) <= 2 * slots
    assert 0 < world.cache.counters.failed_fetches <= slots
    assert len(world.outputs[request_id]) == 4
    world.check_outputs()
    world.assert_at_rest()


def _renew(world: World) -> object:
    return world.side.weights_changed(sure=True)


def _reset(world: World) -> object:
    return world.side.reset()


def _empty(world: World) -> object:
    return world.side.empty()


@pytest.mark.parametrize("end", [_renew, _reset, _empty])
@pytest.mark.parametrize("slots", [1, 3, 6])
def test_nothing_is_loaded_after_a_reset_between_two_parts(
    make_world: MakeWorld,
    monkeypatch: pytest.MonkeyPatch,
    slots: int,
    end: Callable[[World], object],
) -> None:
    """The disk may keep blocks of the weights before, by the keys of before."""
    monkeypatch.setattr("flexkv.engine.scheduler.fetches.LOOKAHEAD_SECONDS", math.inf)
    on_disk(make_world, LONG)
    world = small_world(make_world, slots)
    read_a_block_a_step(world)  # so that most of a part is still read
    request_id, loaded = begin_load(world, monkeypatch)
    count = len(loaded)
    assert end(world)
    world.run()
    assert len(loaded) == count
    assert len(world.outputs[request_id]) == 4
    world.check_outputs()
    world.assert_at_rest()
