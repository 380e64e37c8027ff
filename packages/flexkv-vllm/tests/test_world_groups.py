# SPDX-License-Identifier: Apache-2.0
"""Models with sliding windows beside full attention, under vLLM's real scheduler."""

from __future__ import annotations

import random
from functools import partial

import pytest
from disk_world import PROMPT_BLOCKS, Hang, fill, prompts
from engine_world import MakeWorld, random_prompt
from kv_pages import BLOCK_TOKENS
from patience import wait_until
from subscriber import DISK, HOST, Subscriber, loadable
from traffic import SEEDS, Traffic, loaded, make_stems, preempted, refused

from flexkv.types.presence import Presence
from flexkv_vllm.compat.core import fails_by_request
from packages.inside_adapters import failed_requests, fetches_of_loads, tracked_requests

pytestmark = pytest.mark.skipif(
    not fails_by_request(), reason="this vLLM keeps one KV cache group for connectors"
)

WINDOWS = pytest.mark.parametrize("windows", [(70,), (16, 200)], ids=str)


@WINDOWS
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("length", [20, 33, 96, 97, 300])
def test_a_forgotten_prefix_comes_back(
    make_world: MakeWorld, windows: tuple[int, ...], ranks: int, length: int
) -> None:
    world = make_world(windows=windows, ranks=ranks, num_blocks=128)
    prompt = random_prompt(random.Random(1), length)
    first = world.generate(prompt)
    world.forget()
    second = world.generate(prompt)
    assert world.outputs[second] == world.outputs[first]
    # The last token is computed in any case.
    assert world.external_tokens[second] == (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_only_what_a_window_needs_is_stored(make_world: MakeWorld) -> None:
    world = make_world(windows=(40,), num_blocks=128)
    world.generate(random_prompt(random.Random(2), 20 * BLOCK_TOKENS), max_tokens=1)
    # To go on behind block 20, or 19, a window of 40 tokens needs the blocks from 16 on.
    world.settle()
    assert world.cache.counters.stored_blocks == 20 + 4


def test_only_what_a_window_needs_is_loaded(make_world: MakeWorld) -> None:
    world = make_world(windows=(40,), num_blocks=128)
    prompt = random_prompt(random.Random(3), 20 * BLOCK_TOKENS + 1)
    world.generate(prompt, max_tokens=1)
    world.forget()
    world.generate(prompt, max_tokens=1)
    world.settle()
    assert world.cache.counters.loaded_blocks == 20 + 3


def test_the_answer_is_part_of_the_next_prompt(make_world: MakeWorld) -> None:
    world = make_world(windows=(40,), num_blocks=128)
    rng = random.Random(4)
    prompt = random_prompt(rng, 100)
    turn = world.generate(prompt, max_tokens=90)
    world.forget()
    second = world.generate(prompt + world.outputs[turn] + random_prompt(rng, 20))
    assert world.external_tokens[second] == (100 + 90 - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_where_prompts_part_the_window_is_stored_the_second_time(make_world: MakeWorld) -> None:
    world = make_world(windows=(40,), num_blocks=128)
    rng = random.Random(5)
    stem = random_prompt(rng, 10 * BLOCK_TOKENS)
    hits = []
    for _ in range(3):
        request_id = world.generate(stem + random_prompt(rng, 100))
        hits.append(world.external_tokens[request_id])
        world.forget()
    assert hits == [0, 0, len(stem)]


def test_a_window_without_its_end_is_no_hit(make_world: MakeWorld) -> None:
    """The window's blocks are the first to leave a small arena; what is left is of no use."""
    world = make_world(windows=(200,), num_blocks=128, slots=12)
    prompt = random_prompt(random.Random(6), 300)
    first = world.generate(prompt)
    world.forget()
    second = world.generate(prompt)
    assert world.outputs[second] == world.outputs[first]


@WINDOWS
def test_windows_come_back_from_disk(make_world: MakeWorld, windows: tuple[int, ...]) -> None:
    world = make_world(windows=windows, num_blocks=128, disk_slots=200)
    rng = random.Random(7)
    prompt = random_prompt(rng, 300)
    first = world.generate(prompt)
    world.settle()
    for _ in range(4):
        world.generate(random_prompt(rng, 300))
        world.settle()
    assert world.cache.lookup(world.requests[first].block_hashes[:1]) == 0
    world.forget()
    second = world.generate(prompt)
    assert world.outputs[second] == world.outputs[first]
    assert world.external_tokens[second] == 299 // BLOCK_TOKENS * BLOCK_TOKENS
    assert world.cache.counters.fetched_blocks > 0


def test_while_the_disk_reads_a_request_is_not_looked_up_again(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks for it in every step, and its prompt may be long."""
    world = make_world(windows=(40,), num_blocks=128, slots=30, disk_slots=200)
    texts = prompts(11, 6)
    fill(world, texts)
    hang = Hang(world)
    looked: list[bytes] = []
    presence = world.cache.presence

    def counted(keys: list[bytes]) -> list[Presence]:
        looked.extend(keys)
        return presence(keys)

    monkeypatch.setattr(world.cache, "presence", counted)
    request_id = world.add(texts[0])
    world.step()
    wait_until(lambda: hang.begun, world.step)
    assert looked
    looked.clear()
    for _ in range(5):
        world.step()
    assert world.outputs[request_id] == []
    assert looked == []
    hang.end()
    world.run()
    assert world.external_tokens[request_id] == PROMPT_BLOCKS * BLOCK_TOKENS


def test_what_was_found_before_an_error_does_not_count_after_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks may have left meanwhile."""
    world = make_world(windows=(40,), num_blocks=128, slots=30, disk_slots=200)
    texts = prompts(11, 6)
    fill(world, texts)
    hang = Hang(world)
    request_id = world.add(texts[0])
    wait_until(lambda: hang.begun, world.step)
    tracked = tracked_requests(world.side)[request_id]
    assert tracked.plan is not None

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(fetches_of_loads(world.side), "offer", fail)
        world.step()
    assert tracked.plan is None
    hang.end()
    world.run()
    world.check_outputs()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_failed_loads_are_recomputed_or_fail_their_request_only(
    make_world: MakeWorld, policy: str, ranks: int
) -> None:
    world = make_world(windows=(70,), num_blocks=128, policy=policy, ranks=ranks)
    prompt = random_prompt(random.Random(8), 300)
    first = world.generate(prompt)
    world.forget()
    # One rank alone fails.
    rank = world.ranks[-1]
    late = world.slow_down(random.Random(8))[-1]
    late.failure_rate = 1.0
    second = world.generate(prompt)
    assert world.outputs[second] == (world.outputs[first] if policy == "recompute" else [])
    assert world.cache.counters.failed_loads == 1
    late.failure_rate = 0.0
    third = world.generate(random_prompt(random.Random(9), 100))
    assert len(world.outputs[third]) == 4
    assert failed_requests(rank.flexkv) == set()


def tell_more(subscriber: Subscriber) -> None:
    world = subscriber.world
    world.recorder.events += world.connector.take_events()
    subscriber.listen()


def knows_all(subscriber: Subscriber) -> bool:
    return subscriber.told == loadable(subscriber.world)


def test_events_tell_each_groups_blocks(make_world: MakeWorld) -> None:
    """By group and medium exactly what lookups find, also after a restart, once asked for."""
    rng = random.Random(10)
    prompts = [random_prompt(rng, 100 + 40 * n) for n in range(5)]
    for _ in range(2):
        world = make_world(windows=(40,), num_blocks=128, slots=24, disk_slots=100, events=True)
        subscriber = Subscriber(world)
        for prompt in (*prompts, prompts[0]):
            world.generate(prompt)
            world.settle()
            world.forget()
            world.recorder.events += world.scheduler.kv_cache_manager.take_events() or []
            tell_more(subscriber)
            assert subscriber.told[HOST] == loadable(world)[HOST]
        # After vLLM's reset, the disk reads first what it tells.
        wait_until(partial(knows_all, subscriber), partial(tell_more, subscriber))
        for medium in (HOST, DISK):
            assert {group for group, _ in subscriber.told[medium]} == {0, 1}
        world.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@SEEDS
def test_random_traffic_never_computes_on_a_wrong_byte(
    make_world: MakeWorld, ranks: int, asynchronous: bool, seed: int
) -> None:
    """As in `test_world`, with blocks that vLLM takes back while their request runs, and a disk."""
    rng = random.Random(seed)
    world = make_world(
        ranks=ranks,
        num_blocks=60,
        slots=(40, 150)[seed % 2],
        disk_slots=(0, 300)[(seed + ranks) % 2],
        budget=96,
        windows=rng.choice([(20,), (70,), (30, 100)]),
        lag=rng if asynchronous else None,
    )
    world.slow_down(rng, failure_rate=0.05)
    Traffic(world, rng, make_stems(rng, 4)).run(120, until=[preempted, loaded, refused])
    world.settle()
    world.assert_untracked()
    # Nothing of vLLM's is held for good: all blocks but the null block are free.
    assert world.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 60 - 1
