# SPDX-License-Identifier: Apache-2.0
"""Operators change the cache of an engine under vLLM's OffloadingConnector."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from asked_engine import call_engine
from disk_world import PROMPT_BLOCKS, fill, hits, prompts
from engine_world import World, random_prompt
from offloading_world import HYBRID, SEVERAL_GROUPS, WINDOW, MakeOffloadingWorld

from flexkv.engine.scheduler import operator_calls
from flexkv.operators.ask_door import AskError
from flexkv.types.mover import Direction
from packages.inside import copies_of, index_of
from packages.tier_blocks import ready_blocks


@pytest.mark.parametrize(
    ("windows", "chunk"),
    [((), 1), ((), 2), pytest.param((WINDOW,), 1, marks=SEVERAL_GROUPS)],
    ids=["full", "chunks", "hybrid"],
)
def test_an_idle_engine_warms_a_prompt_after_a_restart(
    make_offloading_world: MakeOffloadingWorld, windows: tuple[int, ...], chunk: int
) -> None:
    options: dict[str, Any] = {"slots": 60, "disk_slots": 200, "windows": windows, "chunk": chunk}
    first = make_offloading_world(**options)
    (prompt,) = prompts(5, 1)
    fill(first, [prompt])
    first.close()
    world = make_offloading_world(**options)
    blocks = PROMPT_BLOCKS // chunk
    (places,) = call_engine(world, "/lookup", tokens=prompt)
    assert [each["blocks"] for each in places["tiers"]] == [0, blocks]
    warmed = call_engine(world, "/warm", tokens=prompt)
    assert (warmed["done"], warmed["reason"]) == (blocks, "")
    fetched = world.cache.counters.fetched_blocks
    assert hits(world, prompt) == PROMPT_BLOCKS
    assert world.cache.counters.fetched_blocks == fetched
    world.check_outputs()


@HYBRID
def test_pinned_blocks_outlast_a_flood_until_they_are_unpinned(
    make_offloading_world: MakeOffloadingWorld, windows: tuple[int, ...]
) -> None:
    world = make_offloading_world(slots=60, windows=windows)
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])
    assert call_engine(world, "/pin", tokens=prompt, name="system")["done"] == PROMPT_BLOCKS
    fill(world, prompts(6, 12))
    assert hits(world, prompt) == PROMPT_BLOCKS
    call_engine(world, "/unpin", name="system")
    fill(world, prompts(7, 12))
    assert hits(world, prompt) == 0


@HYBRID
def test_a_removed_prompt_is_on_no_tier(
    make_offloading_world: MakeOffloadingWorld, windows: tuple[int, ...]
) -> None:
    world = make_offloading_world(slots=60, disk_slots=200, windows=windows)
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])
    keys = list(ready_blocks(index_of(world.cache)))
    assert call_engine(world, "/remove", tokens=prompt)["done"] == PROMPT_BLOCKS
    assert not any(map(any, world.cache.where(keys).values()))
    assert hits(world, prompt) == 0
    world.assert_at_rest()


def test_between_a_match_and_its_load_no_call_begins(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_calls, "_TURN_SECONDS", 0.05)
    world = make_offloading_world()
    (prompt,) = prompts(5, 1)
    fill(world, [prompt])
    refused: list[str] = []
    load = world.manager.prepare_load

    def ask_first(*arguments: Any) -> Any:
        with pytest.raises(AskError) as error:
            call_engine(world, "/remove", tokens=prompt)
        refused.append(str(error.value))
        return load(*arguments)

    monkeypatch.setattr(world.manager, "prepare_load", ask_first)
    assert hits(world, prompt) == PROMPT_BLOCKS
    assert "has let no other call in for 0.05 s" in refused[0]
    assert call_engine(world, "/unpin")["name"] == "default"


def test_no_match_begins_within_an_operators_call(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_offloading_world()
    began, early = threading.Event(), list[bool]()

    def ask() -> tuple[int, bool]:
        began.set()
        return 0, False

    request = SimpleNamespace(request_id="unknown")
    thread = threading.Thread(target=lambda: world.side.match(request, [], 0, 0, ask))

    def unhold(*_: object) -> bool:
        thread.start()
        early.append(began.wait(0.3))
        return True

    monkeypatch.setattr(type(world.cache), "unhold", unhold)
    call_engine(world, "/unpin")
    thread.join()
    assert (early, began.is_set()) == ([False], True)


def test_operators_and_a_busy_engine_do_not_meet(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    """Each step compares the bytes of all blocks that a request reads."""
    world = make_offloading_world(slots=40, disk_slots=200)
    texts = prompts(5, 8)
    fill(world, texts)
    ended = threading.Event()
    wrong: list[BaseException] = []

    def operate() -> None:
        rng = random.Random(1)
        while not ended.is_set():
            path = rng.choice(["/warm", "/demote", "/pin", "/unpin", "/lookup", "/remove"])
            tokens = {} if path == "/unpin" else {"tokens": rng.choice(texts)}
            try:
                call_engine(world, path, **tokens)
            except AskError as error:
                wrong.append(error)

    thread = threading.Thread(target=operate)
    thread.start()
    rng = random.Random(2)
    for _ in range(25):
        world.add(rng.choice(texts))
        world.add(random_prompt(rng, 50))
        world.run()
        world.forget()
    ended.set()
    thread.join()
    assert wrong == []
    call_engine(world, "/unpin")
    world.assert_at_rest()


@HYBRID
def test_a_conversation_is_removed_with_its_answer(
    make_offloading_world: MakeOffloadingWorld, windows: tuple[int, ...]
) -> None:
    world = make_offloading_world(slots=60, disk_slots=200, windows=windows)
    prompt, other = prompts(5, 2)
    had: list[set[bytes]] = []
    for text, session in ((prompt, "a"), (other, "b")):
        world.generate(text, max_tokens=20, params={"flexkv.session": session})
        world.settle()
        had.append(set(ready_blocks(index_of(world.cache))))
    mine, keys = had
    assert call_engine(world, "/release", session="b")["blocks"] >= PROMPT_BLOCKS
    removed = call_engine(world, "/remove_session", session="a")
    assert (removed["blocks"] >= PROMPT_BLOCKS, removed["reason"]) == (True, "")
    left = set(ready_blocks(index_of(world.cache)))
    assert left == keys - mine
    world.forget()
    assert hits(world, other) == PROMPT_BLOCKS
    assert hits(world, prompt) == 0


@HYBRID
def test_a_clear_leaves_loads_their_blocks_and_publishes_no_store(
    make_offloading_world: MakeOffloadingWorld, windows: tuple[int, ...]
) -> None:
    """Each step compares the bytes of all blocks that a request reads."""
    world = make_offloading_world(slots=60, disk_slots=200, windows=windows)
    known, other = prompts(5, 2)
    fill(world, [known])
    world.slow_down(random.Random(3), polls=(4, 8))
    world.add(other, max_tokens=2)
    while not under_way(world) & {Direction.STORE}:
        world.step()
    world.add(known)
    while not under_way(world) & {Direction.LOAD}:
        world.step()
    assert call_engine(world, "/clear", blocks="all")["blocks"] >= PROMPT_BLOCKS
    world.run()
    world.settle()
    world.check_outputs()
    world.assert_at_rest()
    assert not ready_blocks(index_of(world.cache))
    world.forget()
    assert hits(world, known) == 0
    fill(world, [known])
    assert hits(world, known) == PROMPT_BLOCKS
    world.check_outputs()


def under_way(world: World) -> set[Direction]:
    return {each.transfer.direction for each in copies_of(world.cache)}
