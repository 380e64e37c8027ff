# SPDX-License-Identifier: Apache-2.0
"""KV events under vLLM's real scheduler: what subscribers are told is what can be loaded."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_world import BLOCK_TOKENS, MakeWorld, World, random_prompt
from late_mover import LateMover
from test_world_disk import delay_reads, flip_a_byte, settle, slabs
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from world_config import IN_TREE, PLUGIN

from flexkv_vllm.compat_events import event_hash
from flexkv_vllm.identity import adapter_stamp

HOST, DISK = "CPU", "STORAGE"


class Subscriber:
    """Keeps the set of hashes that it was told of, for each medium of FlexKV's."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.told: dict[str, set[Any]] = {HOST: set(), DISK: set()}
        self.stored: list[BlockStored] = []

    def listen(self) -> None:
        events, self.world.recorder.events = self.world.recorder.events, []
        for event in events:
            if getattr(event, "medium", None) not in self.told:
                continue  # vLLM's own
            told = self.told[event.medium]
            assert event.block_hashes
            assert len(set(event.block_hashes)) == len(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not told & set(event.block_hashes), "told twice"
                told |= set(event.block_hashes)
                self.stored.append(event)
            else:
                assert isinstance(event, BlockRemoved)
                assert told >= set(event.block_hashes), "never told"
                told -= set(event.block_hashes)


def known_blocks(world: World) -> Iterator[tuple[bytes, list[Any]]]:
    """Every FlexKV block that any request can have had: its key, and vLLM's hashes of it as events
    give them."""
    step = world.side._groups.members[0].engine_blocks
    for request in world.requests.values():
        hashes = request.block_hashes
        stamp = b"" if request.lora_request is None else adapter_stamp(request.lora_request)
        for start in range(0, len(hashes) - step + 1, step):
            names = [event_hash(each) for each in hashes[start : start + step]]
            yield hashes[start + step - 1] + stamp, names


def loadable(world: World, whole: bool = True) -> dict[str, set[Any]]:
    """What lookups find; of every block all hashes, or only the last one."""
    found: dict[str, set[Any]] = {HOST: set(), DISK: set()}
    tiers = world.cache._transfers.tiers
    for key, hashes in known_blocks(world):
        names = hashes if whole else hashes[-1:]
        if world.cache.lookup([key]):
            found[HOST].update(names)
        if tiers and tiers[0].contains([key])[0]:
            found[DISK].update(names)
    return found


def drain(world: World, subscriber: Subscriber) -> None:
    """Let an idle engine tell what has happened since its last step."""
    settle(world)
    world.step()
    subscriber.listen()


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
    drain(world, subscriber)
    assert subscriber.told == loadable(world)
    blocks = 300 // block_tokens
    assert len(subscriber.stored) == blocks
    step = block_tokens // BLOCK_TOKENS
    names = [event_hash(each) for each in request.block_hashes]
    for number, event in enumerate(subscriber.stored):
        assert event.block_hashes == names[number * step : (number + 1) * step]
        assert event.parent_block_hash == (names[number * step - 1] if number else None)
        assert event.token_ids == prompt[number * block_tokens : (number + 1) * block_tokens]
        assert event.block_size == BLOCK_TOKENS
        assert event.group_idx == 0
    # As vLLM tells of the same blocks in its own cache.
    keys = list(itertools.chain(*(event.extra_keys or [None] * step for event in own)))
    ours = [e.extra_keys or [None] * step for e in subscriber.stored]
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
        drain(world, subscriber)
        assert subscriber.told == loadable(world)
    # Each request fills two blocks; the first vLLM blocks of the first one are the stem.
    first, _, later, _ = subscriber.stored[:4]
    assert len(first.block_hashes) == 4
    assert later.parent_block_hash == first.block_hashes[1]
    assert len(later.block_hashes) == 2
    assert len(later.token_ids) == 2 * BLOCK_TOKENS


def test_a_block_on_disk_is_told_as_storage(make_world: MakeWorld) -> None:
    world = make_world(events=True, slots=14, disk_slots=100)
    subscriber = Subscriber(world)
    rng = random.Random(3)
    texts = [random_prompt(rng, 101) for _ in range(6)]
    for text in texts:
        world.generate(text)
        drain(world, subscriber)
    world.forget()
    assert len(subscriber.told[DISK]) == 36
    assert len(subscriber.told[HOST]) == 14
    assert subscriber.told == loadable(world)
    on_disk = [event for event in subscriber.stored if event.medium == DISK]
    assert sum(len(event.token_ids) for event in on_disk) == 36 * BLOCK_TOKENS
    # Back in host memory, they are told there, too.
    world.generate(texts[0])
    drain(world, subscriber)
    assert subscriber.told == loadable(world)


def test_what_the_disk_held_at_the_start_is_told(make_world: MakeWorld) -> None:
    """First only the names of the blocks; all about them once a request has asked for them."""
    rng = random.Random(4)
    texts = [random_prompt(rng, 101) for _ in range(3)]
    first = make_world(slots=14, disk_slots=100, block_tokens=32)
    for text in texts:
        first.generate(text)
        settle(first)
    first.close()
    world = make_world(events=True, slots=14, disk_slots=100, block_tokens=32)
    subscriber = Subscriber(world)
    world.step()
    subscriber.listen()
    assert len(subscriber.told[DISK]) == 9
    assert all(event.token_ids == [] for event in subscriber.stored)
    world.generate(texts[0])
    drain(world, subscriber)
    found = loadable(world)
    assert found[HOST] == subscriber.told[HOST]
    assert len(found[DISK]) == 6  # of the text that was asked for
    assert found[DISK] <= subscriber.told[DISK]
    assert len(subscriber.told[DISK]) == 6 + 6


def test_a_reset_removes_all_that_was_told(make_world: MakeWorld) -> None:
    world = make_world(events=True, slots=30, disk_slots=100)
    subscriber = Subscriber(world)
    world.generate(random_prompt(random.Random(5), 200))
    drain(world, subscriber)
    assert subscriber.told[HOST]
    assert subscriber.told[DISK]
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    drain(world, subscriber)
    assert subscriber.told == {HOST: set(), DISK: set()}


def test_blocks_of_adapters_are_told_by_vllms_hashes(make_world: MakeWorld, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"one")
    adapter = LoRARequest("name", 7, str(tmp_path / "adapter"))
    world = make_world(events=True, slots=14, disk_slots=100)
    world.side._events._has_own_names = True
    subscriber = Subscriber(world)
    world.add(random_prompt(random.Random(6), 101), adapter=adapter)
    world.run()
    drain(world, subscriber)
    assert len(subscriber.told[HOST]) == len(subscriber.told[DISK]) == 6
    assert subscriber.told == loadable(world)
    assert {(event.lora_id, event.lora_name) for event in subscriber.stored} == {(7, "name")}


def test_nobody_listens_and_nothing_is_kept(make_world: MakeWorld) -> None:
    world = make_world(slots=14, disk_slots=100)
    world.generate(random_prompt(random.Random(7), 101))
    settle(world)
    assert world.recorder.events == []
    assert world.cache.take_changes() == []


@pytest.mark.parametrize("admission", ["write_through", "on_evict"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(2))
def test_random_traffic_tells_exactly_what_can_be_loaded(
    make_world: MakeWorld, tmp_path: Path, *, admission: str, asynchronous: bool, seed: int
) -> None:
    """Evictions, resets, failing copies, damage on disk, aborts, preemptions and a restart."""
    rng = random.Random(seed)
    stems = [random_prompt(rng, rng.randrange(20, 300)) for _ in range(6)]
    compared = 0
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
        for rank in world.ranks:
            side: Any = rank.adapter._worker
            side._mover = LateMover(side._mover, rng, (0, 6), 0.03)
        delay_reads(world, random.Random(seed))
        subscriber = Subscriber(world)
        for _ in range(60):
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(1, len(stem) + 1)] + random_prompt(rng, rng.randrange(30))
            params = {"flexkv.pin": True} if rng.random() < 0.1 else None
            world.add(prompt, max_tokens=rng.randrange(1, 40), params=params)
            for _ in range(rng.randrange(6)):
                world.step()
            unfinished = [r for r in world.outputs if r in world.scheduler.requests]
            if unfinished and rng.random() < 0.2:
                world.abort(rng.choice(unfinished))
            if rng.random() < 0.1:
                world.scheduler.reset_prefix_cache(reset_connector=rng.random() < 0.3)
            if rng.random() < 0.2:
                flip_a_byte(rng, slabs(tmp_path))
            # What vLLM would take with its next step is all that was not told yet.
            world.recorder.events += world.connector.take_events()
            subscriber.listen()
            found = loadable(world, whole=life == 0)
            assert subscriber.told[HOST] >= found[HOST]
            assert subscriber.told[DISK] >= found[DISK]
            if life == 0:
                assert subscriber.told == found
            compared += len(found[DISK])
        world.run()
        drain(world, subscriber)
        assert len(world.side._events._described) == world.cache.ready_blocks
        world.check_outputs()
        world.close()
    assert compared > 0
