# SPDX-License-Identifier: Apache-2.0
"""`flexkv lookup` over doors of real caches."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_engine import BLOCK, ToyRequest
from toy_world import ToyWorld

from flexkv.session.state_reports import StateReport, Subject
from packages.flexkv.tests.cli.stores import Flexkv
from packages.flexkv.tests.service.served import Scheduler, Service

PROMPT = [*range(3 * BLOCK)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The runtime directory of an engine that has served a prompt."""
    world = ToyWorld(tmp_path, disk_slots=64)
    world.engine.side.show(world.config.session_root, "toy")
    world.generate(PROMPT)
    world.settle()
    yield tmp_path / "run"
    world.close()


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    """A file with the prompt and one more block, as /tokenize gives them."""
    file = tmp_path / "prompt.json"
    file.write_text(str([*PROMPT, *range(BLOCK)]))
    return file


def test_an_engine_is_asked(flexkv: Flexkv, run: Path, prompt: Path) -> None:
    ended = flexkv("lookup", prompt, run)
    first, *tiers = ended.out.splitlines()
    assert (ended.code, ended.err) == (0, "")
    assert first.startswith("toy, process ")
    assert first.endswith("3 (12 tokens) of 4 blocks")
    assert tiers == ["  host      3 (12 tokens)", "  disk      3 (12 tokens)"]
    (answer,) = flexkv("lookup", prompt, run, "--json").json
    assert (answer["found"], answer["tiers"][1]["blocks"]) == (3, 3)
    assert flexkv("lookup", prompt, run, "--fingerprint", answer["fingerprint"]).out == ended.out
    assert flexkv("lookup", prompt, run, "--fingerprint", "ab12").code == 1


def test_an_answer_of_tokenize_is_a_prompt(flexkv: Flexkv, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenized"
    file.write_text(json.dumps({"count": 12, "max_model_len": 4096, "tokens": PROMPT}))
    assert "3 (12 tokens) of 3 blocks" in flexkv("lookup", file, run).out


def test_hashes_are_those_of_the_engine(flexkv: Flexkv, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "hashes"
    file.write_text("\n".join(each.hex() for each in ToyRequest("q", PROMPT, 1).block_hashes))
    ended = flexkv("lookup", "--hashes", file, run)
    assert (ended.code, "3 (12 tokens) of 3 blocks" in ended.out) == (0, True)


def test_a_prompt_that_nobody_has_is_exit_code_1(flexkv: Flexkv, run: Path, prompt: Path) -> None:
    ended = flexkv("lookup", prompt, run, "--salt", "other")
    assert (ended.code, ended.err) == (1, "")
    assert ended.out.endswith(": nothing of 4 blocks\n  host      nothing\n  disk      nothing\n")


def test_a_service_is_asked_by_hashes(flexkv: Flexkv, tmp_path: Path, prompt: Path) -> None:
    service = Service(tmp_path)
    scheduler = Scheduler(service.root)
    keys = [number.to_bytes(4, "big") for number in range(3)]
    scheduler.store(keys[:2])
    file = tmp_path / "hashes"
    file.write_text(" ".join(each.hex() for each in keys))
    ended = flexkv("lookup", "--hashes", file, service.root)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[0].startswith("service, process ")
    assert ended.out.splitlines()[0].endswith(", fingerprint same: 2 of 3 blocks")
    ended = flexkv("lookup", prompt, service.root)
    assert ended.code == 1
    assert "a service knows no tokens" in ended.err
    scheduler.close()
    service.close()


@pytest.mark.parametrize(
    ("text", "options", "error"),
    [
        ("1 2 x", (), "has no token ids (invalid literal for int() with base 10: 'x')"),
        ('{"a":' + "[" * 100000, (), "has no token ids ("),
        ("", (), "the prompt has 0 tokens and 0 hashes"),
        ("1 -2", (), "the token -2"),
        ("zz", ("--hashes",), "the hash 'zz'"),
        ("00ff00ff", ("--hashes", "--salt", "a"), "a salt with tokens only"),
    ],
)
def test_what_is_no_prompt_is_an_error(
    flexkv: Flexkv, tmp_path: Path, text: str, options: tuple[str, ...], error: str
) -> None:
    file = tmp_path / "prompt"
    file.write_text(text)
    ended = flexkv("lookup", file, tmp_path, *options)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"flexkv lookup: error: FILE is {str(file)!r} on the command line")
    assert error in ended.err


def test_a_file_that_cannot_be_read_is_an_error(flexkv: Flexkv, tmp_path: Path) -> None:
    ended = flexkv("lookup", tmp_path / "none", tmp_path)
    assert (ended.code, "No such file or directory; allowed:" in ended.err) == (2, True)


def test_engines_that_do_not_answer_are_named(flexkv: Flexkv, tmp_path: Path, prompt: Path) -> None:
    ended = flexkv("lookup", prompt, tmp_path / "none")
    assert ended.code == 1
    assert ended.err == f"no engine with FlexKV runs in {str(tmp_path / 'none')!r}\n"
    reports = [
        StateReport(str(tmp_path / "run"), {"engine": "vllm"} | door, Subject.HEALTH)
        for door in ({}, {"door": "flexkv engine gone"})
    ]
    for each in reports:
        each.begin(lambda: {"problems": []})
    ended = flexkv("lookup", prompt, tmp_path / "run")
    assert ended.code == 1
    assert sorted("has no door" in each for each in ended.err.splitlines()) == [False, True]
    assert "no engine vllm, process" in ended.err
    for each in reports:
        each.close()


def test_a_pipe_is_read_to_its_end(flexkv: Flexkv, run: Path, tmp_path: Path) -> None:
    """As a shell passes it for `<(COMMAND)`."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    text = " " * 100_000 + str(PROMPT)  # more than a pipe holds
    writer = threading.Thread(target=fifo.write_text, args=(text, "utf-8"))
    writer.start()
    assert flexkv("lookup", fifo, run).code == 0
    writer.join()


def test_what_has_no_end_is_an_error_and_not_read_in_part(flexkv: Flexkv, tmp_path: Path) -> None:
    ended = flexkv("lookup", "/dev/zero", tmp_path)
    assert ended.code == 2
    assert f"larger than {64 << 20} bytes; allowed: a " in ended.err
