# SPDX-License-Identifier: Apache-2.0
"""`flexkv warm`, `demote`, `pin` and `unpin` over the door of a toy engine at rest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pid_namespaces import ELSEWHERE, in_a_namespace
from toy_engine import BLOCK
from toy_world import ToyWorld

from flexkv.session.state_reports import Subject, read_states
from packages.flexkv.tests.cli.stores import Flexkv
from packages.inside import index_of

PROMPT = [*range(3 * BLOCK)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ToyWorld]:
    """An engine that has a prompt on disk alone."""
    world = ToyWorld(tmp_path, disk_slots=64)
    world.generate(PROMPT)
    world.settle()
    world.restart()
    world.engine.side.show(world.config.session_root, "toy")
    yield world
    world.close()


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    file = tmp_path / "prompt.json"
    file.write_text(str(PROMPT))
    return file


def test_a_prompt_is_warmed_pinned_and_unpinned(
    flexkv: Flexkv, world: ToyWorld, tmp_path: Path, prompt: Path
) -> None:
    run, index = tmp_path / "run", index_of(world.engine.cache)
    ended = flexkv("pin", prompt, run)
    assert (ended.code, ended.out.endswith(": pinned nothing of 3 blocks\n")) == (1, True)
    ended = flexkv("warm", prompt, run)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith(": host memory has 3 (12 tokens) of 3 blocks\n")
    ended = flexkv("pin", prompt, run, "--name", "system", "--seconds", "1000")
    assert (ended.code, ended.out.endswith(": pinned 3 (12 tokens) of 3 blocks\n")) == (0, True)
    assert index.pinned_blocks == 3
    ended = flexkv("unpin", run)
    assert (ended.code, ended.out.endswith(": no pin has the name 'default'\n")) == (1, True)
    assert index.pinned_blocks == 3
    ended = flexkv("unpin", run, "--name", "system")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith(": the pins of name 'system' have ended\n")
    assert index.pinned_blocks == 0


def test_a_prompt_is_demoted_unless_it_is_pinned(
    flexkv: Flexkv, world: ToyWorld, tmp_path: Path, prompt: Path
) -> None:
    run = tmp_path / "run"
    flexkv("warm", prompt, run)
    flexkv("pin", prompt, run)
    ended = flexkv("demote", prompt, run)
    assert ended.code == 1
    assert ": demoted nothing of 3 blocks; 3 stay in host memory: lower tiers take" in ended.out
    flexkv("unpin", run)
    ended = flexkv("demote", prompt, run)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith(": demoted 3 (12 tokens) of 3 blocks\n")
    assert len(index_of(world.engine.cache)) == 0
    assert flexkv("demote", prompt, run).code == 1
    assert flexkv("warm", prompt, run).code == 0


def test_a_prompt_that_nobody_has_is_exit_code_1(
    flexkv: Flexkv, world: ToyWorld, tmp_path: Path, prompt: Path
) -> None:
    ended = flexkv("warm", prompt, tmp_path / "run", "--salt", "other")
    assert (ended.code, ended.out.endswith(": host memory has nothing of 3 blocks\n")) == (1, True)


@pytest.mark.parametrize("command", ["warm", "demote", "pin", "unpin"])
def test_a_directory_without_an_engine_is_exit_code_1(
    flexkv: Flexkv, tmp_path: Path, prompt: Path, command: str
) -> None:
    prompts = () if command == "unpin" else (prompt,)
    ended = flexkv(command, *prompts, tmp_path / "none")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"no engine with FlexKV runs in {str(tmp_path / 'none')!r}\n"


def test_a_fingerprint_that_no_engine_has_is_named_with_the_known_ones(
    flexkv: Flexkv, world: ToyWorld, tmp_path: Path, prompt: Path
) -> None:
    run = str(tmp_path / "run")
    (report,) = read_states(run, Subject.HEALTH)
    said = f"no engine has the fingerprint 'ab12'; allowed: {report['fingerprint']}\n"
    for command in (
        ["warm", prompt, run],
        ["unpin", run],
        ["clear", "prompt", prompt, run, "--yes"],
    ):
        ended = flexkv(*command, "--fingerprint", "ab12")
        assert (ended.code, ended.out, ended.err) == (1, "", said)


def test_an_engine_in_another_container_has_no_number_of_ours(
    world: ToyWorld, tmp_path: Path
) -> None:
    command = (sys.executable, "-m", "flexkv", "unpin", str(tmp_path / "run"))
    ended = subprocess.run(in_a_namespace(*command), capture_output=True, text=True, check=False)
    assert ended.stdout == f"process {os.getpid()} {ELSEWHERE}: no pin has the name 'default'\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--seconds", "x"), "--seconds is 'x' on the command line; allowed: a number"),
        (("--seconds", "0"), "on the command line, seconds is 0; allowed: above 0, up to 2592000"),
        (("--seconds", "2592001"), "seconds is 2592001; allowed: above 0, up to 2592000"),
        (("--seconds", "nan"), "on the command line, seconds is nan"),
        (("--name", ""), "on the command line, the name of a pin is ''"),
    ],
)
def test_wrong_usage_is_an_error(
    flexkv: Flexkv, tmp_path: Path, prompt: Path, options: tuple[str, ...], error: str
) -> None:
    ended = flexkv("pin", prompt, tmp_path, *options)
    assert (ended.code, ended.out) == (2, "")
    assert error in ended.err


def test_a_prompt_is_removed_everywhere_for_good(
    flexkv: Flexkv, world: ToyWorld, tmp_path: Path, prompt: Path
) -> None:
    run = tmp_path / "run"
    other = [*range(50, 50 + 3 * BLOCK)]
    world.generate(other)
    world.settle()
    flexkv("warm", prompt, run)
    flexkv("pin", prompt, run)
    ended = flexkv("clear", "prompt", prompt, run)
    assert (ended.code, "--yes is missing" in ended.err) == (2, True)
    ended = flexkv("clear", "prompt", prompt, run, "--yes")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith(": removed 3 (12 tokens) of 3 blocks\n")
    assert flexkv("lookup", prompt, run).code == 1
    assert flexkv("clear", "prompt", prompt, run, "--yes").out.endswith(
        ": removed nothing of 3 blocks\n"
    )
    world.restart()
    assert world.hits(other) == 3
    assert world.hits(PROMPT) == 0
