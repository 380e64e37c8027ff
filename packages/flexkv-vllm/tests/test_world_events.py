# SPDX-License-Identifier: Apache-2.0
"""KV events under vLLM's real scheduler: what subscribers are told is what can be loaded."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from disk_world import delay_reads, drive_of, flip_a_byte, slabs
from engine_world import BLOCK_TOKENS, MakeWorld, World, random_prompt
from patience import wait_until
from subscriber import DISK, HOST, Subscriber, drain, loadable
from traffic import Traffic, make_stems
from vllm.lora.request import LoRARequest
from world_config import IN_TREE, PLUGIN

from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.engine.scheduler.request_options import RequestOptions
from flexkv.types.mover import Status
from flexkv_vllm.compat.events import event_hash
from packages.inside import arena_of, below_of, described, index_of
from packages.inside_adapters import expect_stamps, groups_of, keys_of_side
from packages.inside_tiers import store_of


@pytest.mark.parametrize("entry", [PLUGIN, IN_TREE], ids=["plugin", "in-tree"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("block_tokens", [16, 48])
def test_a_stored_block_is_told_once_with_all_that_vllm_tells_of_it(
    make_world: MakeWorld, entry: str, ranks: int, block_tokens: int
) -> None:
    world = make_world(events=True, entry=entry, ranks=ranks, block_tokens=block_tokens)
    subscriber = Subscriber(world)
    prompt = random_prompt(random.Random(1), 300)
    request = world.requests[world.generate(prompt, salt="salt")]
    own = [e for e in world.recorder.events if getattr(e, "medium", None) == "GPU"]
    drain(subscriber)
    assert subscriber.told == loadable(world)
    blocks = 300 // block_tokens
    assert len(subscriber.stored) == blocks
    step = block_tokens // BLOCK_TOKENS
    names = [event_hash(each) for each in request.block_hashes]
    # Stores of two steps may end in any order.
    stored = sorted(subscriber.stored, key=lambda event: names.index(event.block_hashes[0]))
    for number, event in enumerate(stored):
        assert event.block_hashes == names[number * step : (number + 1) * step]
        assert event.parent_block_hash == (names[number * step - 1] if number else None)
        assert event.token_ids == prompt[number * block_tokens : (number + 1) * block_tokens]
        assert event.block_size == BLOCK_TOKENS
        assert event.group_idx == 0
    # As vLLM tells of the same blocks in its own cache.
    keys = list(itertools.chain(*(event.extra_keys or [None] * step for event in own)))
    ours = [e.extra_keys or [None] * step for e in stored]
    assert list(itertools.chain(*ours)) == keys[: blocks * step]
    assert keys[0] == ("salt",)
    kinds = {event.kv_cache_spec_kind for event in subscriber.stored}
    assert kinds == ({own[0].kv_cache_spec_kind} if entry == PLUGIN else {None})


def test_blocks_that_begin_alike_share_what_is_told(make_world: MakeWorld) -> None:
    """Their common vLLM blocks are told with the first FlexKV block, and removed with the last."""
    world = make_world(events=True, block_tokens=64, slots=4)
    subscriber = Subscriber(world)
    rng = random.Random(2)
    stem = random_prompt(rng, 40)
    for _ in range(12):
        world.generate(stem + random_prompt(rng, 100))
        drain(subscriber)
        assert subscriber.told == loadable(world)
    # Each request fills two blocks; the first vLLM blocks of the first one are the stem.
    first, _, later, _ = subscriber.stored[:4]
    assert len(first.block_hashes) == 4
    assert later.parent_block_hash == first.block_hashes[1]
    assert len(later.block_hashes) == 2
    assert len(later.token_ids) == 2 * BLOCK_TOKENS


def test_only_blocks_in_host_memory_are_described(make_world: MakeWorld) -> None:
    world = make_world(events=True, slots=4)
    subscriber = Subscriber(world)
    rng = random.Random(2)
    for _ in range(4):
        world.generate(random_prompt(rng, 50))
        drain(subscriber)
    in_host = {block.key for block in index_of(world.cache).blocks}
    assert described(world.events) == in_host


def test_a_block_on_disk_is_told_as_storage(make_world: MakeWorld) -> None:
    world = make_world(events=True, slots=14, disk_slots=100)
    subscriber = Subscriber(world)
    rng = random.Random(3)
    texts = [random_prompt(rng, 101) for _ in range(6)]
    for text in texts:
        world.generate(text)
        drain(subscriber)
    world.forget()
    assert len(subscriber.told[DISK]) == 36
    assert len(subscriber.told[HOST]) == 14
    assert subscriber.told == loadable(world)
    on_disk = [event for event in subscriber.stored if event.medium == DISK]
    assert sum(len(event.token_ids) for event in on_disk) == 36 * BLOCK_TOKENS
    world.step()
    await_descriptions(world)
    drain(subscriber)
    on_disk = [event for event in subscriber.stored if event.medium == DISK]
    assert len(on_disk) == 2 * 36, "again, after vLLM has cleared its own"
    assert sum(len(event.token_ids) for event in on_disk) == 2 * 36 * BLOCK_TOKENS, "in full"
    # Back in host memory, they are told there, too, and not again for the disk.
    world.generate(texts[0])
    drain(subscriber)
    assert subscriber.told == loadable(world)
    assert on_disk == [event for event in subscriber.stored if event.medium == DISK]


def test_what_the_disk_held_at_the_start_is_told(make_world: MakeWorld) -> None:
    """First only the names of the blocks; all about them once a request has asked for them."""
    rng = random.Random(4)
    texts = [random_prompt(rng, 101) for _ in range(3)]
    first = make_world(slots=14, disk_slots=100, block_tokens=32)
    for text in texts:
        first.generate(text)
        first.settle()
    first.close()
    world = make_world(events=True, slots=14, disk_slots=100, block_tokens=32)
    subscriber = Subscriber(world)
    world.step()
    subscriber.listen()
    assert len(subscriber.told[DISK]) == 9
    assert all(event.token_ids == [] for event in subscriber.stored)
    world.generate(texts[0])
    drain(subscriber)
    found = loadable(world)
    assert found[HOST] == subscriber.told[HOST]
    assert len(found[DISK]) == 6  # of the text that was asked for
    assert found[DISK] <= subscriber.told[DISK]
    assert len(subscriber.told[DISK]) == 6 + 6


def await_descriptions(world: World) -> None:
    """Run steps until the blocks that were on disk at the start are told."""
    index = drive_of(world).index
    wait_until(lambda: index.noted_slots == index.num_slots and not index.has_changes, world.step)


def test_after_a_restart_the_disk_is_told_in_full(make_world: MakeWorld) -> None:
    rng = random.Random(4)
    texts = [random_prompt(rng, 101) for _ in range(3)]
    options: dict[str, Any] = {"slots": 14, "disk_slots": 100, "block_tokens": 32, "events": True}
    first = make_world(**options)
    before = Subscriber(first)
    for text in texts:
        first.generate(text)
        first.settle()
    first.generate(random_prompt(rng, 101), salt="salt")
    drain(before)
    first.close()
    world = make_world(**options)
    subscriber = Subscriber(world)
    await_descriptions(world)
    drain(subscriber)
    told = {tuple(each.block_hashes): each for each in before.stored if each.medium == DISK}
    again = {tuple(each.block_hashes): each for each in subscriber.stored}
    whole = [each for each in again.values() if each.token_ids]
    assert len(again) == 4 * 3
    # Only the first block of a prompt has its salt, in vLLM's own events too.
    assert len(whole) == 4 * 3 - 1
    for each in whole:
        same = told[tuple(each.block_hashes)]
        assert (each.parent_block_hash, each.token_ids, each.block_size, each.group_idx) == (
            same.parent_block_hash,
            same.token_ids,
            same.block_size,
            same.group_idx,
        )
        assert each.medium == DISK
    tokens = [each.token_ids for each in whole]
    assert all(text[at : at + 32] in tokens for text in texts for at in (0, 32, 64))
    assert subscriber.told[DISK] >= loadable(world)[DISK]
    world.generate(texts[0])
    drain(subscriber)
    assert [each.medium for each in subscriber.stored[len(again) :]] == [HOST] * 3


def test_after_a_restart_a_step_tells_few_blocks_in_full(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv.tiers.disk.described_slots._BLOCKS_PER_CALL", 2)
    options: dict[str, Any] = {"slots": 14, "disk_slots": 100, "events": True}
    first = make_world(**options)
    text = random_prompt(random.Random(4), 7 * BLOCK_TOKENS + 1)
    first.generate(text)
    drain(Subscriber(first))
    first.close()
    world = make_world(**options)
    subscriber = Subscriber(world)
    index, told = drive_of(world).index, []
    while index.has_changes:
        seen = len(subscriber.stored)
        world.step()
        subscriber.listen()
        told.append(subscriber.stored[seen:])
    assert [len(each) for each in told if each] == [2, 2, 2, 1]
    tokens = [each.token_ids for some in told for each in some]
    assert sorted(tokens) == sorted(text[at : at + 16] for at in range(0, 7 * 16, 16))


def test_the_blocks_of_all_groups_on_disk_are_told_at_the_start(make_world: MakeWorld) -> None:
    options: dict[str, Any] = {"windows": (40,), "num_blocks": 128, "slots": 40, "disk_slots": 100}
    first = make_world(**options)
    first.generate(random_prompt(random.Random(9), 200))
    first.settle()
    written = loadable(first, whole=False)[DISK]
    assert {group for group, _ in written} == {0, 1}
    first.close()
    world = make_world(**options, events=True)
    subscriber = Subscriber(world)
    world.step()
    subscriber.listen()
    assert subscriber.told == {HOST: set(), DISK: written}


def test_blocks_of_adapters_on_disk_are_told_once_they_are_asked_for(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"one")
    adapter = LoRARequest("name", 7, str(tmp_path / "adapter"))
    prompt = random_prompt(random.Random(6), 101)
    for restarted in (False, True):
        world = make_world(events=True, slots=14, disk_slots=100)
        expect_stamps(world.events)
        subscriber = Subscriber(world)
        world.step()
        subscriber.listen()
        assert subscriber.told == {HOST: set(), DISK: set()}
        assert len(below_of(world.cache).tiers[0].drives[0].index) == (6 if restarted else 0)
        world.add(prompt, adapter=adapter)
        world.run()
        drain(subscriber)
        assert len(subscriber.told[DISK]) == 6
        assert subscriber.told == loadable(world)
        world.close()


def test_a_reset_removes_all_that_was_told(make_world: MakeWorld) -> None:
    world = make_world(events=True, slots=30, disk_slots=100)
    subscriber = Subscriber(world)
    world.generate(random_prompt(random.Random(5), 200))
    drain(subscriber)
    assert subscriber.told[HOST]
    assert subscriber.told[DISK]
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    drain(subscriber)
    assert subscriber.told == {HOST: set(), DISK: set()}


@pytest.mark.parametrize("block_tokens", [BLOCK_TOKENS, 2 * BLOCK_TOKENS])
def test_all_blocks_are_told_again_once_vllm_has_cleared_its_own(
    make_world: MakeWorld, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks a step, and in full if host memory has them; then what has changed meanwhile."""
    monkeypatch.setattr("flexkv_vllm.events._BLOCKS_PER_CALL", 2)
    monkeypatch.setattr("flexkv.tiers.disk.described_slots._BLOCKS_PER_CALL", 2)
    world = make_world(events=True, slots=24, disk_slots=100, block_tokens=block_tokens)
    subscriber = Subscriber(world)
    rng = random.Random(8)
    stem = random_prompt(rng, 5 * BLOCK_TOKENS)
    for _ in range(4):
        world.generate(stem + random_prompt(rng, 5 * BLOCK_TOKENS))
        drain(subscriber)
    before = {medium: {*told} for medium, told in subscriber.told.items()}
    assert before == loadable(world)
    subscriber.stored.clear()
    world.forget()
    assert world.connector.has_pending_push_work()
    steps = 0
    index = drive_of(world).index
    while world.connector.has_pending_push_work() or index.has_changes:
        seen = len(subscriber.stored)
        world.step()
        subscriber.listen()
        assert len(subscriber.stored) <= seen + 2
        steps += 1
    assert steps > len(before[HOST]) * BLOCK_TOKENS // block_tokens // 2
    assert subscriber.told == before
    in_host = [event for event in subscriber.stored if event.medium == HOST]
    assert all(len(event.token_ids) == len(event.block_hashes) * 16 for event in in_host)
    told: set[Any] = {None}
    for event in in_host:
        assert event.parent_block_hash in told, "before the block that it builds on"
        told.update(event.block_hashes)

    world.forget()
    world.step()
    world.forget()  # while blocks are being told again
    for _ in range(4):
        world.generate(stem + random_prompt(rng, 5 * BLOCK_TOKENS))
    while world.connector.has_pending_push_work() or index.has_changes:
        world.step()
    drain(subscriber)
    assert subscriber.told == loadable(world)
    # All are told once: with nothing to tell, no step does.
    subscriber.stored.clear()
    world.step()
    subscriber.listen()
    assert subscriber.stored == []


def test_blocks_of_adapters_are_told_by_vllms_hashes(make_world: MakeWorld, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"one")
    adapter = LoRARequest("name", 7, str(tmp_path / "adapter"))
    world = make_world(events=True, slots=14, disk_slots=100)
    expect_stamps(world.events)
    subscriber = Subscriber(world)
    world.add(random_prompt(random.Random(6), 101), adapter=adapter)
    world.run()
    drain(subscriber)
    assert len(subscriber.told[HOST]) == len(subscriber.told[DISK]) == 6
    assert subscriber.told == loadable(world)
    assert {(event.lora_id, event.lora_name) for event in subscriber.stored} == {(7, "name")}


def test_a_block_that_host_memory_loses_while_it_is_written_is_told_in_full(
    make_world: MakeWorld,
) -> None:
    world = make_world(events=True, block_tokens=32, slots=20, disk_slots=40)
    subscriber = Subscriber(world)
    written = threading.Event()
    world.closing.callback(written.set)
    store = store_of(drive_of(world))
    write = store.write

    def hanging(*args: Any, **named: Any) -> Any:
        written.wait()
        return write(*args, **named)

    store.write = hanging  # type: ignore[method-assign]
    request = world.requests[world.generate(random_prompt(random.Random(8), 101))]
    keys = keys_of_side(world.side).of(
        TrackedRequest(request, RequestOptions()), groups_of(world.side)[0]
    )
    wait_until(lambda: world.cache.lookup(keys) == 3, world.cache.poll)
    load = world.cache.load(keys[2:])
    assert load is not None
    arena_of(world.ranks[0].side).board.report(load.cell, 0, Status.FAILED)
    world.cache.poll()
    world.recorder.events += world.connector.take_events()
    subscriber.listen()
    assert subscriber.told[HOST] == loadable(world)[HOST]
    assert len(subscriber.told[HOST]) == 4
    written.set()
    drain(subscriber)
    assert len(subscriber.told[DISK]) == 6
    assert subscriber.told == loadable(world)
    assert len(described(world.events)) == world.cache.ready_blocks


def test_nobody_listens_and_nothing_is_kept(make_world: MakeWorld) -> None:
    world = make_world(slots=14, disk_slots=100)
    world.generate(random_prompt(random.Random(7), 101))
    world.settle()
    assert world.recorder.events == []
    assert world.cache.drain_changes() == []


def live_and_compare(
    world: World, rng: random.Random, stems: list[list[int]], directory: Path, whole: bool
) -> None:
    """After every request exactly that was told which can be loaded: all hashes of its blocks if
    `whole`, else at least the last ones."""
    subscriber = Subscriber(world)
    index = drive_of(world).index
    compared = 0

    def take() -> None:
        world.recorder.events += world.connector.take_events()

    def compare() -> None:
        nonlocal compared
        if rng.random() < 0.2:
            flip_a_byte(rng, slabs(directory))
        # What vLLM would take with its next step is all that was not told yet.
        world.recorder.events += world.scheduler.kv_cache_manager.take_events() or []
        take()
        wait_until(lambda: not index.has_changes, take)
        subscriber.listen()
        found = loadable(world, whole)
        assert subscriber.told[HOST] >= found[HOST]
        assert subscriber.told[DISK] >= found[DISK]
        if whole:
            assert subscriber.told == found
        compared += len(found[DISK])

    Traffic(
        world,
        rng,
        stems,
        most_steps=5,
        reset_rate=0.1,
        params=lambda: {"flexkv.pin": True} if rng.random() < 0.1 else None,
        disturb=compare,
    ).run(60, until=[lambda _: compared])
    drain(subscriber)
    assert len(described(world.events)) == world.cache.ready_blocks


@pytest.mark.parametrize("admission", ["write_through", "on_evict"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(2))
def test_random_traffic_tells_exactly_what_can_be_loaded(
    make_world: MakeWorld, tmp_path: Path, *, admission: str, asynchronous: bool, seed: int
) -> None:
    """Evictions, resets, failing copies, damage on disk, aborts, preemptions and a restart."""
    rng = random.Random(seed)
    stems = make_stems(rng, 6)
    for life in range(2):
        world = make_world(
            events=True,
            ranks=1 + seed % 2,
            block_tokens=32,
            num_blocks=40,
            slots=20,
            disk_slots=40,
            budget=96,
            lag=rng if asynchronous else None,
            settings={"ssd_admission": admission},
        )
        world.slow_down(rng, failure_rate=0.03)
        delay_reads(world, random.Random(seed))
        if life:
            await_descriptions(world)
        live_and_compare(world, rng, stems, tmp_path, whole=life == 0)
        world.close()
