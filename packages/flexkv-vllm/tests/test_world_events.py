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
from traffic import SEEDS, Traffic, make_stems
from vllm.lora.request import LoRARequest
from world_config import IN_TREE, PLUGIN

from flexkv.engine.scheduler.options import RequestOptions
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.types.mover import Status
from flexkv_vllm import events
from flexkv_vllm.compat.events import event_hash
from packages.inside import arena_of, below_of, described, index_of
from packages.inside_adapters import (
    expect_stamps,
    failures_of,
    groups_of,
    keys_of_side,
)
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
        assert event.block_hashes == [names[(number + 1) * step - 1]]
        assert event.parent_block_hash == (names[number * step - 1] if number else None)
        assert event.token_ids == prompt[number * block_tokens : (number + 1) * block_tokens]
        assert event.block_size == block_tokens
        assert event.group_idx == 0
    # As vLLM tells of the same blocks in its own cache.
    keys = list(itertools.chain(*(event.extra_keys or [None] * step for event in own)))
    ours = [event.extra_keys or [None] for event in stored]
    assert list(itertools.chain(*ours)) == keys[: blocks * step : step]
    assert keys[0] == ("salt",)
    kinds = {event.kv_cache_spec_kind for event in subscriber.stored}
    assert kinds == ({own[0].kv_cache_spec_kind} if entry == PLUGIN else {None})


def test_no_router_credits_more_of_a_prompt_than_is_loaded(make_world: MakeWorld) -> None:
    """A FlexKV block of several of vLLM's is loaded whole: what another prompt has in common with
    its beginning is not promised."""
    world = make_world(events=True, block_tokens=64, slots=4)
    subscriber = Subscriber(world)
    rng = random.Random(2)
    stem = random_prompt(rng, 64 + 40)

    def credited(request: Any) -> int:
        """Tokens up to the furthest hash that a router knows, wherever it begins to walk."""
        names = [event_hash(each) for each in request.block_hashes]
        known = [at for at, name in enumerate(names) if (0, name) in subscriber.told[HOST]]
        return BLOCK_TOKENS * (1 + max(known, default=-1))

    for number in range(12):
        asked = world.add(stem + random_prompt(rng, 60))
        believed = credited(world.requests[asked])
        world.run()
        assert believed == world.external_tokens[asked] == 64 * (number > 0)
        drain(subscriber)
        assert subscriber.told == loadable(world)
        world.forget()
        drain(subscriber)


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
    assert len(found[DISK]) == 3  # of the text that was asked for
    assert found[DISK] <= subscriber.told[DISK]
    assert len(subscriber.told[DISK]) == 9


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
    assert len(whole) == 4 * 3
    for each in whole:
        same = told[tuple(each.block_hashes)]
        for field in set(each.__struct_fields__) - {"session_id"}:
            assert getattr(each, field) == getattr(same, field)
        assert each.medium == DISK
    assert [each.extra_keys for each in whole if each.extra_keys] == [[("salt",)]]
    tokens = [each.token_ids for each in whole]
    assert all(text[at : at + 32] in tokens for text in texts for at in (0, 32, 64))
    assert subscriber.told[DISK] >= loadable(world)[DISK]
    world.generate(texts[0])
    drain(subscriber)
    assert [each.medium for each in subscriber.stored[len(again) :]] == [HOST] * 3


def test_after_a_restart_a_step_tells_few_blocks_in_full(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv.tiers.disk.descriptions._BLOCKS_PER_CALL", 2)
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
    written = loadable(first)[DISK]
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
    monkeypatch.setattr("flexkv.tiers.disk.descriptions._BLOCKS_PER_CALL", 2)
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
    assert steps > len(before[HOST]) // 2
    assert subscriber.told == before
    in_host = [event for event in subscriber.stored if event.medium == HOST]
    assert all(len(event.token_ids) == block_tokens for event in in_host)
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
    assert len(subscriber.told[HOST]) == 2
    written.set()
    drain(subscriber)
    assert len(subscriber.told[DISK]) == 3
    assert subscriber.told == loadable(world)
    assert len(described(world.events)) == world.cache.ready_blocks


def step_until_told(world: World, subscriber: Subscriber) -> None:
    """Until exactly that is told which can be loaded."""

    def is_told() -> bool:
        world.step()
        subscriber.listen()
        return subscriber.told == loadable(world)

    wait_until(is_told, lambda: None)


def test_after_an_error_all_is_told_again(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of changes that were drained, and of blocks that have left meanwhile."""
    world = make_world(events=True, slots=14, disk_slots=20)
    subscriber = Subscriber(world)
    rng = random.Random(11)
    made, errors = events.block_stored, iter([True, True])

    def fail(**fields: Any) -> Any:
        if next(errors, False):
            raise ValueError
        return made(**fields)

    for _ in range(4):
        world.generate(random_prompt(rng, 101))
        drain(subscriber)
    before = {medium: {*told} for medium, told in subscriber.told.items()}
    monkeypatch.setattr(events, "block_stored", fail)
    world.generate(random_prompt(rng, 101))
    world.settle()
    step_until_told(world, subscriber)
    assert next(errors, None) is None
    assert before[HOST] - subscriber.told[HOST]
    assert failures_of(world.connector) == {"the call take_events": 2}


def test_lasting_errors_list_the_blocks_in_few_steps(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(events=True)
    watched: list[int] = []
    drain(Subscriber(world))
    monkeypatch.setattr(events, "block_stored", lambda **_: 1 // 0)
    monkeypatch.setattr(world.cache, "watch", lambda: watched.append(1))
    world.generate(random_prompt(random.Random(12), 101))
    world.settle()
    world.step()
    monkeypatch.setattr(world.cache, "drain_changes", lambda: 1 // 0)
    for _ in range(100):
        world.step()
    assert 2 < len(watched) < 8
    assert not world.connector.has_pending_push_work()


@pytest.mark.parametrize("lost", ["added", "removed"])
def test_an_audit_finds_what_was_never_told(
    make_world: MakeWorld,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lost: str,
) -> None:
    """Changes that somebody else has drained."""
    monkeypatch.setattr(events, "_AUDIT_TAKES", 1)
    monkeypatch.setattr(events, "_AUDITED", 4096)
    world = make_world(events=True, slots=14, disk_slots=100)
    subscriber = Subscriber(world)
    rng = random.Random(13)
    for _ in range(2):
        world.generate(random_prompt(rng, 101))
    drain(subscriber)
    for _ in range(20):
        world.step()
    assert "events differ" not in caplog.text
    if lost == "added":
        take, stolen = world.cache.drain_changes, list[Any]()

        def steal() -> list[Any]:
            changes = take()
            if stolen or not changes:
                return changes
            stolen.append(changes)
            return []

        monkeypatch.setattr(world.cache, "drain_changes", steal)
        world.generate(random_prompt(rng, 33), max_tokens=1)
    else:
        index_of(world.cache).clear()
        assert world.cache.drain_changes()
    world.settle()
    step_until_told(world, subscriber)
    assert "KV events differ from the cache" in caplog.text


@pytest.mark.parametrize("named_by", ["salt", "adapter"])
def test_the_beginning_of_a_prompt_on_disk_is_told_in_full_after_a_reset(
    make_world: MakeWorld, tmp_path: Path, named_by: str
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"one")
    adapter = LoRARequest("name", 7, str(tmp_path / "adapter"))
    world = make_world(events=True, slots=8, disk_slots=100)
    if named_by == "adapter":
        expect_stamps(world.events)
    subscriber = Subscriber(world)
    rng = random.Random(14)
    text = random_prompt(rng, 101)
    by_salt = named_by == "salt"
    request = world.requests[
        world.add(text, salt="salt" if by_salt else None, adapter=None if by_salt else adapter)
    ]
    world.run()
    drain(subscriber)
    for _ in range(2):
        world.generate(random_prompt(rng, 140))
        drain(subscriber)
    names = [(0, event_hash(each)) for each in request.block_hashes[:6]]
    assert not subscriber.told[HOST].intersection(names)
    told = {each.block_hashes[0]: each for each in subscriber.stored if each.medium == DISK}
    subscriber.stored.clear()
    world.forget()
    world.step()
    await_descriptions(world)
    drain(subscriber)
    assert subscriber.told == loadable(world)
    again = {each.block_hashes[0]: each for each in subscriber.stored if each.medium == DISK}
    for name in again.keys() & {name for _, name in names}:
        for field in set(again[name].__struct_fields__) - {"session_id"}:
            assert getattr(again[name], field) == getattr(told[name], field)
    root = again[names[0][1]]
    assert root.parent_block_hash is None
    assert root.token_ids == text[:BLOCK_TOKENS]
    assert root.extra_keys == [("salt" if by_salt else "name",)]


def test_nobody_listens_and_nothing_is_kept(make_world: MakeWorld) -> None:
    world = make_world(slots=14, disk_slots=100)
    world.generate(random_prompt(random.Random(7), 101))
    world.settle()
    assert world.recorder.events == []
    assert world.cache.drain_changes() == []


def live_and_compare(
    world: World, rng: random.Random, stems: list[list[int]], directory: Path, *, first: bool
) -> None:
    """After every request exactly that was told which can be loaded; in a later life, also what
    requests of the `first` one have stored."""
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
        found = loadable(world)
        assert subscriber.told[HOST] >= found[HOST]
        assert subscriber.told[DISK] >= found[DISK]
        if first:
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
@SEEDS
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
        live_and_compare(world, rng, stems, tmp_path, first=life == 0)
        world.close()
