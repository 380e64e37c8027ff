# SPDX-License-Identifier: Apache-2.0
"""`flexkv clear engines` over the door of a toy engine at rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asked_door import call_door
from refused_writes import refuse_writes
from toy_engine import BLOCK, ToyRequest
from toy_world import ToyWorld

from flexkv.client import Reset
from flexkv.operators import ask_door
from flexkv.operators.ask_door import AskError
from flexkv.session.state_reports import Subject, read_states
from packages.flexkv.tests.cli.stores import Flexkv
from packages.inside import fail_resets

PROMPT = [*range(3 * BLOCK)]
OTHER = "ab12" * 8


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ToyWorld]:
    """An engine that has a prompt in host memory and on disk."""
    world = ToyWorld(tmp_path, disk_slots=64)
    world.generate(PROMPT)
    world.settle()
    show(world)
    yield world
    world.close()


def show(world: ToyWorld) -> None:
    world.engine.side.show(world.config.session_root, "toy")


def tiers(world: ToyWorld, prompt: list[int]) -> list[int]:
    """Whole blocks of a prompt in each tier."""
    keys = ToyRequest("q", prompt, 1).block_hashes
    return [sum(map(bool, has)) for has in world.engine.cache.where(keys).values()]


def test_an_engine_drops_all_its_blocks_for_good(
    flexkv: Flexkv, world: ToyWorld, tmp_path: Path
) -> None:
    run, other = tmp_path / "run", [*range(50, 50 + 3 * BLOCK)]
    world.generate(other)
    world.settle()
    (report,) = read_states(str(run), Subject.HEALTH)
    name = f"process {os.getpid()}, fingerprint {report['fingerprint']}"
    ended = flexkv("clear", "engines", report["fingerprint"], run, "--yes")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"toy, {name}: cleared; host memory had 6 blocks\n"
    assert tiers(world, PROMPT) == tiers(world, other) == [0, 0]
    world.restart()
    assert world.hits(PROMPT) == 0


def test_what_is_stored_after_a_clear_is_found_by_the_next_process(
    flexkv: Flexkv, world: ToyWorld, tmp_path: Path
) -> None:
    assert flexkv("clear", "engines", "all", tmp_path / "run", "--yes").code == 0
    assert world.hits(PROMPT) == 0
    world.settle()
    assert tiers(world, PROMPT) == [3, 3]
    world.restart()
    assert world.hits(PROMPT) == 3


def test_a_clear_ends_pins_and_what_is_known_of_conversations(
    flexkv: Flexkv, world: ToyWorld, tmp_path: Path
) -> None:
    root = str(tmp_path / "run")
    params = {"flexkv.session": "a"}
    world.generate([*PROMPT, 99], kv_transfer_params=params)
    world.settle()
    call_door(root, "/pin", tokens=PROMPT)
    assert call_door(root, "/clear", blocks="all")["blocks"] == 3
    assert call_door(root, "/release", session="a")["blocks"] == 0
    assert tiers(world, PROMPT) == [0, 0]
    assert call_door(root, "/clear", blocks="all")["blocks"] == 0


def test_nothing_is_dropped_without_a_yes(flexkv: Flexkv, world: ToyWorld, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = flexkv("clear", "engines", "all", run)
    assert (ended.code, "--yes is missing on the command line" in ended.err) == (2, True)
    ended = flexkv("clear", "engines", "all", run, "--dry-run")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"would clear engine toy, process {os.getpid()}\n"
    assert tiers(world, PROMPT) == [3, 3]


@pytest.mark.parametrize("options", [("--yes",), ("--dry-run",), ()])
def test_a_directory_without_such_an_engine_is_exit_code_1(
    flexkv: Flexkv, world: ToyWorld, tmp_path: Path, options: tuple[str, ...]
) -> None:
    none = tmp_path / "none"
    for words, said in (
        (("all", none), f"no engine with FlexKV runs in {str(none)!r}\n"),
        ((OTHER, tmp_path / "run"), f"no engine has the fingerprint {OTHER!r}; "),
    ):
        ended = flexkv("clear", "engines", *words, *options)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith(said)
    assert tiers(world, PROMPT) == [3, 3]


@pytest.mark.parametrize("option", ["--yes", "--dry-run"])
def test_an_engine_that_starts_behind_the_question_is_not_cleared(
    flexkv: Flexkv, world: ToyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Nobody has agreed to it, and a dry run clears none."""
    answers = iter([[]])
    read = ask_door.read_states

    def late(*args: Any) -> Any:
        found = next(answers, None)
        return read(*args) if found is None else found

    monkeypatch.setattr(ask_door, "read_states", late)
    assert flexkv("clear", "engines", "all", tmp_path / "run", option).code == 1
    assert tiers(world, PROMPT) == [3, 3]


def test_a_prompt_is_no_question_about_all_blocks(world: ToyWorld, tmp_path: Path) -> None:
    with pytest.raises(AskError, match=r"is not about all blocks .*allowed: .* or to /remove"):
        call_door(str(tmp_path / "run"), "/clear", tokens=PROMPT)
    assert tiers(world, PROMPT) == [3, 3]


def test_a_clear_that_fails_says_so_and_nothing_is_found_until_one_succeeds(
    flexkv: Flexkv, world: ToyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_resets(patch, world.engine.cache, Reset.EMPTY, RuntimeError("for the test"))
        ended = flexkv("clear", "engines", "all", tmp_path / "run", "--yes")
    assert (ended.code, ended.out) == (1, "")
    assert "the cache is not cleared, and nothing is loaded or stored until it is" in ended.err
    assert world.hits(PROMPT) == 0
    assert flexkv("clear", "engines", "all", tmp_path / "run", "--yes").code == 0
    assert world.hits([*range(70, 70 + 3 * BLOCK)]) == 0
    assert world.hits([*range(70, 70 + 3 * BLOCK)]) == 3


@pytest.mark.parametrize("what", ["engines", "session", "prompt"])
def test_a_removal_that_a_disk_refuses_is_exit_code_1_until_it_lasts(
    flexkv: Flexkv,
    world: ToyWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    world.generate(PROMPT, kv_transfer_params={"flexkv.session": "a"})
    world.settle()
    (tmp_path / "prompt").write_text(str(PROMPT))
    chosen = {"engines": "all", "session": "a", "prompt": tmp_path / "prompt"}[what]
    with monkeypatch.context() as patch:
        refuse_writes(patch)
        for _ in range(2):  # the second time, the engine knows none of the blocks
            ended = flexkv("clear", what, chosen, tmp_path / "run", "--yes")
            assert (ended.code, "Input/output error" in ended.out) == (1, True)
    assert flexkv("clear", what, chosen, tmp_path / "run", "--yes").code == 0
    world.restart()
    assert world.hits(PROMPT) == 0
