# SPDX-License-Identifier: Apache-2.0
"""Engines share one cache by the node's service, under vLLM's real scheduler; every byte is
checked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, hits, prompts
from engine_world import MakeWorld, random_prompt
from kv_pages import BLOCK_TOKENS
from patience import PATIENCE_SECONDS, wait_until
from served_world import MakeService, ServedWorld, assert_nothing_is_lost
from traffic import Traffic, loaded, loads_more_than, make_stems

from flexkv.client import FetchId
from flexkv.engine.scheduler.loads import Loads
from packages.flexkv.tests.service.served import Service
from packages.inside import announced, index_of, line_of, promised_slots, stores_of
from packages.tier_blocks import ready_blocks


def served(make_world: MakeWorld, service: Service, **options: Any) -> ServedWorld:
    settings = {"service": service.root, "always_load": True} | options.pop("settings", {})
    world = make_world(ServedWorld, settings=settings, **options)
    world.settle()
    return world


def test_settings_that_the_service_has_are_said_to_have_no_effect(
    make_service: MakeService, make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    served(make_world, make_service(), settings={"pin_seconds": 7})
    (line,) = (each for each in caplog.messages if "without effect" in each)
    assert line.endswith("has settings of its own: set it there")
    assert "pin_seconds" in line


def test_an_engine_loads_what_another_has_stored(
    make_service: MakeService, make_world: MakeWorld
) -> None:
    service = make_service()
    one, other = served(make_world, service), served(make_world, service)
    (text,) = prompts(1, 1)
    one.generate(text)
    one.settle()
    assert hits(other, text) == PROMPT_BLOCKS
    other.check_outputs()
    assert one.cache.counters.stored_blocks > 0 == other.cache.counters.stored_blocks
    assert_nothing_is_lost(service)


@pytest.mark.parametrize("comes", [True, False])
def test_an_engine_waits_for_what_another_is_storing(
    make_service: MakeService, make_world: MakeWorld, comes: bool
) -> None:
    service = make_service()
    one, other = served(make_world, service), served(make_world, service)
    (text,) = prompts(1, 1)
    (mover,) = one.slow_down(random.Random(1), (1 << 30, 1 << 30))
    one.add(text)
    one.step()
    wait_until(lambda: announced(service.pool.cache), lambda: None)
    request = other.add(text)
    wait_until(lambda: other.cache.fetch_state(FetchId(1)).missing == {}, other.step)
    for _ in range(20):
        other.step()
    assert other.outputs[request] == []
    if not comes:
        mover.close()
    one.settle()
    one.run()
    other.run()
    assert other.external_tokens[request] == comes * PROMPT_BLOCKS * BLOCK_TOKENS
    other.check_outputs()
    one.settle()
    assert_nothing_is_lost(service)


def test_an_engine_computes_nothing_of_a_prompt_that_another_computes(
    make_service: MakeService, make_world: MakeWorld
) -> None:
    """In many steps, between which no store is under way."""
    service = make_service(512)
    options: dict[str, Any] = {"num_blocks": 128, "max_requests": 1}
    one, other = (served(make_world, service, **options) for _ in range(2))
    text = random_prompt(random.Random(3), 60 * BLOCK_TOKENS + 5)
    one.add(text)
    one.step()
    wait_until(lambda: announced(service.pool.cache), lambda: None)
    request = other.add(text)
    while not one.is_idle():
        one.step()
        one.settle()
        for _ in range(3):
            other.step()
    other.run()
    assert other.external_tokens[request] == 60 * BLOCK_TOKENS
    other.check_outputs()
    assert not announced(service.pool.cache)
    assert_nothing_is_lost(service)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_of_many_steps_is_stored_whole(
    make_service: MakeService, make_world: MakeWorld, ahead: bool
) -> None:
    """Also where the next step is scheduled before the stores of the last one begin. Between two
    steps the service answers, and the copies of all steps but one end."""
    service = make_service(512)
    options: dict[str, Any] = {"num_blocks": 128, "max_requests": 1}
    one = served(make_world, service, lag=random.Random(1) if ahead else None, **options)
    other = served(make_world, service, **options)
    stores, engine = stores_of(one.cache), service.server.engines[0]

    def is_served() -> bool:
        told = any(store.is_told for store in stores.by_id.values())
        is_granted = 4 * len(stores.granted) > 3 * promised_slots(engine)
        return is_granted and not told and len(stores.by_id) <= 1

    rng = random.Random(2)
    for _ in range(3):
        text = random_prompt(rng, 60 * BLOCK_TOKENS + 5)
        one.add(text)
        while not one.is_idle():
            one.step()
            wait_until(is_served, one.poll)
        one.settle()
        assert hits(other, text) == 60
    assert one.cache.counters.refused_blocks == 0
    other.check_outputs()


@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_that_evict_each_others_blocks_see_right_bytes(
    make_service: MakeService, make_world: MakeWorld, ranks: int
) -> None:
    service = make_service(40)
    worlds = [served(make_world, service, ranks=ranks) for _ in range(2)]
    rng = random.Random(ranks)
    stems = make_stems(rng, 6)
    for _ in range(3):
        for world in worlds:
            Traffic(world, rng, stems).run(12, [loaded, service.evicted])
    for world in worlds:
        world.settle()
    assert_nothing_is_lost(service)


def test_an_engine_whose_keys_mean_nothing_elsewhere_keeps_its_blocks_to_itself(
    make_service: MakeService, make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service()
    (text,) = prompts(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr("flexkv_vllm.start_scheduler.shares_blocks", lambda _: False)
        one = served(make_world, service)
    other = served(make_world, service)
    for world, stranger in ((one, other), (other, one)):
        world.generate(text)
        world.settle()
        world.forget()
        assert hits(world, text) == PROMPT_BLOCKS
        world.forget()
        if world is one:
            assert hits(stranger, text) == 0
            stranger.settle()
            stranger.forget()
        world.check_outputs()
    assert_nothing_is_lost(service)


@pytest.mark.parametrize("changes", ["a reset", "other weights"])
def test_a_change_of_one_engine_leaves_the_others_alone(
    make_service: MakeService, make_world: MakeWorld, changes: str
) -> None:
    service = make_service()
    one, other = served(make_world, service), served(make_world, service)
    (text,) = prompts(2, 1)
    one.generate(text)
    one.settle()
    one.forget()
    if changes == "a reset":
        assert one.side.reset()
    else:
        one.side.weights_changed(sure=True)
    assert hits(one, text) == 0
    assert hits(other, text) == PROMPT_BLOCKS
    one.settle()
    one.forget()
    assert hits(one, text) == PROMPT_BLOCKS, "of its own, under its new keys"
    one.check_outputs()
    other.check_outputs()
    assert_nothing_is_lost(service)


@pytest.mark.parametrize("windows", [(), (40,)], ids=["full", "hybrid"])
def test_blocks_that_vllm_has_found_stay_until_it_orders_their_load(
    make_service: MakeService,
    make_world: MakeWorld,
    monkeypatch: pytest.MonkeyPatch,
    windows: tuple[int, ...],
) -> None:
    """However much another engine stores meanwhile."""
    slots = 24 * (1 + len(windows))
    service = make_service(slots, eviction_policy="lru")
    one, other = (served(make_world, service, windows=windows) for _ in range(2))
    (text,) = prompts(4, 1)
    one.generate(text)
    one.settle()
    one.forget()
    allocate = one.scheduler.kv_cache_manager.allocate_slots
    evicted = []

    def store_much(*args: Any, **options: Any) -> Any:
        if not evicted:
            for another in prompts(5, 200):
                other.generate(another)
                other.settle()
                other.forget()
                if service.pool.cache.counters.evicted_blocks >= 2 * slots:
                    break
            evicted.append(service.pool.cache.counters.evicted_blocks)
        return allocate(*args, **options)

    monkeypatch.setattr(one.scheduler.kv_cache_manager, "allocate_slots", store_much)
    assert hits(one, text) == PROMPT_BLOCKS
    assert evicted[0] >= 2 * slots
    assert one.cache.counters.failed_loads == 0
    one.check_outputs()
    assert_nothing_is_lost(service)


def test_a_hit_that_cannot_be_held_is_a_miss(
    make_service: MakeService, make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request must not wait for ever."""
    service = make_service()
    one = served(make_world, service)
    (text,) = prompts(1, 1)
    one.generate(text)
    one.settle()
    one.forget()
    monkeypatch.setattr(Loads, "hold", lambda *_: False)
    assert hits(one, text) == 0
    one.check_outputs()
    assert_nothing_is_lost(service)


def test_traffic_goes_on_when_the_service_ends(
    make_service: MakeService, make_world: MakeWorld
) -> None:
    service = make_service(40)
    worlds = [served(make_world, service) for _ in range(2)]
    rng = random.Random(5)
    stems = make_stems(rng, 5)
    for world in worlds:
        Traffic(world, rng, stems, clear_rate=0.0).run(10, [])
        world.forget()
    service.close()
    for world in worlds:
        loads_more = loads_more_than(loaded(world))
        Traffic(world, rng, stems, clear_rate=0.0).run(20, [loads_more])
    assert all(line_of(world.cache).is_cut for world in worlds)


def test_a_demoted_prompt_is_on_the_services_disk_alone(
    make_service: MakeService, make_world: MakeWorld, tmp_path: Path
) -> None:
    service = make_service(ssd_cache_gb=0.02, ssd_cache_dir=(str(tmp_path / "disk"),))
    one, other = served(make_world, service), served(make_world, service)
    text, kept = prompts(18, 2)
    one.generate(kept, max_tokens=1)
    one.settle()
    before = set(ready_blocks(index_of(service.pool.cache)))
    assert before
    one.generate(text, max_tokens=1, params={"flexkv.demote": True})
    one.settle()
    wait_until(lambda: not service.pool.busy, one.poll)
    wait_until(lambda: set(ready_blocks(index_of(service.pool.cache))) == before, one.poll)
    assert hits(other, text) == PROMPT_BLOCKS
    other.check_outputs()
    assert_nothing_is_lost(service)


@pytest.mark.parametrize("windows", [(), (40,)], ids=["full", "hybrid"])
def test_what_left_host_memory_comes_back_from_the_services_disk(
    make_service: MakeService,
    make_world: MakeWorld,
    tmp_path: Path,
    windows: tuple[int, ...],
) -> None:
    slots = 64 * (1 + len(windows))
    service = make_service(
        slots,
        ssd_cache_gb=0.02,
        ssd_cache_dir=(str(tmp_path / "disk"),),
        ssd_timeout_seconds=2 * PATIENCE_SECONDS,
    )
    one, other = (served(make_world, service, windows=windows) for _ in range(2))
    texts = prompts(3, 16)
    needed = PROMPT_BLOCKS * (1 + len(windows))
    for text in texts:
        wait_until(lambda: len(stores_of(one.cache).free) >= needed, one.poll)
        one.generate(text)
        one.settle()
        wait_until(lambda: not service.pool.busy, lambda: None)
    for text in texts:
        assert hits(other, text) == PROMPT_BLOCKS
        other.settle()
        wait_until(lambda: not service.pool.busy, lambda: None)
    other.check_outputs()
    fetched = service.pool.cache.counters.fetched_blocks
    assert fetched > 0
    assert_nothing_is_lost(service)


@pytest.mark.parametrize("windows", [(), (40,)], ids=["full", "hybrid"])
def test_what_another_node_wrote_to_a_shared_store_is_a_hit(
    make_service: MakeService,
    make_world: MakeWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    windows: tuple[int, ...],
) -> None:
    """For a model with windows, what a hit needs depends on the answers of the store."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")
    monkeypatch.setattr("flexkv.service.served_tiers.ANSWER_SECONDS", PATIENCE_SECONDS)
    (tmp_path / "bucket").mkdir(mode=0o700)
    settings: dict[str, Any] = {
        "objects_url": f"file://{tmp_path / 'bucket'}",
        "objects_question_seconds": PATIENCE_SECONDS,
        "objects_timeout_seconds": PATIENCE_SECONDS,
    }
    here, there = (make_service(64 * (1 + len(windows)), **settings) for _ in range(2))
    one, other = (served(make_world, each, windows=windows) for each in (here, there))
    text, unknown = prompts(1, 2)
    one.generate(text)
    one.settle()
    wait_until(lambda: not here.pool.busy, lambda: None)
    assert hits(other, text) == PROMPT_BLOCKS
    assert hits(other, unknown) == 0
    other.check_outputs()
    other.settle()
    wait_until(lambda: not there.pool.busy, lambda: None)
    assert_nothing_is_lost(there)


@pytest.mark.parametrize(("slots", "others"), [(2, 0), (4, 0), (8, 0), (13, 0), (13, 1)])
def test_a_prompt_larger_than_host_memory_loads_whole(
    make_service: MakeService, make_world: MakeWorld, tmp_path: Path, slots: int, others: int
) -> None:
    """Its parts follow each other: what an engine has copied makes room for the next part. With
    another engine, a fetch may bring half of the memory at most."""
    disk = {
        "ssd_cache_gb": 0.02,
        "ssd_cache_dir": (str(tmp_path / "disk"),),
        "ssd_admission": "write_through",
        "ssd_timeout_seconds": 2 * PATIENCE_SECONDS,
    }
    blocks = 14
    text = random_prompt(random.Random(14), blocks * BLOCK_TOKENS + 5)
    large = make_service(64, **disk)
    one = served(make_world, large, num_blocks=80)
    one.generate(text)
    one.settle()
    wait_until(lambda: not large.pool.busy, lambda: None)
    one.close()
    large.close(PATIENCE_SECONDS)
    small = make_service(slots, **disk)
    worlds = [served(make_world, small, num_blocks=80) for _ in range(1 + others)]
    for _ in range(2):
        found = hits(worlds[0], text)
        assert found == blocks if not others else found > 0
        worlds[0].settle()
        worlds[0].forget()
    worlds[0].check_outputs()
    assert_nothing_is_lost(small)


@pytest.mark.parametrize("seed", range(2))
def test_random_traffic_over_a_services_small_memory_never_computes_on_a_wrong_byte(
    make_service: MakeService,
    make_world: MakeWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Prompts have more blocks than there are slots, and come from disk in parts."""
    rng, went_on, next_part = random.Random(seed), list[int](), Loads.next_slots

    def noted(*args: Any) -> Any:
        slots = next_part(*args)
        went_on.extend([slots] if slots else ())
        return slots

    monkeypatch.setattr(Loads, "next_slots", noted)
    service = make_service(
        6 + 4 * seed,
        ssd_cache_gb=0.02,
        ssd_cache_dir=(str(tmp_path / "disk"),),
        ssd_timeout_seconds=2 * PATIENCE_SECONDS,
    )
    world = served(make_world, service, num_blocks=40, budget=96)
    world.slow_down(rng, failure_rate=0.02)
    stems = make_stems(rng, 4, longest=400)
    Traffic(world, rng, stems, most_steps=8).run(30, until=[lambda _: went_on])
    world.settle()
    world.assert_untracked()
    assert_nothing_is_lost(service)
