# SPDX-License-Identifier: Apache-2.0
"""Operators change the cache of an engine under vLLM's real scheduler, idle or not."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from asked_engine import call_engine
from disk_world import PROMPT_BLOCKS, Hang, fill, hits, prompts
from engine_world import BLOCK_TOKENS, MakeWorld, World, random_prompt
from patience import wait_until
from subscriber import DISK, HOST, Subscriber, drain

from flexkv.engine.scheduler import operator_calls
from flexkv.operators.ask_door import AskError
from flexkv.types.mover import Direction
from packages.inside import copies_of, index_of
from packages.tier_blocks import ready_blocks


def host(world: World, prompt: list[int]) -> int:
    """Blocks of a prompt in host memory."""
    (places,) = call_engine(world, "/lookup", tokens=prompt)
    return int(places["tiers"][0]["blocks"])


def flood(world: World, seed: int) -> None:
    """Evict what may be evicted from a host memory of 40 blocks."""
    fill(world, prompts(seed, 8))


def test_an_idle_engine_warms_a_prompt_after_a_restart(make_world: MakeWorld) -> None:
    first = make_world(slots=40, disk_slots=200)
    (prompt,) = prompts(5, 1)
    fill(first, [prompt])
    first.close()
    world = make_world(slots=40, disk_slots=200)
    assert host(world, prompt) == 0
    warmed = call_engine(world, "/warm", tokens=prompt)
    assert (warmed["done"], warmed["reason"]) == (PROMPT_BLOCKS, "")
    assert host(world, prompt) == PROMPT_BLOCKS
    assert call_engine(world, "/warm", tokens=prompt)["done"] == PROMPT_BLOCKS
    assert hits(world, prompt) == PROMPT_BLOCKS
    world.assert_at_rest()


@pytest.mark.parametrize("windows", [(), (64,)], ids=["one group", "two groups"])
def test_an_idle_engine_demotes_a_prompt(make_world: MakeWorld, windows: tuple[int, ...]) -> None:
    world = make_world(
        slots=64, disk_slots=200, windows=windows, settings={"ssd_admission": "second_hit"}
    )
    prompt, other = prompts(5, 2)
    fill(world, [prompt])
    most = world.cache.ready_blocks
    fill(world, [other])
    demoted = call_engine(world, "/demote", tokens=prompt)
    assert (demoted["done"], demoted["reason"]) == (PROMPT_BLOCKS, "")
    assert (host(world, prompt), host(world, other)) == (0, PROMPT_BLOCKS)
    assert world.cache.ready_blocks == most
    assert [hits(world, each) for each in (prompt, other)] == [PROMPT_BLOCKS] * 2
    world.check_outputs()
    world.settle()
    world.assert_at_rest()


def test_an_engine_without_a_disk_demotes_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])
    demoted = call_engine(world, "/demote", tokens=prompt)
    assert (demoted["done"], demoted["reason"]) == (0, "the cache has no lower tier")


def test_a_quarter_of_host_memory_is_warmed_at_once(make_world: MakeWorld) -> None:
    first = make_world(slots=64, disk_slots=200)
    prompt = random_prompt(random.Random(4), 20 * BLOCK_TOKENS)
    fill(first, [prompt])
    first.close()
    world = make_world(slots=64, disk_slots=200)
    warmed = call_engine(world, "/warm", tokens=prompt)
    assert (warmed["done"], "16 blocks, is warmed at once" in warmed["reason"]) == (16, True)
    assert call_engine(world, "/warm", tokens=prompts(9, 1)[0])["done"] == 0
    world.assert_at_rest()


def test_pinned_blocks_outlast_a_flood_until_they_are_unpinned(make_world: MakeWorld) -> None:
    world = make_world(slots=40)
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])
    pinned = call_engine(world, "/pin", tokens=prompt, name="system", seconds=1000)
    assert (pinned["done"], pinned["reason"]) == (PROMPT_BLOCKS, "")
    flood(world, 6)
    assert host(world, prompt) == PROMPT_BLOCKS
    assert call_engine(world, "/unpin", name="other")["name"] == "other"
    flood(world, 7)
    assert host(world, prompt) == PROMPT_BLOCKS
    call_engine(world, "/unpin", name="system")
    flood(world, 8)
    assert host(world, prompt) == 0


def test_half_of_host_memory_can_be_pinned(make_world: MakeWorld) -> None:
    world = make_world(slots=40)
    texts = [random_prompt(random.Random(seed), 15 * BLOCK_TOKENS) for seed in range(2)]
    fill(world, texts)
    assert call_engine(world, "/pin", tokens=texts[0])["done"] == 15
    pinned = call_engine(world, "/pin", tokens=texts[1])
    assert (pinned["done"], pinned["reason"]) == (5, "the limit of pinned blocks left out 10")
    assert index_of(world.cache).pinned_blocks == 20


@pytest.mark.parametrize(
    ("question", "error"),
    [
        ({"seconds": 0}, "seconds is 0; allowed: above 0, up to 2592000"),
        ({"seconds": 2592001}, "seconds is 2592001; allowed: above 0, up to 2592000"),
        ({"name": ""}, "the name of a pin is ''"),
        ({"name": "x" * 65}, "1 to 64 characters"),
    ],
)
def test_a_pin_that_is_not_allowed_is_refused(
    make_world: MakeWorld, question: dict[str, Any], error: str
) -> None:
    world = make_world()
    with pytest.raises(AskError, match=error.replace("+", r"\+")):
        call_engine(world, "/pin", tokens=[1], **question)


WINDOWS = (2 * BLOCK_TOKENS + 3,)
"""A model with these has blocks of two groups."""


def test_a_prompt_of_several_groups_is_warmed_with_the_blocks_of_all(
    make_world: MakeWorld,
) -> None:
    first = make_world(slots=60, disk_slots=200, windows=WINDOWS)
    (prompt,) = prompts(5, 1)
    fill(first, [prompt])
    first.close()
    world = make_world(slots=60, disk_slots=200, windows=WINDOWS)
    warmed = call_engine(world, "/warm", tokens=prompt)
    assert (warmed["done"], warmed["reason"]) == (PROMPT_BLOCKS, "")
    fetched = world.cache.counters.fetched_blocks
    assert PROMPT_BLOCKS < fetched < 2 * PROMPT_BLOCKS
    assert hits(world, prompt) == PROMPT_BLOCKS
    assert world.cache.counters.fetched_blocks == fetched
    world.assert_at_rest()


def test_pinned_blocks_of_several_groups_are_a_hit_after_a_flood(make_world: MakeWorld) -> None:
    world = make_world(slots=60, windows=WINDOWS)
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])
    assert call_engine(world, "/pin", tokens=prompt)["done"] == PROMPT_BLOCKS
    flood(world, 6)
    world.forget()
    assert hits(world, prompt) == PROMPT_BLOCKS
    world.check_outputs()


def test_no_group_keeps_a_block_of_a_removed_prompt(make_world: MakeWorld) -> None:
    world = make_world(slots=60, disk_slots=200, windows=WINDOWS)
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])
    keys = list(ready_blocks(index_of(world.cache)))
    assert len(keys) > PROMPT_BLOCKS
    assert call_engine(world, "/remove", tokens=prompt)["done"] == PROMPT_BLOCKS
    assert not any(map(any, world.cache.where(keys).values()))
    world.forget()
    assert hits(world, prompt) == 0
    world.assert_at_rest()


def test_no_group_keeps_a_block_of_a_removed_conversation(make_world: MakeWorld) -> None:
    world = make_world(slots=60, disk_slots=200, windows=WINDOWS)
    prompt, other = prompts(5, 2)
    world.generate(prompt, max_tokens=20, params={"flexkv.session": "a"})
    world.settle()
    keys = list(ready_blocks(index_of(world.cache)))
    world.generate(other, params={"flexkv.session": "b"})
    world.settle()
    others = ready_blocks(index_of(world.cache)).keys() - set(keys)
    assert len(keys) > PROMPT_BLOCKS + 1
    removed = call_engine(world, "/remove_session", session="a")
    assert (removed["blocks"] >= len(keys), removed["reason"]) == (True, "")
    assert not any(map(any, world.cache.where(keys).values()))
    assert ready_blocks(index_of(world.cache)).keys() == others
    world.forget()
    assert hits(world, prompt) == 0
    assert hits(world, other) == PROMPT_BLOCKS
    world.assert_at_rest()


def test_between_a_lookup_and_its_load_no_call_begins(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_calls, "_TURN_SECONDS", 0.05)
    world = make_world()
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])
    refused: list[str] = []
    allocate = world.connector.update_state_after_alloc

    def ask_first(*arguments: Any) -> None:
        if not refused:
            with pytest.raises(AskError) as error:
                call_engine(world, "/unpin")
            refused.append(str(error.value))
        allocate(*arguments)

    monkeypatch.setattr(world.connector, "update_state_after_alloc", ask_first)
    assert hits(world, prompt) == PROMPT_BLOCKS
    assert "has let no other call in for 0.05 s" in refused[0]
    assert call_engine(world, "/unpin")["name"] == "default"


def test_a_call_that_fails_is_refused_and_the_cache_goes_on(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])

    def fails(*_: object) -> None:
        raise RuntimeError("for the test")

    with monkeypatch.context() as patch:
        patch.setattr(type(world.cache), "hold", fails)
        with pytest.raises(AskError, match="the call has failed; see the engine's log"):
            call_engine(world, "/pin", tokens=prompt)
    assert call_engine(world, "/pin", tokens=prompt)["done"] == PROMPT_BLOCKS


def test_no_call_begins_while_the_engine_is_in_one(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    began, early = threading.Event(), list[bool]()
    found = world.side.figures.take
    thread = threading.Thread(target=lambda: (call_engine(world, "/unpin"), began.set()))

    def take() -> Any:
        thread.start()
        early.append(began.wait(0.3))
        return found()

    with monkeypatch.context() as patch:
        patch.setattr(world.side.figures, "take", take)
        world.side.figures.note_activity()
        world.connector.get_kv_connector_stats()
    thread.join()
    assert began.is_set()
    assert early == [False]


def test_operators_and_a_busy_engine_do_not_meet(make_world: MakeWorld) -> None:
    """Each step compares the bytes of all blocks that a request reads."""
    world = make_world(slots=40, disk_slots=200)
    texts = prompts(5, 8)
    fill(world, texts)
    ended = threading.Event()
    wrong: list[BaseException] = []

    def operate() -> None:
        rng = random.Random(1)
        while not ended.is_set():
            path = rng.choice(["/warm", "/demote", "/pin", "/unpin", "/lookup"])
            named = {"name": rng.choice("ab")} if "pin" in path else {}
            tokens = {} if path == "/unpin" else {"tokens": rng.choice(texts)}
            try:
                call_engine(world, path, **tokens, **named)
            except AskError as error:
                if "warms another prompt" not in str(error):
                    wrong.append(error)

    threads = [threading.Thread(target=operate) for _ in range(2)]
    for each in threads:
        each.start()
    rng = random.Random(2)
    for _ in range(25):
        world.add(rng.choice(texts))
        world.add(random_prompt(rng, 50))
        world.run()
        world.forget()
    ended.set()
    for each in threads:
        each.join()
    assert wrong == []
    for name in "ab":
        call_engine(world, "/unpin", name=name)
    world.assert_at_rest()


def test_a_removed_prompt_is_on_no_tier_while_others_stay(make_world: MakeWorld) -> None:
    world = make_world(slots=64, disk_slots=200)
    one, other = prompts(5, 2)
    shared = [*one[: 2 * BLOCK_TOKENS], *other]
    fill(world, [one, other])
    world.generate(shared)
    call_engine(world, "/pin", tokens=one)
    removed = call_engine(world, "/remove", tokens=one)
    assert (removed["done"], removed["reason"]) == (PROMPT_BLOCKS, "")
    assert removed["places"]["found"] == 0
    world.forget()
    assert hits(world, other) == PROMPT_BLOCKS
    assert hits(world, one) == 0
    world.settle()
    world.assert_at_rest()


def test_a_prompt_is_removed_while_it_is_stored_and_written(make_world: MakeWorld) -> None:
    world = make_world(slots=64, disk_slots=200)
    world.slow_down(random.Random(3))
    (prompt,) = prompts(5, 1)
    world.add(prompt, max_tokens=1)
    world.step()
    world.step()
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(call_engine(world, "/remove", tokens=prompt))
    )
    thread.start()
    world.run()
    world.settle()
    thread.join()
    assert answers[0]["reason"] == ""
    (places,) = call_engine(world, "/lookup", tokens=prompt)
    assert [each["blocks"] for each in places["tiers"]] == [0, 0]
    world.close()
    again = make_world(slots=64, disk_slots=200)
    assert hits(again, prompt) == 0


@pytest.mark.parametrize("windows", [(), WINDOWS], ids=["full", "hybrid"])
def test_a_clear_leaves_loads_their_blocks_and_publishes_no_store(
    make_world: MakeWorld, windows: tuple[int, ...]
) -> None:
    """Each step compares the bytes of all blocks that a request reads."""
    world = make_world(slots=64, disk_slots=200, windows=windows)
    known, other = prompts(5, 2)
    fill(world, [known])
    world.slow_down(random.Random(3), polls=(4, 8))
    world.add(other, max_tokens=2)
    while not under_way(world) & {Direction.STORE}:
        world.step()
    world.add(known)
    while under_way(world) != {Direction.LOAD, Direction.STORE}:
        world.step()
    had = call_engine(world, "/clear", blocks="all")
    assert (had["blocks"] >= PROMPT_BLOCKS, had["reason"]) == (True, "")
    world.run()
    world.settle()
    world.check_outputs()
    world.assert_at_rest()
    assert not ready_blocks(index_of(world.cache))
    for text in (known, other):
        (places,) = call_engine(world, "/lookup", tokens=text)
        assert [each["blocks"] for each in places["tiers"]] == [0, 0]
    world.forget()
    assert hits(world, known) == 0


def under_way(world: World) -> set[Direction]:
    return {each.transfer.direction for each in copies_of(world.cache)}


def test_a_fetch_under_way_brings_no_cleared_block(make_world: MakeWorld) -> None:
    first = make_world(slots=64, disk_slots=200)
    (prompt,) = prompts(5, 1)
    fill(first, [prompt])
    first.close()
    world = make_world(slots=64, disk_slots=200)
    hang = Hang(world)
    world.add(prompt)
    while not hang.begun:
        world.step()
    call_engine(world, "/clear", blocks="all")
    hang.end()
    world.run()
    world.settle()
    world.check_outputs()
    assert world.cache.counters.loaded_blocks == 0
    assert world.cache.counters.fetched_blocks == 0


def test_blocks_of_new_weights_and_of_old_ones_are_cleared(make_world: MakeWorld) -> None:
    world = make_world(slots=64, disk_slots=200)
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])
    world.side.weights_changed(sure=True)
    world.forget()
    fill(world, [prompt])
    call_engine(world, "/clear", blocks="all")
    assert hits(world, prompt) == 0
    world.close()
    again = make_world(slots=64, disk_slots=200)
    assert hits(again, prompt) == 0


def test_a_clear_is_told_to_subscribers(make_world: MakeWorld) -> None:
    world = make_world(slots=64, disk_slots=200, events=True)
    subscriber = Subscriber(world)
    fill(world, prompts(5, 1))
    wait_until(lambda: all(map(subscriber.told.get, (HOST, DISK))), lambda: drain(subscriber))
    call_engine(world, "/clear", blocks="all")
    wait_until(lambda: not any(map(subscriber.told.get, (HOST, DISK))), lambda: drain(subscriber))
